"""GPU health through NVML, read by a child process (`nvml_reader`): a wedged driver costs a process and not the agent."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import IO

import anyio

from holdfast.agent.collectors.protocol import Emit, Surroundings
from holdfast.domain.signals import CollectorSilent, GpuSample
from holdfast.runtime.children import Child, running, spawn

INTERVAL_S = 5.0
DEADLINE_S = 3 * INTERVAL_S
MISSES_MAX = 4  # then the reader is replaced: the driver may have come back, the process stuck in it has not
LINE_BYTES_MAX = 64 << 10
DRIVER = Path("/proc/driver/nvidia/version")


def build(surroundings: Surroundings) -> NvmlCollector | None:
    """None where there is no driver, or no `pynvml` (the extra `nvml`)."""
    if not DRIVER.exists() or importlib.util.find_spec("pynvml") is None:
        return None
    return NvmlCollector(surroundings.node)


class NvmlCollector:
    name = "nvml"

    def __init__(self, node: str, *, interval_s: float = INTERVAL_S, deadline_s: float = DEADLINE_S) -> None:
        self._node = node
        self._interval_s, self._deadline_s = interval_s, deadline_s

    async def run(self, emit: Emit) -> None:
        """Raises `OSError` when the reader ends or has to be replaced."""
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(ours, "rb", buffering=0) as pipe:
            try:
                child = spawn("nvml-reader", [*self._command(), str(self._interval_s)], output=theirs)
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
                raise OSError(f"the NVML reader ended with code {await child.wait()}: {_last_line(buffer)}")
            *lines, buffer = (buffer + raw).split(b"\n")
            buffer = buffer[-LINE_BYTES_MAX:]
            for line in lines:
                if (sample := parse(self._node, line)) is not None:
                    misses = 0
                    emit(sample)
        raise OSError(f"the NVML reader (pid {child.pid}) has been silent for {misses} deadlines and is replaced")

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "holdfast.agent.collectors.nvml_reader"]


def parse(node: str, line: bytes) -> GpuSample | None:
    """One line of the reader; None for a line that is not a sample (a library's warning, say)."""
    try:
        record = json.loads(line)
        gpus = record["gpus"]
        return GpuSample(
            node=node,
            at=float(record["at"]),
            gpu=tuple(int(gpu["gpu"]) for gpu in gpus),
            uuid=tuple(str(gpu["uuid"]) for gpu in gpus),
            temperature_c=tuple(float(gpu["temperature_c"]) for gpu in gpus),
            power_w=tuple(float(gpu["power_w"]) for gpu in gpus),
            memory_used=tuple(int(gpu["memory_used"]) for gpu in gpus),
            ecc_uncorrected=tuple(int(gpu["ecc_uncorrected"]) for gpu in gpus),
            recovery_action=tuple(int(gpu["recovery_action"]) for gpu in gpus),
            lost=tuple(bool(gpu["lost"]) for gpu in gpus),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _last_line(buffer: bytes) -> str:
    return buffer.decode(errors="replace").strip() or "it left no word"
