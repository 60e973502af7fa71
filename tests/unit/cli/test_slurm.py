"""Batch scripts, drains, chains and the end of an allocation: what can be decided without a Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner
from waiting import wait_until

from holdfast.cli.agent import DIGEST_CHARS, own_directory
from holdfast.cli.endings import COMPLETED, DO_NOT_RESTART, FAILED, SUSPENDED, UNAVAILABLE
from holdfast.cli.slurm import chain as chains
from holdfast.cli.slurm import ending, node, tools
from holdfast.cli.slurm.allocation import AllocationRun, Here, Plan
from holdfast.cli.slurm.chain import Chain, Link
from holdfast.cli.slurm.commands import app as slurm_app
from holdfast.cli.slurm.drains import Announce, Drains, Withdraw
from holdfast.cli.slurm.ending import Ending, EndWatch
from holdfast.cli.slurm.script import Allocation, doubts, render, seconds
from holdfast.domain.errors import Conflict, InvalidSpec, NotFound, Unavailable

ASKED = Allocation(
    name="llm",
    nodes=17,
    time="1-00:00:00",
    notice_s=600,
    directory=Path("/shared/llm"),
    exclusive=True,
    options=["--partition=gpu", "--gpus-per-node=8"],
    command=["/opt/venv/bin/python", "-m", "holdfast.cli.main", "slurm", "allocation", "/home/me/my job.yaml"],
)


def test_the_script_that_is_kept_as_an_example_is_the_one_that_is_rendered() -> None:
    assert (Path("deploy") / "slurm" / "holdfast.sbatch").read_text() == render(ASKED)


def test_a_rendered_script_raises_no_doubts() -> None:
    script = render(ASKED)
    assert doubts(script) == []
    assert "exec /opt/venv/bin/python -m holdfast.cli.main slurm allocation '/home/me/my job.yaml'" in script
    assert "#SBATCH --exclusive\n" not in render(replace(ASKED, exclusive=False))


@pytest.mark.parametrize(
    ("lost", "instead", "doubt"),
    [
        ("--no-kill", "", "without --no-kill"),
        ("--no-requeue", "", "without --no-requeue"),
        ("--signal=B:USR1@600", "", "without --signal=B:USR1@600"),
        ("--signal=B:USR1@600", "--signal=USR1@600", "add B:"),
        ("--signal=B:USR1@600", "--signal=R:USR1@600", "add B:"),
    ],
)
def test_what_would_lose_a_run_is_named(lost: str, instead: str, doubt: str) -> None:
    script = render(ASKED).replace(f"#SBATCH {lost}\n", f"#SBATCH {instead}\n" if instead else "")
    (found,) = doubts(script)
    assert doubt in found


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"name": "my job"}, "letters, digits"),
        ({"time": "tomorrow"}, "HH:MM:SS"),
        ({"time": "10"}, "the last 600 s are for saving"),
        ({"directory": Path("/shared/%j")}, "without %"),
        ({"options": ["--signal=USR1@30"]}, "sets --signal itself"),
        ({"options": ["--requeue"]}, "sets --requeue itself"),
        ({"options": ["-N4"]}, "sets --N itself"),
        ({"options": ["partition=gpu"]}, "each as --name=value"),
        ({"options": ["--comment=a\n#SBATCH --requeue"]}, "each as --name=value"),
    ],
)
def test_what_cannot_work_is_refused(changed: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidSpec, match=reason):
        render(replace(ASKED, **changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("20", 1200),
        ("0:20", 20),
        ("90:00", 5400),
        ("1:00:00", 3600),
        ("1-12", 129600),
        ("2-00:30", 174600),
        ("1-1:1:1", 90061),
    ],
)
def test_time_limits_as_slurm_reads_them(limit: str, expected: int) -> None:
    assert seconds(limit) == expected


def test_nodes_as_sinfo_shows_them() -> None:
    output = "n1|drained*|disk of n1 | fails\nn1|drained*|disk of n1 | fails\nn2|idle~|none\ngarbage\n\nn3|mixed|\n"
    assert tools.parse_states(output) == [
        tools.NodeState("n1", "drained", "disk of n1 | fails"),
        tools.NodeState("n2", "idle", ""),
        tools.NodeState("n3", "mixed", ""),
    ]


def test_a_drain_is_announced_once_repeated_until_taken_and_withdrawn() -> None:
    drains = Drains()
    draining = [tools.NodeState("n1", "draining", "disk"), tools.NodeState("n2", "allocated", "")]
    (change,) = drains.changes(draining)
    assert change == Announce("n1", "Slurm: draining (disk)")
    assert drains.changes(draining) == [change], "the supervisor did not answer"
    drains.done(change)
    assert drains.changes(draining) == []
    assert drains.changes([]) == [], "slurmctld did not answer: nothing is concluded"
    (change,) = drains.changes([tools.NodeState("n1", "allocated", "")])
    assert change == Withdraw("n1")
    drains.done(change)
    assert drains.changes([tools.NodeState("n1", "down", "Not responding")]) == [], "that is for its agent to tell"
    assert drains.changes([tools.NodeState("n1", "drained", "holdfast: Xid 79")]) == [], "our own"


def test_a_chain_goes_on_until_another_allocation_is_of_no_use(tmp_path: Path) -> None:
    chain = replace(Chain.new("llm"), slurm_jobs=("7", "8", "9"))
    assert chain.over is None
    for code in (SUSPENDED, FAILED, UNAVAILABLE):
        assert chain.ended_by(Link("7", code)).over is None
    for code in (COMPLETED, DO_NOT_RESTART, 2):
        assert chain.ended_by(Link("7", code)).over == code
    chain.ended_by(Link("7", SUSPENDED)).write(tmp_path)
    assert chains.read(tmp_path, chain.id) == chain.ended_by(Link("7", SUSPENDED))
    with pytest.raises(InvalidSpec, match="submitted from it again"):
        chains.read(tmp_path, Chain.new("llm").id)
    with pytest.raises(NotFound, match="must be on a file system that the login node and all nodes share"):
        chains.read(tmp_path / "node-local", chain.id)
    (tmp_path / chains.FILE).write_text("{")
    with pytest.raises(InvalidSpec, match=r"chain\.json"):
        chains.read(tmp_path, chain.id)


def test_a_second_submission_goes_on_with_the_run_of_the_first_unless_that_is_over(tmp_path: Path) -> None:
    first = replace(Chain.of(tmp_path, "llm"), slurm_jobs=("7", "8"))
    first.write(tmp_path)
    for known in (first, first.ended_by(Link("7", SUSPENDED)), first.ended_by(Link("7", FAILED))):
        known.write(tmp_path)
        second = Chain.of(tmp_path, "llm")
        assert (second.id, second.slurm_jobs, second.ended) == (first.id, (), known.ended)
    assert Chain.of(tmp_path, "other").id != first.id
    first.ended_by(Link("7", COMPLETED)).write(tmp_path)
    new = Chain.of(tmp_path, "llm")
    assert new.id != first.id
    assert new.ended == ()
    (tmp_path / chains.FILE).write_text("{")
    assert Chain.of(tmp_path, "llm").id != first.id


def test_the_end_of_another_allocation_is_not_this_ones(tmp_path: Path) -> None:
    assert ending.read(tmp_path, "7") is None
    Ending("7", 1000.0).write(tmp_path)
    assert ending.read(tmp_path, "7") == Ending("7", 1000.0)
    assert ending.read(tmp_path, "8") is None
    Ending("7", 1000.0, over=True).write(tmp_path)
    assert ending.read(tmp_path, "7") == Ending("7", 1000.0, over=True)
    (tmp_path / ending.FILE).write_text('{"slurm_job": "7", "ends_at": 1000.0}')
    assert ending.read(tmp_path, "7") == Ending("7", 1000.0), "of a version before"
    for garbage in ("", "[]", '{"slurm_job": "7"}', '{"slurm_job": "7", "ends_at": "soon"}'):
        (tmp_path / ending.FILE).write_text(garbage)
        assert ending.read(tmp_path, "7") is None


def test_the_nodes_are_asked_to_end_once_by_the_clock_or_by_the_signal_and_again_if_the_limit_is_moved() -> None:
    watch = EndWatch(notice_s=600, ends_at=10_000.0)
    assert not watch.is_near(9_000)
    assert watch.due(9_000) is None
    assert watch.due(9_401) == 10_000
    assert watch.due(9_402) == 10_000, "the file could not be written"
    watch.announced = 10_000
    assert watch.due(9_403) is None
    watch.ends_at = 20_000.0  # by an administrator
    assert watch.due(9_404) == 20_000, "or the nodes would leave at the old time"
    watch.announced = 20_000
    assert watch.due(19_500) is None


def test_without_an_answer_of_slurmctld_the_signal_tells_the_end() -> None:
    watch = EndWatch(notice_s=600)
    assert not watch.is_near(9_000)
    watch.signalled_at = 9_000.0
    assert watch.due(9_010) == 9_600
    watch.announced = 9_600.0
    assert watch.due(9_020) is None
    watch.ends_at = 9_650.0
    assert watch.due(9_030) == 9_650


def test_a_cancellation_is_the_end_whatever_slurm_says() -> None:
    watch = EndWatch(notice_s=600, grace_s=30, ends_at=90_000.0)
    watch.cancelled_at = 9_000.0
    assert watch.is_near(9_000)
    assert watch.due(9_001) == 9_030
    watch.announced = 9_030.0
    assert watch.due(9_002) is None
    near = EndWatch(notice_s=600, grace_s=30, ends_at=9_020.0, announced=9_020.0, cancelled_at=9_000.0)
    assert near.due(9_001) is None, "it ends sooner anyway"
    assert EndWatch(notice_s=600, grace_s=30, cancelled_at=9_000.0).due(9_001) == 9_030, "slurmctld does not answer"


SLURM = """#!/bin/sh
echo "$(basename $0) $*" >> "$LOG"
[ "$(basename $0)" = squeue ] && cat "$QUEUE"
exit 0
"""


@pytest.fixture
def said_to_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands in place of Slurm's: squeue prints `queue`, and all are written to this file."""
    for name in ("squeue", "scancel"):
        (tmp_path / name).write_text(SLURM)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "said"))
    monkeypatch.setenv("QUEUE", str(tmp_path / "queue"))
    return tmp_path / "said"


def test_cancel_takes_the_rest_of_the_chain_away_before_it_tells_the_one_that_runs(
    said_to_slurm: Path, tmp_path: Path
) -> None:
    replace(Chain.new("llm"), slurm_jobs=("7", "8", "9")).write(tmp_path)
    (tmp_path / "queue").write_text("6 RUNNING\n7 RUNNING\n8 PENDING\n9 PENDING\ngarbage\n")
    done = CliRunner().invoke(slurm_app, ["cancel", "llm", "--dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert said_to_slurm.read_text().splitlines()[1:] == ["scancel 8 9", "scancel --batch --signal=USR2 7"]
    assert "cancelled before it began: 8, 9" in done.output
    assert "7: llm is saved and suspended" in done.output


@pytest.mark.parametrize(
    ("name", "queue", "reason"),
    [("other", "7 RUNNING\n", "this one is that of llm"), ("llm", "6 RUNNING\n", "no allocation of llm")],
)
def test_cancel_touches_nothing_else(name: str, queue: str, reason: str, said_to_slurm: Path, tmp_path: Path) -> None:
    replace(Chain.new("llm"), slurm_jobs=("7",)).write(tmp_path)
    (tmp_path / "queue").write_text(queue)
    done = CliRunner().invoke(slurm_app, ["cancel", name, "--dir", str(tmp_path)])
    assert done.exit_code != 0
    assert reason in str(done.exception)
    assert not said_to_slurm.exists() or "scancel" not in said_to_slurm.read_text()


def test_outside_of_a_batch_script() -> None:
    with pytest.raises(InvalidSpec, match="holdfast slurm submit"):
        Here.read({"SLURM_JOB_ID": "7"})


def test_a_controller_that_hangs_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="not a machine of a Slurm cluster"):
        tools.run(str(tmp_path / "sinfo"))
    with pytest.raises(Unavailable, match="has not answered within"):
        tools.run(sys.executable, "-c", "import time; time.sleep(60)", timeout_s=0.1)
    with pytest.raises(Unavailable, match="exit code 3: no such node"):
        tools.run(sys.executable, "-c", "import sys; sys.exit(sys.stderr.write('no such\\n node') and 3)")
    monkeypatch.setattr(tools, "run", lambda *_, **__: "sbatch: warning")
    with pytest.raises(Unavailable, match="without a job's number"):
        tools.submit("job.sbatch")


AGENT = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
def received(number, frame):
    (here / "received").write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGUSR1, received)
runs = here / "runs"
runs.write_text((runs.read_text() if runs.exists() else "") + "x")
if len(runs.read_text()) == 1:
    sys.exit(1)  # it crashes once
while True:
    time.sleep(0.01)
"""
TASK = """
import sys
from pathlib import Path
from holdfast.cli.slurm import node
node.LOOK_S = node.POLL_S = 0.01
here = Path(sys.argv[1])
sys.exit(node.NodeTask([sys.executable, str(here / "agent.py"), str(here)], here / "memory", here, "7", 60.0).run())
"""


def test_an_agent_that_crashes_is_restarted_and_gets_the_notice_of_the_end_and_its_memory_is_freed(
    tmp_path: Path,
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "memory").mkdir()
    with subprocess.Popen([sys.executable, "-c", TASK, str(tmp_path)]) as task:
        killer = threading.Timer(60, task.kill)
        killer.start()
        try:
            runs = tmp_path / "runs"
            wait_until(lambda: runs.exists() and len(runs.read_text()) == 2, description="a second agent")
            Ending("8", time.time() + 1).write(tmp_path)  # another allocation's
            Ending("7", time.time() + 3600).write(tmp_path)
            assert not (tmp_path / "received").exists()
            Ending("7", time.time() + 30).write(tmp_path)
            assert task.wait(30) == 0
        finally:
            killer.cancel()
    assert (tmp_path / "received").read_text() == str(int(signal.SIGUSR1))
    assert not (tmp_path / "memory").exists()


STAYS_A_WHILE = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda number, frame: (here / "received").open("a").write("x"))
signal.signal(signal.SIGTERM, lambda number, frame: (here / "received").open("a").write("SIGTERM"))
(here / "runs").write_text("x")
while not (here / "left").exists():
    time.sleep(0.01)
"""


def test_slurms_sigterm_reaches_the_agent_as_one_notice(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(STAYS_A_WHILE)
    with subprocess.Popen([sys.executable, "-c", TASK, str(tmp_path)], process_group=0) as task:
        killer = threading.Timer(60, task.kill)
        killer.start()
        try:
            wait_until((tmp_path / "runs").exists, description="the agent")
            os.killpg(task.pid, signal.SIGTERM)  # as with ProctrackType=proctrack/pgid
            wait_until((tmp_path / "received").exists, description="the signal to the agent")
            os.killpg(task.pid, signal.SIGTERM)  # as srun passes it on
            (tmp_path / "left").touch()
            assert task.wait(30) == 0
        finally:
            killer.cancel()
    assert (tmp_path / "received").read_text() == "x"


LEAVES_AT_SIGTERM = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda number, frame: (here / "received").open("a").write("SIGUSR1 "))
def ends(number, frame):
    (here / "received").open("a").write("SIGTERM ")
    sys.exit(0)
signal.signal(signal.SIGTERM, ends)
(here / "runs").write_text("x")
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("leaving", "received"), [(False, "SIGTERM "), (True, "SIGUSR1 SIGTERM ")])
def test_the_agents_of_a_job_that_is_over_end_at_once_and_free_their_memory(
    leaving: bool, received: str, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(LEAVES_AT_SIGTERM)
    (tmp_path / "memory").mkdir()
    with subprocess.Popen([sys.executable, "-c", TASK, str(tmp_path)]) as task:
        killer = threading.Timer(60, task.kill)
        killer.start()
        try:
            wait_until((tmp_path / "runs").exists, description="the agent")
            if leaving:
                Ending("7", time.time() + 30).write(tmp_path)
                wait_until((tmp_path / "received").exists, description="the notice to the agent")
            Ending("7", time.time(), over=True).write(tmp_path)
            assert task.wait(30) == 0
        finally:
            killer.cancel()
    assert (tmp_path / "received").read_text() == received
    assert not (tmp_path / "memory").exists()


REFUSES = """
import pathlib, sys
runs = pathlib.Path(sys.argv[1]) / "runs"
runs.write_text((runs.read_text() if runs.exists() else "") + "x")
sys.exit(2)
"""


def test_an_agent_that_is_refused_is_tried_a_few_times_because_what_it_needs_may_come(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(REFUSES)
    task = [sys.executable, "-c", TASK, str(tmp_path)]
    done = subprocess.run(task, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert (tmp_path / "runs").read_text() == "x" * node.USAGE_MAX
    assert "the agent ended with 2; starting it again" in done.stderr


# ---------------------------------------------------------------- submit and drain, with commands in Slurm's place


def test_an_agents_directory_is_short_enough_for_its_sockets() -> None:
    parent = Path("/scratch/holdfast-1000/llm")
    assert own_directory(parent, "rack2-b03", 90) == parent / "rack2-b03"
    short = own_directory(parent, "gpu-a100-rack12-node03.cluster.example", 40)
    assert (short.parent, len(short.name)) == (parent, DIGEST_CHARS)
    assert own_directory(parent, "gpu-a100-rack12-node03.cluster.example", 40) == short, (
        "where the disk tier is found again"
    )
    assert own_directory(parent, "gpu-a100-rack12-node04.cluster.example", 40) != short
    assert own_directory(parent, "n1", 20) == parent / "n1", "a digest would be longer"


JOB_FILE = """
name: llm
script: train.py
nodes: 2
spares: 1
mesh: {dp: 2}
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    path = tmp_path / "job.yaml"
    path.write_text(JOB_FILE)
    return path


def test_a_dry_run_prints_the_script_and_leaves_nothing(job_file: Path, tmp_path: Path, said_to_slurm: Path) -> None:
    shared = tmp_path / "shared"
    options = ["--dir", str(shared), "--spares", "3", "--time", "1:00:00", "--dry-run", "--", "--partition=gpu"]
    done = CliRunner().invoke(slurm_app, ["submit", str(job_file), *options])
    assert done.exit_code == 0, done.output
    assert "#SBATCH --nodes=5\n" in done.output
    assert "#SBATCH --partition=gpu\n" in done.output
    assert doubts(done.output) == []
    assert not shared.exists()
    assert not said_to_slurm.exists()


def test_a_submission_that_says_how_to_begin_is_another_run(
    job_file: Path, tmp_path: Path, said_to_slurm: Path
) -> None:
    replace(Chain.new("llm"), ended=(Link("7", SUSPENDED),)).write(tmp_path)
    before = chains.newest(tmp_path).id

    def script(*options: str) -> str:
        done = CliRunner().invoke(slurm_app, ["submit", str(job_file), "--dir", str(tmp_path), "--dry-run", *options])
        assert done.exit_code == 0, done.output
        return done.output.rstrip().splitlines()[-1]

    assert f"--chain {before} " in script()
    for option in ("--resume", "--fresh"):
        command = script(option)
        assert before not in command
        assert command.endswith(f" {option}")


class Jobs:
    """A supervisor with one job, which another launcher has submitted if `strange`."""

    def __init__(self, phase: str, *, strange: bool = False, **fields: Any) -> None:
        self.job_now = {"phase": phase, "checkpoint_step": 20, "goes_on_from": None, **fields}
        self.strange = strange
        self.stopped: list[str] = []

    def attach(self, name: str, launcher: str) -> dict[str, Any]:
        if self.strange:
            raise Conflict("another launcher submitted it")
        return self.job_now

    def job(self, name: str) -> dict[str, Any]:
        return self.job_now

    def stop(self, name: str, reason: str, *, save: bool) -> None:
        assert not save, "it has no nodes"
        self.stopped.append(reason)
        self.job_now["phase"] = "stopped"

    def checkpoints(self, name: str) -> list[int]:
        return [20]


def allocation_run(directory: Path) -> AllocationRun:
    places = {"directory": directory, "job_file": directory / "job.yaml", "local": directory, "memory": directory}
    limits = {"workers_per_node": 1, "notice_s": 600.0, "grace_s": 60.0}
    plan = Plan(chain="mine", job_name="llm", drains_condemned=False, **places, **limits)  # type: ignore[arg-type]
    return AllocationRun(plan, Here("7", "n[1-2]", 2), Console(quiet=True))


@pytest.mark.parametrize(
    ("jobs", "start", "options", "stopped"),
    [
        (Jobs("suspended"), "resume", [], 0),  # the second allocation of a chain
        (Jobs("failed", permanent_failure=False), "fresh", ["--resume"], 0),
        (Jobs("suspended", strange=True), "resume", ["--resume"], 1),
        (Jobs("suspended", strange=True), "fresh", ["--fresh"], 1),
        (Jobs("completed", strange=True), "resume", ["--resume"], 0),
        (Jobs("suspended", strange=True), "", [], 0),  # `holdfast run` refuses it
    ],
)
def test_how_the_launcher_of_an_allocation_starts(
    jobs: Jobs, start: str, options: list[str], stopped: int, tmp_path: Path
) -> None:
    assert allocation_run(tmp_path)._start_options(jobs, start) == options  # type: ignore[arg-type]
    assert jobs.stopped == [f"submitted again with --{start}"] * stopped


ENDS_WHEN_OVER = """
import json, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
while not (path.exists() and json.loads(path.read_text()).get("over")):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("fields", "frees"),
    [
        ({"kept": {"on_disk": True, "step": 20}}, True),
        ({"kept": {"on_disk": False, "step": 20}}, False),  # their memory has the only copy
        ({"suspended": {"durable": True, "step": 20, "nodes_left": ["n1"]}}, True),
        ({"suspended": {"durable": False, "step": 20, "nodes_left": ["n1"]}}, False),
    ],
)
def test_agents_end_by_themselves_unless_their_memory_is_needed(
    fields: dict[str, Any], frees: bool, tmp_path: Path
) -> None:
    file = tmp_path / ending.FILE
    with subprocess.Popen([sys.executable, "-c", ENDS_WHEN_OVER, str(file)]) as agents:
        try:
            allocation_run(tmp_path)._end_agents(Jobs("failed", **fields), FAILED, agents)  # type: ignore[arg-type]
            assert (agents.poll(), file.exists()) == ((0, True) if frees else (None, False))
        finally:
            agents.kill()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--nodes", "4"], "2, as in the job file"),
        (["--chain", "2"], "a store, because the next allocation may have other nodes"),
        (["--time", "tomorrow"], "HH:MM:SS"),
        (["--", "--signal=USR1@30"], "sets --signal itself"),
        (["--resume", "--fresh"], "either --fresh or --resume"),
        (["--local", "/scratch/" + "x" * 60], "because the agents make Unix sockets below it"),
    ],
)
def test_a_submission_that_cannot_work_is_refused(
    options: list[str], reason: str, job_file: Path, tmp_path: Path, said_to_slurm: Path
) -> None:
    done = CliRunner().invoke(slurm_app, ["submit", str(job_file), "--dir", str(tmp_path / "shared"), *options])
    assert isinstance(done.exception, InvalidSpec)
    assert reason in str(done.exception)
    assert not said_to_slurm.exists()


@pytest.mark.parametrize(
    ("shown", "drained"),
    [
        ("n1|idle|none\nn1|idle|none\n", True),
        ("n1|draining|disk of n1\n", False),  # somebody else has, and their reason stays
        ("n1|down*|Not responding\n", False),
    ],
)
def test_a_condemned_node_is_drained_unless_somebody_has_spoken(
    shown: str, drained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, ...]] = []

    def run(*command: str, timeout_s: float = 0.0) -> str:
        said.append(command)
        return shown if command[0] == "sinfo" else ""

    monkeypatch.setattr(tools, "run", run)
    done = CliRunner().invoke(slurm_app, ["drain", "n1", "Xid 79\n on GPU 3"])
    assert done.exit_code == 0, done.output
    changes = [command for command in said if command[0] == "scontrol"]
    expected = ("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=holdfast: Xid 79 on GPU 3")
    assert changes == ([expected] if drained else [])
    assert ("not changed" in done.output) is not drained


def test_a_node_that_slurm_does_not_know_is_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "run", lambda *_, **__: "")
    done = CliRunner().invoke(slurm_app, ["drain", "n[1-2]", "Xid 79"])
    assert isinstance(done.exception, InvalidSpec)
