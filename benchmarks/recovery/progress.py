"""What a benchmark's training writes, and what is read from it: the start, the recovery after a kill, the steps done again."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.recovery.launchers import RANKS

START_TIMEOUT_S = 90.0
RECOVER_TIMEOUT_S = 90.0
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Progress:
    """What one rank wrote after a step."""

    pid: int
    step: int
    at: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """`seconds`: from the kill until the last rank has finished its first step in a new process. `rework_steps`: steps that
    were finished before the kill and are done again, of the rank that has most of them."""

    seconds: float
    rework_steps: int


class TrialFailed(Exception):
    """This trial never got there; the message says what was missing."""


def wait_for_start(out: Path, steps: int, timeout_s: float = START_TIMEOUT_S) -> dict[int, Progress]:
    """Wait until every rank has finished `steps` steps; returns what each wrote last."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        progress = {rank: lines[-1] for rank in range(RANKS) if (lines := read(out, rank))}
        if len(progress) == RANKS and all(entry.step >= steps for entry in progress.values()):
            return progress
        time.sleep(POLL_S)
    raise TrialFailed(f"no {steps} steps by every rank within {timeout_s:.0f} s of the start")


def wait_for_recovery(
    out: Path, before: dict[int, Progress], killed_at: float, timeout_s: float = RECOVER_TIMEOUT_S
) -> Recovery:
    """Wait until every rank has finished a step in another process than that of `before`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        lines = {rank: read(out, rank) for rank in range(RANKS)}
        first = [
            next((line for line in lines[rank] if line.at > killed_at and line.pid != before[rank].pid), None)
            for rank in range(RANKS)
        ]
        found = [line for line in first if line is not None]
        if len(found) == RANKS:
            done = [max(line.step for line in lines[rank] if line.pid == before[rank].pid) for rank in range(RANKS)]
            again = [max(0, last - (line.step - 1)) for last, line in zip(done, found, strict=True)]
            return Recovery(max(line.at for line in found) - killed_at, max(again))
        time.sleep(POLL_S)
    raise TrialFailed(f"not recovered within {timeout_s:.0f} s")


def read(out: Path, rank: int) -> list[Progress]:
    """What the rank has written, oldest first."""
    try:
        lines = (out / f"rank-{rank}.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # torn by the kill
            continue
        records.append(Progress(record["pid"], record["step"], record["at"]))
    return records
