"""GPU health through NVML, read by a child process (`nvml_reader`), because a driver call may hang."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from holdfast.agent.collectors.protocol import Surroundings
from holdfast.agent.collectors.reader_process import ReaderProcess, within, word
from holdfast.domain.signals import CollectorSilent, GpuHealth, GpuSample, KernelEvent, KernelLine, NodeSignal

# For fast values; slow ones are read every sixth time. NVML is not polled more often than once per second.
INTERVAL_S = 5.0
CALL_DEADLINE_S = 4.0  # for one GPU's reading; after that its pending call is reported and it is not queried again
DEADLINE_S = 3 * INTERVAL_S  # without any line, after which the process counts as hung (NVSentinel: three polls)
GPUS_MAX = 256
DRIVER = Path("/proc/driver/nvidia/version")
UNKNOWN = -1


def build(surroundings: Surroundings) -> NvmlCollector | None:
    """Build the collector; None without a driver or without `pynvml` (the extra `nvml`), unless there is a replay file."""
    replay = surroundings.nvml_replay
    if replay is None and (not DRIVER.exists() or importlib.util.find_spec("pynvml") is None):
        return None
    return NvmlCollector(surroundings.node, expected=surroundings.gpus, replay=replay)


class NvmlCollector(ReaderProcess):
    """`rejections` counts "call code" for calls that NVML refused, and "garbage"."""

    name = "nvml"

    def __init__(
        self,
        node: str,
        *,
        expected: int = 0,
        replay: Path | None = None,
        interval_s: float = INTERVAL_S,
        deadline_s: float = DEADLINE_S,
        call_deadline_s: float = CALL_DEADLINE_S,
    ) -> None:
        """`expected`: number of GPUs of this node; 0 = the highest number seen."""
        super().__init__(node, deadline_s=deadline_s)
        self._expected, self._replay = expected, replay
        self._interval_s, self._call_deadline_s = interval_s, call_deadline_s
        self._late = 0

    def signals(self, record: Mapping[str, Any]) -> list[NodeSignal]:
        if "event" in record:
            return [_event(self._node, record)]
        self._note_refusals(record["refused"])
        signals = list(self._late_gpus(record))
        if record["gpus"]:
            signals.append(_sample(self._node, record))
        if record["health"]:
            self._expected = max(self._expected, len(record["health"]))
            signals.append(_health(self._node, record, self._expected))
        return signals

    def command(self) -> list[str]:
        module = "holdfast.agent.collectors.nvml_reader"
        times = [str(self._interval_s), str(self._call_deadline_s)]
        return [sys.executable, "-m", module, *times, *([str(self._replay)] if self._replay else [])]

    def _late_gpus(self, record: Mapping[str, Any]) -> Iterator[NodeSignal]:
        late = record["late"]
        self._late = self._late + 1 if late else 0
        if late:
            pending = ", ".join(f"GPU {int(entry['gpu'])} in {entry['call']}" for entry in late)
            reason = f"no answer within {self._call_deadline_s:g} s: {pending}"
            yield CollectorSilent(self._node, float(record["at"]), self.name, self._late, reason[:500])

    def _note_refusals(self, refused: Sequence[Sequence[Any]]) -> None:
        for gpu, call, code in refused:
            self.reject(f"{call} {code}", gpu=gpu)


# ---------------------------------------------------------------- lines of the reader


def _event(node: str, record: Mapping[str, Any]) -> KernelLine:
    """Return the event as a kernel-log line. If the kernel log contains the Xid as well, both are one fault. `NVML event` marks
    the source."""
    event = record["event"]
    xid, gpu, pci = _index(event["data"]), _index(event["gpu"]), word(event["pci"])
    text = f"NVML event: Xid {xid} on GPU {gpu} ({pci})"
    return KernelLine(node, _time(record), text, xid, pci, gpu, KernelEvent.XID)


def _sample(node: str, record: Mapping[str, Any]) -> GpuSample:
    rows = _rows(record["gpus"])
    return GpuSample(
        node=node,
        at=_time(record),
        gpu=_column(rows, "gpu", _index, 0),
        uuid=_column(rows, "uuid", word, ""),
        temperature_c=_column(rows, "temperature_c", float, 0.0),
        power_w=_column(rows, "power_w", float, 0.0),
        memory_used=_column(rows, "memory_used", _total, 0),
        ecc_uncorrected=_column(rows, "ecc_uncorrected", _total, 0),
        recovery_action=_column(rows, "recovery_action", _count, UNKNOWN),
        lost=_column(rows, "lost", bool, False),
    )


# Columns of `GpuHealth` with integers, by their largest value.
_COUNTS = (
    *("remap_pending", "remap_failed", "nvlinks_up", "nvlinks_down", "fabric_state", "utilization"),
    *("pcie_width", "pcie_width_max", "pcie_gen", "pcie_gen_max"),
)
_TOTALS = (
    *("ecc_corrected", "ecc_uncorrected_ever", "remapped_rows", "nvlink_errors", "pcie_replays"),
    *("thermal_slowdown_ns", "power_brake_ns", "fabric_health"),
)


def _health(node: str, record: Mapping[str, Any], expected: int) -> GpuHealth:
    rows = _rows(record["health"])
    for row in rows:
        _, row["remapped_rows"], row["remap_pending"], row["remap_failed"] = row.get("remapped", (UNKNOWN,) * 4)
        row["nvlinks_up"], row["nvlinks_down"] = row.get("nvlinks", (UNKNOWN, UNKNOWN))
        row["fabric_state"], row["fabric_health"] = row.get("fabric", (UNKNOWN, UNKNOWN))

    return GpuHealth(
        node=node,
        at=_time(record),
        expected=expected,
        gpu=_column(rows, "gpu", _index, 0),
        uuid=_column(rows, "uuid", word, ""),
        margin_c=_column(rows, "margin_c", float, math.inf),
        rejected=_column(rows, "rejected", _index, 0),
        **{name: _column(rows, name, _count, UNKNOWN) for name in _COUNTS},
        **{name: _column(rows, name, _total, UNKNOWN) for name in _TOTALS},
    )


T = TypeVar("T")


def _column(rows: Sequence[Mapping[str, Any]], name: str, kind: Callable[[Any], T], unknown: T) -> tuple[T, ...]:
    return tuple(kind(row[name]) if row.get(name) is not None else unknown for row in rows)


def _index(value: Any) -> int:
    return within(value, 0, 1 << 31)


def _count(value: Any) -> int:
    return within(value, UNKNOWN, 1 << 31)


def _total(value: Any) -> int:
    return within(value, UNKNOWN, 1 << 63)


def _rows(raw: Any) -> list[dict[str, Any]]:
    rows = [dict(row) for row in raw]
    if len(rows) > GPUS_MAX:
        raise ValueError(f"{len(rows)} GPUs")
    return rows


def _time(record: Mapping[str, Any]) -> float:
    at = float(record["at"])
    if not math.isfinite(at):
        raise ValueError(f"{at} is not a time")
    return at
