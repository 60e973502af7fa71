"""`holdfast logs`: of a job that runs, of one that is over, of a stack that has ended, and of ranks on another machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Shell, read_until, refused
from waiting import wait_until

from holdfast.cli import logs
from holdfast.cli.client import Client
from holdfast.cli.run import wait_for_nodes
from holdfast.cli.stack import LocalStack, StackOptions

SCRIPT = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
for number in range(3):
    print(f"rank {rank} line {number}", flush=True)
sys.stdout.write("10 %\\r 50 %\\r100 %\\n")
sys.stdout.flush()
pathlib.Path(f"began-{rank}").touch()
while not pathlib.Path("go-on").exists():
    time.sleep(0.02)
if rank == "1":
    raise ValueError("batch 7 has no labels")
print("the last line", flush=True)
while True:
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    options = StackOptions(directory=tmp_path_factory.mktemp("stack"), nodes=1, workers_per_node=2)
    with LocalStack(options) as stack, Client(stack.api_url) as client:
        wait_for_nodes(client, stack, 1)
        yield stack


@pytest.mark.timeout(240)
def test_what_ranks_print_is_shown_while_they_run_and_after_their_end(stack: LocalStack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shell = Shell(tmp_path, stack.for_commands)
    run = ("run", "--detach", "--name", "told", "--nproc-per-node", "2", "--max-restarts", "0", "train.py")
    assert shell(*run).code == 0
    for rank in range(2):
        wait_until((tmp_path / f"began-{rank}").exists, description="the job to begin", timeout_s=60.0)
    running = shell("logs", "told")
    assert running.out.splitlines() == ["rank 0 line 0", "rank 0 line 1", "rank 0 line 2", "100 %"]
    assert running.err.strip().endswith("/logs/told/g1/rank-0.log")
    some = shell("logs", "told", "--rank", "all", "--grep", r"line \d", "-n", "1")
    assert some.out.splitlines() == ["[rank0] rank 0 line 2", "[rank1] rank 1 line 2"]

    with shell.start("logs", "told", "-f", "-n", "1") as follower:
        read_until(follower, "100 %")
        (tmp_path / "go-on").touch()
        out, err = follower.communicate(timeout=90)
    assert (follower.returncode, "the last line" in out) == (0, True), out + err

    first = shell("logs", "told", "--first-error")
    assert first.code == 0, first.err
    assert first.out.startswith("rank 1 on node-0 raised at ")
    assert "ValueError: batch 7 has no labels" in first.out
    assert "train.py:12 <module>" in first.out
    refused(shell("logs", "told", "--generation", "99"), "one that has logs on this machine")
    refused(shell("logs", "told", "--rank", "5"), "no log of rank 5 on this machine; ranks 0, 1 of generation")
    refused(shell("logs", "other"), "no log of rank 0 on this machine; no rank of the job has")

    offline = Shell(tmp_path, {"HOLDFAST_API": "http://127.0.0.1:9"})
    assert "rank 0 line 0" in offline("logs", "told", "--dir", str(stack.directory), "--generation", "1").out
    refused(offline("logs", "told"), "no Holdfast API answers")
    refused(offline("logs", "told", "--dir", str(tmp_path)), "no local stack has run in")


def test_a_log_on_another_machine_is_named(stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert Shell(tmp_path, stack.for_commands)("run", "--detach", "--name", "far", "train.py").code == 0
    wait_until((tmp_path / "began-0").exists, description="the job to begin", timeout_s=60.0)
    monkeypatch.setattr("socket.gethostname", lambda: "login-1")
    with Client(stack.api_url) as client:
        view, places = client.job("far"), logs._Places.of_fleet(client)
        host = client.node("node-0")["hostname"]
        client.stop("far", "enough")
    assert places.logs("far") == {}
    (line,) = places.elsewhere(view, 1, None, set())
    assert line.startswith("rank 0 is on node-0: its log is ")
    assert line.endswith(f"/logs/far/g1/rank-0.log on {host}")
