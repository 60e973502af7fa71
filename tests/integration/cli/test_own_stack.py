"""`holdfast run` on a stack of its own, again and again in one directory: what was saved is found, and never passed over."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Shell, read_until
from waiting import TIMEOUT_S, wait_until

SCRIPT = """
import pathlib, sys, time
import torch
import holdfast.train as hf

def main(run: hf.Run) -> None:
    weight = torch.zeros(8)
    state = {"weight": weight}
    step = run.restore(state)
    with open("begun", "a") as file:
        file.write(f"{step} {weight[0]:g}\\n")
    while step < int(sys.argv[1]):
        with run.step(step):
            weight += 1
            time.sleep(0.01)
        step += 1
        run.checkpoint(state, step)

hf.launch(main)
"""
JOB = """
name: own
script: train.py
args: ["{steps}"]
checkpoint: {{interval_steps: 10}}
"""


def begun(directory: Path) -> list[tuple[int, int]]:
    """(step, the weight that was restored) of every start so far."""
    path = directory / "begun"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), int(weight)) for step, weight in (line.split() for line in lines)]


def on_disk(directory: Path) -> bool:
    return any((directory / "kept").glob("nodes/*/disk/own/**/rank-0.json"))


@pytest.mark.parametrize("ending", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_run_that_was_cut_off_is_gone_on_with_when_asked_and_never_begun_anew_unasked(
    tmp_path: Path, ending: signal.Signals
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "long.yaml").write_text(JOB.format(steps=10**9))
    (tmp_path / "short.yaml").write_text(JOB.format(steps=1))
    shell = Shell(tmp_path)
    with shell.start("run", "--local", "--dir", "kept", "long.yaml") as process:
        wait_until(lambda: on_disk(tmp_path), description="a checkpoint on the node's disk")
        process.send_signal(ending)
        process.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: not shell.processes(), description="everything of it to be gone")
    assert begun(tmp_path) == [(0, 0)]

    refused = shell("run", "--local", "--dir", "kept", "short.yaml", timeout_s=120)
    assert refused.code == 2
    assert "own has checkpoints, the newest of step" in refused.err
    assert begun(tmp_path) == [(0, 0)]

    resumed = shell("run", "--local", "--dir", "kept", "--resume", "short.yaml", timeout_s=120)
    assert resumed.code == 0, resumed.out + resumed.err
    assert len(begun(tmp_path)) == 2
    step, weight = begun(tmp_path)[-1]
    assert step == weight > 0
    assert f"resuming from step {step}" in resumed.out
    shell.assert_nothing_runs()


def test_an_interrupted_run_saves_before_it_stops(tmp_path: Path) -> None:
    """No save is due. The home directory cannot be written, so the command's own token is found nowhere but in its memory."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(
        JOB.format(steps=10**9).replace("interval_steps: 10}", "interval_steps: 1000000}")
    )
    (tmp_path / "occupied").touch()
    shell = Shell(tmp_path, {"HOME": str(tmp_path / "occupied" / "home")})
    # So deep that the stack uses a short symbolic link, which ends with it: no message may name it.
    (tmp_path / "kept").symlink_to(deep := tmp_path / ("d" * 80), target_is_directory=True)
    deep.mkdir()
    with shell.start("run", "--local", "--dir", "kept", "job.yaml") as process:
        read_until(process, r"running .* step [1-9]")
        assert not on_disk(tmp_path)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, said + errors
    assert on_disk(tmp_path)
    assert f"is retained on node-0 under {deep / 'nodes' / 'node-0' / 'disk' / 'own'}. To resume" in said
    shell.assert_nothing_runs()


def test_nothing_to_go_on_from_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    result = Shell(tmp_path)("run", "--local", "--resume", "--dir", "nowhere", "train.py")
    assert result.code == 2
    assert "no checkpoint to resume from" in result.err
    assert not (tmp_path / "nowhere").exists()


def test_a_program_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The job would wait for a node that has it, and only the machine of the command can be one."""
    (tmp_path / "programs").mkdir()
    present = tmp_path / "programs" / "present"
    present.write_text("#!/bin/sh\nexit 0\n")
    path = f"PATH={present.parent}"
    for name in ("absent", "present"):  # `present` may not be executed yet
        result = Shell(tmp_path)("run", "--local", "--dir", "here", "--env", path, "--no-python", name)
        assert result.code == 2
        assert f"command: '{name}' is not valid; expected a program in PATH" in result.err
        assert not (tmp_path / "here").exists()
    present.chmod(0o755)
    assert Shell(tmp_path)("run", "--local", "--dir", "here", "--env", path, "--no-python", "present").code == 0


def test_a_full_disk_under_the_output_of_the_command_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("for number in range(100):\n    print(f'line {number}', flush=True)\n")
    shell = Shell(tmp_path)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", "run", "--local", "--dir", "here", "train.py"],
            cwd=tmp_path,
            env=shell._environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=TIMEOUT_S,
        )
    assert (done.returncode, done.stderr) == (0, b"")
    (log,) = (tmp_path / "here").glob("nodes/*/logs/train/g1/rank-0.log")
    assert log.read_text().splitlines()[-1] == "line 99"
    shell.assert_nothing_runs()


def test_a_directory_means_a_stack_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    result = Shell(tmp_path)("run", "--api", "http://127.0.0.1:1", "--dir", "here", "train.py")
    assert result.code == 2
    assert "--dir" in result.err
    assert "--local" in result.err
