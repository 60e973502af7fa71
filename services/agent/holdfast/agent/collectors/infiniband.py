"""InfiniBand and RoCE ports, from /sys/class/infiniband: state and error counters.

Reading the counters of a restricted PCI function makes mlx5 log a failure for each read (gpud #1164). `HOLDFAST_NIC_EXCLUDE`
names such devices; they are not read."""

from __future__ import annotations

import fnmatch
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from holdfast.agent.collectors.protocol import Probe, Surroundings
from holdfast.domain.signals import NicSample

log = structlog.get_logger("holdfast.agent.infiniband")

INTERVAL_S = 5.0
DEADLINE_S = 5.0
PORTS_MAX = 256
UNKNOWN = -1
COUNTER_MAX = (1 << 63) - 1

# Column of the sample → file below the port's directory.
COUNTERS = {
    "symbol_errors": "counters/symbol_error",
    "link_downed": "counters/link_downed",
    "link_recoveries": "counters/link_error_recovery",
    "buffer_overruns": "counters/excessive_buffer_overrun_errors",
    "integrity_errors": "counters/local_link_integrity_errors",
    "rnr_retries": "hw_counters/rnr_nak_retry_err",
    "slow_restarts": "hw_counters/roce_slow_restart",
}


@dataclass(frozen=True, slots=True)
class _Port:
    device: str
    port: int
    link_layer: str
    state: str
    phys_state: str
    counters: dict[str, int]


def build(surroundings: Surroundings) -> Probe | None:
    """Build the collector; None if there is no such device."""
    if not surroundings.infiniband.is_dir():
        return None
    ports = Ports(surroundings.node, surroundings.infiniband, surroundings.nic_exclude)
    return Probe(
        "infiniband", surroundings.node, lambda: (ports.sample(),), interval_s=INTERVAL_S, deadline_s=DEADLINE_S
    )


class Ports:
    """All ports below `root`. Unreadable files are counted in `rejections`, and logged at powers of two per file."""

    def __init__(self, node: str, root: Path, exclude: Sequence[str] = ()) -> None:
        self._node, self._root, self._exclude = node, root, tuple(exclude)
        self.rejections: Counter[str] = Counter()

    def sample(self) -> NicSample:
        """Read the counters. Raises OSError if the root cannot be listed."""
        ports = [
            found
            for device in sorted(self._root.iterdir())
            if not any(fnmatch.fnmatch(device.name, pattern) for pattern in self._exclude)
            for number in self._numbers(device)
            if (found := self._port(device, number)) is not None
        ][:PORTS_MAX]
        columns = {name: tuple(port.counters[name] for port in ports) for name in COUNTERS}
        return NicSample(
            node=self._node,
            at=time.time(),
            device=tuple(port.device for port in ports),
            port=tuple(port.port for port in ports),
            link_layer=tuple(port.link_layer for port in ports),
            state=tuple(port.state for port in ports),
            phys_state=tuple(port.phys_state for port in ports),
            **columns,
        )

    def _numbers(self, device: Path) -> list[int]:
        try:
            names = [entry.name for entry in (device / "ports").iterdir()]
        except OSError:
            return []  # removed since the listing; the sample does not contain it
        return sorted(int(name) for name in names if name.isdecimal() and len(name) < 6)

    def _port(self, device: Path, number: int) -> _Port | None:
        place = device / "ports" / str(number)
        state = self._word(place / "state")
        if state is None:
            return None
        return _Port(
            device=device.name.encode(errors="replace").decode(),
            port=number,
            link_layer=self._word(place / "link_layer") or "",
            state=state,
            phys_state=self._word(place / "phys_state") or "",
            counters={name: self._number(place / file) for name, file in COUNTERS.items()},
        )

    def _word(self, path: Path) -> str | None:
        """ "4: ACTIVE" → "ACTIVE"."""
        text = self._text(path)
        return None if text is None else text.rpartition(":")[2].strip()[:32]

    def _number(self, path: Path) -> int:
        text = self._text(path)
        if text is None:
            return UNKNOWN
        if not text.isdecimal() or len(text) > 20:
            self._reject(path, f"not a number: {text[:40]!r}")
            return UNKNOWN
        return min(int(text), COUNTER_MAX)

    def _text(self, path: Path) -> str | None:
        try:
            return path.read_bytes()[:256].decode(errors="replace").strip()
        except FileNotFoundError:
            return None  # this kind of device has no such counter
        except OSError as error:
            self._reject(path, str(error))
            return None

    def _reject(self, path: Path, reason: str) -> None:
        name = str(path.relative_to(self._root))
        self.rejections[name] += 1
        if self.rejections[name].bit_count() == 1:
            log.warning("port counters rejected", file=name, reason=reason, so_far=self.rejections[name])
