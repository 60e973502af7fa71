"""Runs a contender's trial: its process, the processes around it, and its results.

This module measures stall, durable time, slow-down, peak memory and the in-job restore. There is one process per contender and
trial, because page faults, allocator and page cache would affect the next one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.memory import Peak
from benchmarks.checkpoint.protocol import DISK, LIMIT, PEER, RESTORE, RESULT, SEED, WARM, WARMED, Request
from benchmarks.checkpoint.replicators import Replicator
from benchmarks.checkpoint.results import Measured, TrialFailed
from benchmarks.checkpoint.scratch import Scratch
from holdfast.domain import worker
from holdfast.domain.generations import ShardRecord

TRIAL_TIMEOUT_S = 180.0
LEAVE_TIMEOUT_S = 10.0
LOG_CHARS_MAX = 600
REPOSITORY = Path(__file__).parents[2]


class Trial:
    """A trial's process, a context manager. At its end, the process and all its descendants are killed."""

    def __init__(self, request: Request, place: Scratch, environment: Mapping[str, str]) -> None:
        self._log = place.sockets / f"{request.contender}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.checkpoint.trial", json.dumps(asdict(request))],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )
        self._telling = threading.Lock()
        self._over = False

    def __enter__(self) -> Trial:
        return self

    def leave(self) -> None:
        """Wait until the process ends by itself, because only then are shared objects (semaphores) cleaned up."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_TIMEOUT_S)

    def __exit__(self, *error: object) -> None:
        with self._telling:
            self._over = True
        with suppress(ProcessLookupError):  # it has already ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        """Send a line, from any thread. Ignored if the process has ended."""
        assert self._process.stdin is not None
        with self._telling:
            if not self._over:
                with suppress(BrokenPipeError):
                    self._process.stdin.write(f"{line}\n".encode())

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of the process, up to its result. Raises TrialFailed with the end of its log."""
        assert self._process.stdout is not None
        stdout = self._process.stdout.fileno()
        deadline, pending = time.monotonic() + TRIAL_TIMEOUT_S, b""
        while True:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(stdout, 65536) if ready else b""
            if not data:
                why = "ended without a result" if ready else f"had no result after {TRIAL_TIMEOUT_S:.0f} s"
                raise TrialFailed(f"{why}: {self._log.read_text(errors='replace')[-LOG_CHARS_MAX:].strip()}")
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                message: dict[str, Any] = json.loads(line)
                yield message
                if message["at"] == RESULT:
                    return


def measure(request: Request, place: Scratch, packages: str = "") -> Measured:
    """Run one trial of a contender other than Holdfast. `packages`: a further directory to import from. Raises TrialFailed."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), packages)))
    with Trial(request, place, {"PYTHONPATH": path}) as trial:
        values = _values(request.contender, *_result(trial, [trial.pid]))
        trial.leave()
    return values


def measure_holdfast(request: Request, place: Scratch) -> Measured:
    """Run one trial of Holdfast: a worker, its node's replicator, and the replicator of another node, which receives the
    copies. Then the worker is killed, and a new one restores from memory. Raises TrialFailed."""
    with Replicator("a", place) as ours, Replicator("b", place) as other:

        def at_the_peer(record: ShardRecord, at: float) -> None:
            if record.tier == "disk":
                trial.tell(f"{record.key.step} {PEER} {at}")
                ours.retain(record.key)
                other.retain(record.key)

        other.configure((1,))
        ours.configure((0,), other)
        with Trial(request, place, ours.worker_environment()) as trial:
            ours.watch(
                lambda record, at: trial.tell(f"{record.key.step} {DISK} {at}") if record.tier == "disk" else None
            )
            other.watch(at_the_peer)
            result, peak_bytes = _result(trial, [trial.pid, ours.pid])
        return _values("holdfast", result, peak_bytes) + _restored(request, place, ours, result)


def _result(trial: Trial, pids: list[int]) -> tuple[dict[str, Any], int]:
    """Return the result, and the peak memory during the first saves."""
    peak, peak_bytes = Peak(pids), 0
    message: dict[str, Any] = {}
    for message in trial.messages():
        match message["at"]:
            case at if at == WARM:
                peak.start()
            case at if at == WARMED:
                peak_bytes = peak.stop()
    return message, peak_bytes


def _values(contender: str, result: Mapping[str, Any], peak_bytes: int) -> Measured:
    """Return the measured values of one trial, by measure and contender."""
    values: Measured = [("stall_s", contender, stall_s) for stall_s in result["stall_s"]]
    if contender != LIMIT:  # its copy is not durable
        values += [("durable_s", contender, durable_s) for durable_s in result["durable_s"]]
        values += [("peak_extra_bytes", contender, peak_bytes), ("peak_extra_bytes", "state", result["state_bytes"])]
    for window, name in (("durable", contender), ("settled", f"{contender}_peer")):
        for statistic, ratio in result["slowdown"].get(window, {}).items():
            values.append((f"slowdown_{statistic}", name, ratio))
    if result["restore_s"] is not None:
        values.append(("restore_local_gb_s", contender, result["state_bytes"] / result["restore_s"] / 1e9))
    return values


def _restored(request: Request, place: Scratch, ours: Replicator, saved: Mapping[str, Any]) -> Measured:
    """Measure an in-job restart: the agent's request to its replicator, the worker's own part, and both together."""
    key = ours.newest("memory")
    began = time.perf_counter()
    staged = ours.stage(key, ours)
    stage_s = time.perf_counter() - began
    target = json.dumps({"step": key.step, "attempt": key.attempt, "path": staged.path})
    again = replace(request, contender=RESTORE, mark=saved["mark"])
    with Trial(again, place, {**ours.worker_environment(), worker.ENV_RESTORE: target}) as trial:
        result, _ = _result(trial, [])
    restore_s, state_bytes = result["restore_s"], result["state_bytes"]
    return [
        ("restore_local_gb_s", "holdfast", state_bytes / restore_s / 1e9),
        ("restore_local_gb_s", "holdfast_with_verify", state_bytes / (stage_s + restore_s) / 1e9),
    ]


def save_once(request: Request, place: Scratch, node: Replicator) -> None:
    """Let a worker of `node` save and exit."""
    once = replace(request, contender=SEED)
    with Trial(once, place, node.worker_environment()) as trial:
        for _ in trial.messages():
            pass
