"""`holdfast logs`: of a job that runs, of one that is over, of a stack that has ended, and of ranks on another machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Shell, read_until, refused
from training import WarmStack
from typer.testing import CliRunner
from waiting import TIMEOUT_S, wait_until

from holdfast.cli.client import Client
from holdfast.cli.log_tail import LogTail
from holdfast.cli.main import application
from holdfast.cli.run import wait_for_nodes
from holdfast.cli.stack_options import StackOptions
from holdfast.domain.errors import HoldfastError, NotFound

SCRIPT = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
for number in range(3):
    print(f"rank {rank} line {number}", flush=True)
sys.stdout.write("10 %\\r 50 %\\r100 %\\n")
sys.stdout.flush()
pathlib.Path(f"began-{rank}").touch()
while not pathlib.Path("go-on" if rank == "0" else "said").exists():
    time.sleep(0.02)
if rank == "1":
    raise ValueError("batch 7 has no labels")
print("the last line", flush=True)
pathlib.Path("said").touch()
while True:
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmStack]:
    options = StackOptions(directory=tmp_path_factory.mktemp("stack"), nodes=1, workers_per_node=2)
    with WarmStack(options) as stack, Client(stack.api_url) as client:
        wait_for_nodes(client, stack, 1)
        yield stack


def test_what_ranks_print_is_shown_while_they_run_and_after_their_end(stack: WarmStack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shell = Shell(tmp_path, stack.for_commands)
    run = ("run", "--detach", "--name", "logged", "--nproc-per-node", "2", "--max-restarts", "0", "train.py")
    assert shell(*run).code == 0
    for rank in range(2):
        wait_until((tmp_path / f"began-{rank}").exists, description="the job to begin")
    running = shell("logs", "logged")
    assert running.out.splitlines() == ["rank 0 line 0", "rank 0 line 1", "rank 0 line 2", "100 %"]
    assert running.err.strip().endswith("/logs/logged/g1/rank-0.log")
    some = shell("logs", "logged", "--rank", "all", "--grep", r"line \d", "-n", "1")
    assert some.out.splitlines() == ["[rank0] rank 0 line 2", "[rank1] rank 1 line 2"]

    with shell.start("logs", "logged", "-f", "-n", "1") as follower:
        read_until(follower, "100 %")
        (tmp_path / "go-on").touch()
        out, err = follower.communicate(timeout=TIMEOUT_S)
    assert (follower.returncode, "the last line" in out) == (0, True), out + err

    first = shell("logs", "logged", "--first-error")
    assert first.code == 0, first.err
    assert first.out.startswith("rank 1 on node-0 raised at ")
    assert "ValueError: batch 7 has no labels" in first.out
    assert "train.py:12 <module>" in first.out
    assert "(by incident " in first.out.splitlines()[0]
    refused(shell("logs", "logged", "--generation", "99"), "one that has logs on this machine")
    refused(shell("logs", "logged", "--rank", "5"), "no log of rank 5 on this machine; of generation")
    refused(shell("logs", "other"), "there is no job other")

    offline = Shell(tmp_path, {"HOLDFAST_API": "http://127.0.0.1:9"})
    assert "rank 0 line 0" in offline("logs", "logged", "--dir", str(stack.directory), "--generation", "1").out
    refused(offline("logs", "logged"), "no Holdfast API answers")
    refused(offline("logs", "logged", "--dir", str(tmp_path)), "no local stack has run in")


def test_the_log_of_a_rank_on_another_machine_comes_from_its_agent(
    stack: WarmStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert Shell(tmp_path, stack.for_commands)("run", "--detach", "--name", "far", "train.py").code == 0
    wait_until((tmp_path / "began-0").exists, description="the job to begin")
    monkeypatch.setattr("socket.gethostname", lambda: "login-1")

    def printed(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(application("logs"), ["logs", *arguments, "--api", stack.api_url])
        return result.exit_code, result.stdout, result.stderr

    code, out, err = printed("far")
    assert (code, "rank 0 line 0" in out) == (0, True), err
    assert "rank 0 on node-0, generation 1" in err
    code, out, err = printed("far", "--lines", "1", "--grep", "line 0")
    assert (code, len(out.splitlines())) == (0, 1)
    code, out, err = printed("far", "--rank", "9")
    assert code != 0 or not out
    with Client(stack.api_url) as client:
        tail = LogTail(client, "far", frozenset({0}))
        wait_until(
            lambda: any("rank 0 line 0" in line for line in tail.lines(client.job("far"))),
            description="what `holdfast run` shows of it",
        )  # fmt: skip
        client.stop("far", "enough")


def test_the_first_error_of_a_rank_on_another_machine_comes_from_its_agent(
    stack: WarmStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = ("run", "--detach", "--name", "remote", "--nproc-per-node", "2", "--max-restarts", "0", "train.py")
    assert Shell(tmp_path, stack.for_commands)(*run).code == 0
    for rank in range(2):
        wait_until((tmp_path / f"began-{rank}").exists, description="the job to begin")
    monkeypatch.setattr("socket.gethostname", lambda: "login-1")

    def printed() -> tuple[int, str, str]:
        result = CliRunner().invoke(application("logs"), ["logs", "remote", "--first-error", "--api", stack.api_url])
        return result.exit_code, result.stdout, result.stderr

    code, _, err = printed()
    assert code != 0
    assert "no rank of remote has left an exception on a node that was reached" in err
    (tmp_path / "go-on").touch()
    wait_until(lambda: printed()[0] == 0, description="the exception")
    with Client(stack.api_url) as client:
        wait_until(lambda: client.rank_errors("remote")["decided_by"] == "incident", description="incident")
        measured = client.rank_measurements("remote")
    assert measured["step_s"] == [], "the job is over"
    code, out, err = printed()
    assert code == 0, err
    assert out.startswith("rank 1 on node-0 raised at ")
    assert "ValueError: batch 7 has no labels" in out
    assert "train.py:12 <module>" in out
    assert "rank 1 line 2" in out, "the end of its log, from its agent"
    assert "rank 1 on node-0, generation 1" in err


def test_what_the_api_says_of_logs(stack: WarmStack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert Shell(tmp_path, stack.for_commands)("run", "--detach", "--name", "parts", "train.py").code == 0
    wait_until((tmp_path / "began-0").exists, description="the job to begin")
    with Client(stack.api_url) as client:
        whole = client.rank_log("parts", 0, -1, 0, 4096)
        assert whole["offset"] == 0
        assert whole["text"].startswith("rank 0 line 0")
        assert whole["node"] == "node-0"
        rest, at = "", 0
        while (part := client.rank_log("parts", 0, 1, at, 16))["text"]:
            rest, at = rest + part["text"], part["next_offset"]
        assert rest.startswith(whole["text"]), "parts of any size are the same log, whole characters each"
        end = client.rank_log("parts", 0, -1, -40, 4096)
        assert whole["text"].endswith(end["text"]) or end["offset"] > whole["size"] - 40
        for rank, generation, reason in ((5, -1, "there is no rank 5"), (0, 77, "generation"), (0, -9, "generation")):
            with pytest.raises(HoldfastError, match=reason):
                client.rank_log("parts", rank, generation, 0, 4096)
        with pytest.raises(NotFound, match="no job nobody"):
            client.rank_log("nobody", 0, -1, 0, 4096)
        client.stop("parts", "enough")
