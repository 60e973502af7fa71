"""Scale events without services: torchrun with other numbers of ranks, and SIGTERM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import scaling_train
import torch
from ports import reserve_port
from waiting import wait_until
from warm_processes import STACK, warm

from holdfast.domain.worker import EXIT_INTERRUPTED

SCRIPT = Path(scaling_train.__file__)
TIMEOUT_S = 120.0


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "checkpoints"
    yield directory
    with suppress(FileNotFoundError):  # the images of a run that was interrupted
        run = json.loads((directory / "run.json").read_text())["run"]
        shutil.rmtree(Path("/dev/shm", f"holdfast-{os.getuid()}", run), ignore_errors=True)


def begin(ranks: int, steps: int, out: Path, checkpoints: Path, step_s: float = 0.0) -> subprocess.Popen[str]:
    """`ranks` 0: plain python. A fork (`warm_stack`)."""
    arguments = ["--steps", str(steps), "--out", str(out), "--checkpoint", str(checkpoints), "--step-s", str(step_s)]
    with reserve_port() as port:
        launcher = ["torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port"]
        launch = [*launcher, str(port.getsockname()[1])] if ranks else ["script"]
        return warm(STACK).command(
            [*launch, str(SCRIPT), *arguments], Path.cwd(), {**os.environ, "OMP_NUM_THREADS": "1"}
        )


def train(ranks: int, steps: int, out: Path, checkpoints: Path) -> None:
    process = begin(ranks, steps, out, checkpoints)
    text, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, text + errors


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_ranks_one_and_two_again_have_the_rates_of_an_undisturbed_run(tmp_path: Path, checkpoints: Path) -> None:
    out = tmp_path / "out"
    for ranks, steps in ((2, 10), (0, 20), (2, 30)):
        train(ranks, steps, out, checkpoints)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=scaling_train.BASE_LR)
    scheduler = scaling_train.schedule(optimizer)
    for each in records(out / "steps.jsonl"):
        assert each["dp"] == (1 if 10 < each["step"] <= 20 else 2)
        assert each["rate"] == optimizer.param_groups[0]["lr"] * (4 * each["dp"] / 12), "bit for bit"
        optimizer.step()
        scheduler.step()
    reported = [each for each in records(out / "events.jsonl") if each["when"] == "restore"]
    assert [(each["old"], each["new"], each["scheduled"]) for each in reported] == [(2, 1, 10), (1, 2, 20), (1, 2, 20)]
    assert sorted(each["rank"] for each in reported[1:]) == [0, 1]


def test_sigterm_tells_the_script_before_the_last_save(tmp_path: Path, checkpoints: Path) -> None:
    out = tmp_path / "out"
    process = begin(0, 1_000_000, out, checkpoints, step_s=0.02)
    try:
        wait_until((out / "steps.jsonl").exists, description="the first step", timeout_s=TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        text, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
    assert process.returncode == EXIT_INTERRUPTED, text + errors
    (leaving,) = records(out / "events.jsonl")
    assert (leaving["event"], leaving["reason"]) == ("leaving", "SIGTERM")
    saved = max(int(path.parent.name[1:]) for path in checkpoints.glob("a1/s*/rank-0.json"))
    assert leaving["step"] == saved == max(each["step"] for each in records(out / "steps.jsonl"))
