"""A launcher that a scheduler restarts finds its job again, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Shell, read_until, refused
from training import WarmStack
from waiting import TIMEOUT_S, wait_until

from holdfast.cli.client import Client
from holdfast.cli.run import wait_for_nodes
from holdfast.cli.stack_options import StackOptions

SCRIPT = """
import pathlib, time
pathlib.Path("began").touch()
while not pathlib.Path("finish").exists():
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmStack]:
    with (
        WarmStack(StackOptions(directory=tmp_path_factory.mktemp("stack"), nodes=1)) as stack,
        Client(stack.api_url) as client,
    ):
        wait_for_nodes(client, stack, 1)
        yield stack


def test_a_launcher_that_was_killed_goes_on_watching_its_job_to_the_end(stack: WarmStack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shell = Shell(tmp_path, stack.for_commands)
    with shell.start("run", "--attach", "--name", "mine", "train.py") as first:
        read_until(first, "mine submitted to")
        wait_until((tmp_path / "began").exists, description="the job to begin")
        first.kill()
    with shell.start("run", "--attach", "--name", "mine", "train.py") as second:
        read_until(second, "attached to mine")
        (tmp_path / "finish").touch()
        out, err = second.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 0, out + err
    over = shell("run", "--attach", "--name", "mine", "train.py")
    assert (over.code, "mine completed" in over.out) == (0, True), over.out + over.err
    with Client(stack.api_url) as client:
        assert client.job("mine")["generation"] == 1


def test_a_job_of_the_same_name_is_not_attached_to_without_its_token(stack: WarmStack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ("run", "--attach", "--detach", "--name", "theirs", "--nnodes", "3", "train.py")  # which it does not get
    given = stack.for_commands | {"HOLDFAST_LAUNCHER_TOKEN": "theirs"}
    submitted = Shell(tmp_path, given)(*command)
    assert "theirs submitted to" in submitted.out, submitted.err

    stranger = Shell(tmp_path, stack.for_commands)
    refused(stranger(*command), "a job named theirs is pending, and another launcher submitted it")

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "train.py").touch()
    again = Shell(tmp_path / "elsewhere", given)(*command)
    assert "attached to theirs" in again.out, again.out + again.err

    with Client(stack.api_url) as client:
        client.stop("theirs", "enough")
    stopped = Shell(tmp_path, given)(*command[:2], *command[3:])
    assert (stopped.code, "theirs stopped: enough" in stopped.out) == (93, True), stopped.out + stopped.err
    fresh = stranger(*command)
    assert "theirs submitted to" in fresh.out, "a job that is over stands in nobody's way"
    with Client(stack.api_url) as client:
        client.stop("theirs", "enough")


def test_attaching_needs_a_holdfast_that_outlives_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    refused(Shell(tmp_path)("run", "--attach", "--local", "train.py"), "--attach cannot be used with --local")


def test_a_second_run_of_a_script_gets_a_name_of_its_own(stack: WarmStack, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(SCRIPT)
    shell = Shell(tmp_path, stack.for_commands)
    submit = ("run", "--detach", "--nnodes", "3", "twice.py")  # which they do not get
    try:
        for name in ("twice", "twice-2", "twice-3"):
            done = shell(*submit)
            assert (done.code, f"{name} submitted to" in done.out) == (0, True), done.out + done.err
        refused(shell("run", "--detach", "--name", "twice", "twice.py"), "a job named twice is pending")
    finally:
        with Client(stack.api_url) as client:
            for name in ("twice", "twice-2", "twice-3"):
                client.stop(name, "enough")


def test_a_waiting_process_gets_the_reason(stack: WarmStack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shell = Shell(tmp_path, stack.for_commands)
    with shell.start("run", "--name", "wide", "--nproc-per-node", "8", "train.py") as launcher:
        read_until(launcher, "wide needs 1 node with room for 8 workers; 0 are there, 1 missing; the largest")
        with Client(stack.api_url) as client:
            client.stop("wide", "enough")
        out, err = launcher.communicate(timeout=TIMEOUT_S)
    assert "wide stopped: enough" in out, out + err
