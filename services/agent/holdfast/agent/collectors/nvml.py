"""GPU health through NVML, read by a child process (`nvml_reader`): a wedged driver costs a process and not the agent."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import anyio
import structlog

from holdfast.agent.collectors.protocol import Emit, Surroundings
from holdfast.domain.signals import CollectorSilent, GpuHealth, GpuSample, KernelEvent, KernelLine, NodeSignal
from holdfast.runtime.children import Child, running, spawn

log = structlog.get_logger("holdfast.agent.nvml")

INTERVAL_S = 5.0  # of what changes fast; what changes slowly is read every sixth time. NVML is never polled below 1 s
CALL_DEADLINE_S = 4.0  # for one GPU's reading: then its thread is named and left alone
DEADLINE_S = 3 * INTERVAL_S  # without any line: then the process itself is stuck (NVSentinel: three polls)
MISSES_MAX = 4  # then the reader is replaced: the driver may have come back, the process stuck in it has not
LINE_BYTES_MAX = 256 << 10
GPUS_MAX = 256
DRIVER = Path("/proc/driver/nvidia/version")
UNKNOWN = -1


def build(surroundings: Surroundings) -> NvmlCollector | None:
    """None where there is no driver, or no `pynvml` (the extra `nvml`), and nothing recorded to read instead."""
    replay = surroundings.nvml_replay
    if replay is None and (not DRIVER.exists() or importlib.util.find_spec("pynvml") is None):
        return None
    return NvmlCollector(surroundings.node, expected=surroundings.gpus, replay=replay)


class NvmlCollector:
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
        """`expected`: GPUs that this node should have; 0 = as many as were ever seen."""
        self._node, self._expected, self._replay = node, expected, replay
        self._interval_s, self._deadline_s, self._call_deadline_s = interval_s, deadline_s, call_deadline_s
        self._late = 0
        self._unread = b""  # the newest line that was no record: a process that ends says why in such a one
        self.rejections: Counter[str] = Counter()  # "call code" or "garbage" → how often

    async def run(self, emit: Emit) -> None:
        """Raises `OSError` when the reader ends or has to be replaced."""
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(ours, "rb", buffering=0) as pipe:
            try:
                child = spawn("nvml-reader", self._command(), output=theirs)
            finally:
                os.close(theirs)
            async with running(child, stop_grace_s=0.0):
                await self._read(child, pipe, emit)

    async def _read(self, child: Child, pipe: IO[bytes], emit: Emit) -> None:
        misses = 0
        buffer = b""
        while misses < MISSES_MAX:
            raw: bytes | None = None
            with anyio.move_on_after(self._deadline_s):
                await anyio.wait_readable(pipe)
                raw = pipe.read(LINE_BYTES_MAX)
            if raw is None:
                misses += 1
                reason = f"NVML did not answer within {self._deadline_s:g} s"
                emit(CollectorSilent(self._node, time.time(), self.name, misses, reason))
                continue
            if not raw:
                raise OSError(f"the NVML reader ended with code {await child.wait()}: {self._last_words(buffer)}")
            *lines, buffer = (buffer + raw).split(b"\n")
            buffer = buffer[-LINE_BYTES_MAX:]
            for line in lines:
                for signal in self.take(line):
                    misses = 0
                    emit(signal)
        raise OSError(f"the NVML reader (pid {child.pid}) has been silent for {misses} deadlines and is replaced")

    def take(self, line: bytes) -> list[NodeSignal]:
        """What one line of the reader says. A line that cannot be read is counted, logged and passed over."""
        try:
            record = json.loads(line)
            if "event" in record:
                return [_event(self._node, record)]
            self._note_refusals(record["refused"])
            signals = list(self._late_gpus(record))
            if record["gpus"]:
                signals.append(_sample(self._node, record))
            if record["health"]:
                self._expected = max(self._expected, len(record["health"]))
                signals.append(_health(self._node, record, self._expected))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            self._unread = line
            self._reject("garbage", line=line[:200], reason=repr(error))
            return []
        return signals

    def _late_gpus(self, record: Mapping[str, Any]) -> Iterator[NodeSignal]:
        late = record["late"]
        self._late = self._late + 1 if late else 0
        if late:
            words = ", ".join(f"GPU {int(entry['gpu'])} in {entry['call']}" for entry in late)
            reason = f"no answer within {self._call_deadline_s:g} s: {words}"
            yield CollectorSilent(self._node, float(record["at"]), self.name, self._late, reason[:500])

    def _note_refusals(self, refused: Sequence[Sequence[Any]]) -> None:
        for gpu, call, code in refused:
            self._reject(f"{call} {code}", gpu=gpu)

    def _reject(self, what: str, **details: object) -> None:
        self.rejections[what] += 1
        if self.rejections[what].bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
            log.warning("NVML answer rejected", what=what, so_far=self.rejections[what], **details)

    def _last_words(self, buffer: bytes) -> str:
        return (buffer or self._unread).decode(errors="replace").strip()[-500:] or "it left no word"

    def _command(self) -> list[str]:
        module = "holdfast.agent.collectors.nvml_reader"
        times = [str(self._interval_s), str(self._call_deadline_s)]
        return [sys.executable, "-m", module, *times, *([str(self._replay)] if self._replay else [])]


# ---------------------------------------------------------------- lines of the reader


def _event(node: str, record: Mapping[str, Any]) -> KernelLine:
    """As if the kernel log had said it; where both do, the two are one fault. `NVML event` marks the source."""
    event = record["event"]
    xid, gpu, pci = _index(event["data"]), _index(event["gpu"]), _word(event["pci"])
    text = f"NVML event: Xid {xid} on GPU {gpu} ({pci})"
    return KernelLine(node, _time(record), text, xid, pci, gpu, KernelEvent.XID)


def _sample(node: str, record: Mapping[str, Any]) -> GpuSample:
    rows = _rows(record["gpus"])
    return GpuSample(
        node=node,
        at=_time(record),
        gpu=_column(rows, "gpu", _index, 0),
        uuid=_column(rows, "uuid", _word, ""),
        temperature_c=_column(rows, "temperature_c", float, 0.0),
        power_w=_column(rows, "power_w", float, 0.0),
        memory_used=_column(rows, "memory_used", _total, 0),
        ecc_uncorrected=_column(rows, "ecc_uncorrected", _total, 0),
        recovery_action=_column(rows, "recovery_action", _count, UNKNOWN),
        lost=_column(rows, "lost", bool, False),
    )


def _health(node: str, record: Mapping[str, Any], expected: int) -> GpuHealth:
    rows = _rows(record["health"])
    for row in rows:
        _, row["remapped_rows"], row["remap_pending"], row["remap_failed"] = row.get("remapped", (UNKNOWN,) * 4)
        row["nvlinks_up"], row["nvlinks_down"] = row.get("nvlinks", (UNKNOWN, UNKNOWN))
        row["fabric_state"], row["fabric_health"] = row.get("fabric", (UNKNOWN, UNKNOWN))

    def counts(name: str) -> tuple[int, ...]:
        return _column(rows, name, _count, UNKNOWN)

    def totals(name: str) -> tuple[int, ...]:
        return _column(rows, name, _total, UNKNOWN)

    return GpuHealth(
        node=node,
        at=_time(record),
        expected=expected,
        gpu=_column(rows, "gpu", _index, 0),
        uuid=_column(rows, "uuid", _word, ""),
        ecc_corrected=totals("ecc_corrected"),
        ecc_uncorrected_ever=totals("ecc_uncorrected_ever"),
        remapped_rows=totals("remapped_rows"),
        remap_pending=counts("remap_pending"),
        remap_failed=counts("remap_failed"),
        nvlinks_up=counts("nvlinks_up"),
        nvlinks_down=counts("nvlinks_down"),
        nvlink_errors=totals("nvlink_errors"),
        pcie_replays=totals("pcie_replays"),
        pcie_width=counts("pcie_width"),
        pcie_width_max=counts("pcie_width_max"),
        pcie_gen=counts("pcie_gen"),
        pcie_gen_max=counts("pcie_gen_max"),
        utilization=counts("utilization"),
        thermal_slowdown_ns=totals("thermal_slowdown_ns"),
        power_brake_ns=totals("power_brake_ns"),
        margin_c=_column(rows, "margin_c", float, math.inf),
        fabric_state=counts("fabric_state"),
        fabric_health=totals("fabric_health"),
        rejected=_column(rows, "rejected", _index, 0),
    )


T = TypeVar("T")


def _column(rows: Sequence[Mapping[str, Any]], name: str, kind: Callable[[Any], T], unknown: T) -> tuple[T, ...]:
    return tuple(kind(row[name]) if row.get(name) is not None else unknown for row in rows)


def _word(value: Any) -> str:
    return str(value)[:96].encode(errors="replace").decode()  # JSON can hold half a character, a message cannot


def _index(value: Any) -> int:
    return _within(value, 0, 1 << 31)


def _count(value: Any) -> int:
    return _within(value, UNKNOWN, 1 << 31)


def _total(value: Any) -> int:
    return _within(value, UNKNOWN, 1 << 63)


def _within(value: Any, low: int, high: int) -> int:
    """Raises ValueError for a number that would not travel: what a driver answers is not to be trusted to be sane."""
    number = int(value)
    if not low <= number < high:
        raise ValueError(f"{number} is out of range")
    return number


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
