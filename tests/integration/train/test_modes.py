"""One file, three ways to start it: plain python and torchrun here, under an agent in test_recovery."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from losses import losses
from train_workers import EXAMPLES
from warm_processes import STACK, warm

SMALL = ["--layers", "2", "--width", "16", "--heads", "2", "--seq", "16", "--global-batch", "12", "--micro-batch", "2"]
TIMEOUT_S = 120.0


def start(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def forked(*command: str | Path, **environ: str) -> tuple[int, str]:
    """`python *command` in a fork of a process that has imported torch. Returns its exit code and what it printed as errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    code, _, errors = warm(STACK)(["script", *map(str, command)], Path.cwd(), environment, TIMEOUT_S)
    return code, errors


def torchrun(nproc: int, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return start(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc), "--standalone", *command
    )


@pytest.mark.slow
def test_plain_python_and_torchrun_train_the_same_model(tmp_path: Path) -> None:
    script, alone, together = EXAMPLES / "gpt" / "train.py", tmp_path / "alone", tmp_path / "together"
    plain = start(sys.executable, script, *SMALL, "--steps", "8", "--out", alone)
    assert plain.returncode == 0, plain.stderr
    assert plain.stderr.count("nothing is saved") == 0, "nothing was due"
    run = torchrun(2, script, *SMALL, "--steps", "8", "--pp", "2", "--out", together)
    assert run.returncode == 0, run.stderr
    assert len(losses(alone)) == 8
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)


def test_an_exception_ends_the_script_with_its_traceback(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    code, errors = forked(EXAMPLES / "faulty" / "train.py", "--limit", "3", TORCHELASTIC_ERROR_FILE=str(error_file))
    assert code == 1
    assert "IndexError: index 3 is out of bounds" in errors
    message = json.loads(error_file.read_text())["message"]
    assert message["message"].startswith("IndexError: index 3")
    assert "train.py" in message["extraInfo"]["py_callstack"]


def test_an_error_file_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    code, errors = forked(
        EXAMPLES / "faulty" / "train.py",
        "--limit",
        "1",
        TORCHELASTIC_ERROR_FILE=str(tmp_path / "no" / "such" / "directory"),
    )
    assert code == 1
    assert "IndexError" in errors


def test_a_wrong_environment_is_named_before_anything_starts() -> None:
    code, errors = forked(EXAMPLES / "faulty" / "train.py", RANK="0", WORLD_SIZE="two")
    assert code == 1
    assert "WORLD_SIZE: 'two' is not valid; expected an integer" in errors


@pytest.mark.slow
def test_the_unmodified_torchrun_script_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    script = EXAMPLES / "torchrun" / "train_ddp.py"
    first = torchrun(2, script, "--steps", "10", "--save-every", "5", "--checkpoint", tmp_path / "ddp.pt")
    assert first.returncode == 0, first.stderr
    second = torchrun(2, script, "--steps", "15", "--save-every", "5", "--checkpoint", tmp_path / "ddp.pt")
    assert second.returncode == 0, second.stderr
    assert [line.split()[1] for line in second.stdout.splitlines() if line.startswith("step")] == ["15"]
