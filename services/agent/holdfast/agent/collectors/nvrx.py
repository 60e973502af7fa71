"""Health checks of nvidia-resiliency-ext, if it is installed, read by a child process (`nvrx_reader`).

They check the GPU's recovery action, NVLink and the NIC of each GPU, which Holdfast's own collectors read as well and more
often. They serve as a second opinion, and by themselves cause only warnings."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from holdfast.agent.collectors.nvml import DRIVER
from holdfast.agent.collectors.protocol import Surroundings
from holdfast.agent.collectors.reader_process import ReaderProcess, within, word
from holdfast.domain.signals import HealthChecks, NodeSignal, Verdict

log = structlog.get_logger("holdfast.agent.nvrx")

PACKAGE = "nvidia_resiliency_ext"
INTERVAL_S = 60.0  # interval of NVRx
DEADLINE_S = 2.5 * INTERVAL_S
CHECKS_MAX = 1024
GPU_MAX = 1 << 16
NODE = -1  # in the column `gpu`: the check covers the node


def build(surroundings: Surroundings) -> NvrxCollector | None:
    """Build the collector; None if NVRx is not installed, or if there is neither a driver nor a port to check."""
    if not DRIVER.exists() and not surroundings.infiniband.is_dir():
        return None
    if surroundings.nvrx_path is None and importlib.util.find_spec(PACKAGE) is None:
        return None
    return NvrxCollector(surroundings.node, path=surroundings.nvrx_path)


class NvrxCollector(ReaderProcess):
    name = "nvrx"

    def __init__(
        self, node: str, *, path: Path | None = None, interval_s: float = INTERVAL_S, deadline_s: float = DEADLINE_S
    ) -> None:
        """`path`: directory with the package and its dependencies, if they are not installed in this environment."""
        super().__init__(node, deadline_s=deadline_s)
        self._path, self._interval_s = path, interval_s
        self.tool = ""  # name and version; empty before the first output

    def signals(self, record: Mapping[str, Any]) -> list[NodeSignal]:
        checks = list(record["checks"])[:CHECKS_MAX]
        found = HealthChecks(
            node=self._node,
            at=float(record["at"]),
            tool=f"{self.name} {word(record['version'], 32)}",
            check=tuple(word(check["check"]) for check in checks),
            gpu=tuple(NODE if check["gpu"] is None else within(check["gpu"], 0, GPU_MAX) for check in checks),
            verdict=tuple(Verdict(check["verdict"]) for check in checks),
            reason=tuple(word(check["reason"], 300) for check in checks),
        )
        if self.tool != found.tool:
            self.tool = found.tool
            log.info("health checks found", tool=found.tool, checks=sorted(set(found.check)))
        return [found]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "holdfast.agent.collectors.nvrx_reader", str(self._interval_s)]

    def environment(self) -> Mapping[str, str] | None:
        if self._path is None:
            return None
        above = os.environ.get("PYTHONPATH", "")
        return {**os.environ, "PYTHONPATH": f"{self._path}:{above}" if above else str(self._path)}
