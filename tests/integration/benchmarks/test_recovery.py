"""What the recovery benchmarks read from the lines that their trainings write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.recovery.progress import Progress, Recovery, TrialFailed, wait_for_recovery, wait_for_start

OLD, NEW = 100, 200
RANKS = 2


def write(out: Path, rank: int, *lines: tuple[int, int, float]) -> None:
    with (out / f"rank-{rank}.jsonl").open("a") as file:
        for pid, step, at in lines:
            file.write(json.dumps({"pid": pid + rank, "step": step, "at": at}) + "\n")


def test_the_steps_that_were_finished_before_the_kill_and_are_done_again_are_counted(tmp_path: Path) -> None:
    write(tmp_path, 0, (OLD, 11, 1.0), (OLD, 12, 2.0))
    write(tmp_path, 1, (OLD, 11, 1.0), (OLD, 12, 2.0))
    before = wait_for_start(tmp_path, 12)
    assert before == {rank: Progress(OLD + rank, 12, 2.0) for rank in range(RANKS)}
    write(tmp_path, 0, (OLD, 13, 3.5))  # it had not heard of the kill
    write(tmp_path, 0, (NEW, 11, 6.0), (NEW, 12, 7.0))
    with (tmp_path / "rank-1.jsonl").open("a") as file:
        file.write('{"pid": 101, "st\n')  # torn by the kill
    write(tmp_path, 1, (NEW, 11, 6.5))
    assert wait_for_recovery(tmp_path, before, killed_at=3.0) == Recovery(3.5, 3)


def test_what_does_not_come_is_a_failed_trial(tmp_path: Path) -> None:
    write(tmp_path, 0, (OLD, 12, 2.0))
    with pytest.raises(TrialFailed, match="no 12 steps by every rank within 0 s"):
        wait_for_start(tmp_path, 12, 0.02)
    write(tmp_path, 1, (OLD, 12, 2.0))
    before = wait_for_start(tmp_path, 12)
    with pytest.raises(TrialFailed, match="not recovered within 0 s"):
        wait_for_recovery(tmp_path, before, 3.0, 0.02)
