"""What a worker does is seen and said: exits, exceptions, kills, first steps, and one generation at a time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from agent_harness import SLEEPER, Agent, prepare_order, running_agent, script, start_job
from leftovers import gone
from waiting import quickest, wait_until

from holdfast.domain.collectives import StallSnapshot
from holdfast.domain.job import HangSpec
from holdfast.domain.orders import (
    RanksFinished,
    RanksStarted,
    RanksStepping,
    Start,
    Stop,
    WorkersChanged,
)
from holdfast.domain.signals import GenerationStarted, GenerationStopped, RankProgress, StepColumns, WorkerExited


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with running_agent(tmp_path_factory.mktemp("node")) as agent:
        yield agent


NOTES = """
import os, socket, time, json
agent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
who = {"job": os.environ["HOLDFAST_JOB"], "generation": int(os.environ["HOLDFAST_GENERATION"]), "rank": int(os.environ["RANK"])}
def note(kind, **fields):
    agent.sendto(json.dumps({"type": kind, **who, **fields}).encode(), os.environ["HOLDFAST_NOTES"])
agent.sendto(b"garbage \\xff", os.environ["HOLDFAST_NOTES"])
note("phase", phase="init", at=time.time(), step=0)
for step in (1, 2):
    times = {"started_at": time.time(), "ended_at": time.time(), "data_s": 0.0, "stall_s": 0.0}
    note("step", step=step, tokens=7, loss=2.5, grad_norm=None, **times)
    note("started", phases_s={"process_group": 0.1, "first_step": 0.2})
time.sleep(600)
"""

RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError('bad loss')
main()
"""

HOLDS_A_LOCK = """
import fcntl, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = open(sys.argv[1], 'w')
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
print('got it', flush=True)
time.sleep(600)
"""

HAS_A_CHILD = """
import subprocess, time
print(subprocess.Popen(['sleep', '600']).pid, flush=True)
time.sleep(600)
"""


STEPS = """
import os, socket, time
from holdfast.domain.worker import encode
recorder = socket.socket(socket.AF_UNIX)
recorder.bind(os.environ["HOLDFAST_RECORDER"])
agent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
who = {"job": os.environ["HOLDFAST_JOB"], "generation": int(os.environ["HOLDFAST_GENERATION"]), "rank": int(os.environ["RANK"])}
values = {"data_s": 0.0, "stall_s": 0.0, "tokens": 1, "loss": 1.0, "grad_norm": 1.0}
step = 0
while True:
    step, at = step + 1, time.time()
    times = {"started_at": at, "ended_at": at, "ended_uptime_s": time.monotonic()}
    agent.sendto(encode("step", **who, step=step, **times, **values), os.environ["HOLDFAST_NOTES"])
    time.sleep(0.05)
"""

REAPER = "holdfast-reaper"

# What the script starts and does not end: in a session of its own, a daemon of a shell that has gone, a fork in a session of
# its own, and that fork's child.
LEFT = ("session", "daemon", "fork", "fork of the fork")
LEAVES_MUCH = """
import os, subprocess, sys, time
def say(pid):
    print(pid, flush=True)
say(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)
say(int(subprocess.check_output(['sh', '-c', 'setsid sleep 600 >/dev/null 2>&1 & echo $!'])))
if os.fork() == 0:
    os.setsid()
    say(os.getpid())
    if os.fork() == 0:
        os.setsid()
        say(os.getpid())
    while True:
        time.sleep(600)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""

SHARES_MEMORY = """
import multiprocessing, os, sys, time
from multiprocessing import shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
print(segment.name, flush=True)
time.sleep(600)
"""

# The process is named like the one that deletes shared memory, and never ends.
HAS_A_DEAF_CLEANER = """
import subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
cleaner = subprocess.Popen([sys.executable, '-c', deaf, 'resource_tracker'], stdout=subprocess.PIPE)
cleaner.stdout.readline()
print(cleaner.pid, flush=True)
time.sleep(600)
"""

DAEMONIZES = """
import os, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
time.sleep(600)
"""

BINDS_ITS_RECORDER = """
import os, socket, time
recorder = socket.socket(socket.AF_UNIX)
recorder.bind(os.environ["HOLDFAST_RECORDER"])
time.sleep(600)
"""

LEAVES_ON_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))
print('up', flush=True)
time.sleep(600)
"""


def test_exit_code_zero_finishes_the_job(agent: Agent, tmp_path: Path) -> None:
    path = script(tmp_path, "ok", "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])\n")
    start_job(agent.plane, prepare_order("ok", path, nproc=2, args=("--steps", "3")))
    finished = agent.plane.wait_for(RanksFinished, lambda r: r.job == "ok")
    assert finished.ranks == (0, 1)

    def exits_reported() -> list[WorkerExited]:  # by another stream than what has just been waited for
        reported = [e for e in agent.plane.signals(WorkerExited) if e.job == "ok"]
        return reported if len(reported) == 2 else []

    exits = wait_until(exits_reported, description="both exits")
    assert sorted(e.rank for e in exits) == [0, 1]
    assert all(e.exit_code == 0 and not e.expected for e in exits)
    assert agent.plane.wait_for_signal(GenerationStopped, lambda s: s.job == "ok").finished
    assert agent.worker_log("ok", 1, 1) == "1 2 ['--steps', '3']\n"


COUNTS = """
import holdfast.train as hf
def main(run):
    step = run.restore({})
    while step < 7:
        with run.step(step) as s:
            s.log(tokens=1)
        step += 1
hf.launch(main)
"""


def test_the_last_steps_before_the_end_are_reported(agent: Agent, tmp_path: Path) -> None:
    """All of them fall between two ticks, and the workers are gone at the second."""
    start_job(agent.plane, prepare_order("counts", script(tmp_path, "counts", COUNTS), nproc=2))
    agent.plane.wait_for(RanksFinished, lambda r: r.job == "counts")

    def reported() -> set[tuple[int, int]]:
        columns = [c for c in agent.plane.signals(StepColumns) if c.job == "counts"]
        return {pair for c in columns for pair in zip(c.rank, c.step, strict=True)}

    every = {(rank, step) for rank in (0, 1) for step in range(1, 8)}
    wait_until(lambda: reported() == every, description="seven steps of both ranks")


STANDS_STILL = """
import time
import torch
import torch.distributed as dist
import holdfast.train as hf
def main(run):
    step = run.restore({})
    while True:
        with run.step(step):
            if step == 3 and dist.get_rank() == 1:
                wait_for_what_never_comes()
            dist.all_reduce(torch.ones(4))
        step += 1
def wait_for_what_never_comes():
    time.sleep(600)
hf.launch(main)
"""


def test_ranks_that_stand_still_are_asked_what_they_do_and_the_absent_one_shows(agent: Agent, tmp_path: Path) -> None:
    """Rank 0 waits for a collective that rank 1 never enters: from torch's recorders in both processes to diagnostics."""
    order = prepare_order("still", script(tmp_path, "still", STANDS_STILL), nproc=2)
    start_job(agent.plane, replace(order, hang=HangSpec(floor_s=1.0)))
    reported = agent.plane.wait_for_signal(StallSnapshot, lambda s: s.job == "still" and all(s.answered))
    assert reported.rank == (0, 1)
    assert reported.interpreter == ("free", "free")
    assert "wait_for_what_never_comes" in reported.stack[1]
    assert "wait_for_what_never_comes" not in reported.stack[0]
    rows = reported.rows
    seen = dict(zip(rows.rank, zip(rows.members, rows.kind, rows.entered, rows.pending, strict=True), strict=True))
    assert {members for members, *_ in seen.values()} == {"0-1"}
    (_, kind, entered, pending), (_, nothing, before, idle) = seen[0], seen[1]
    assert (kind, pending, nothing, idle) == ("all_reduce", entered, "", -1)
    assert entered == before + 1
    assert agent.plane.ask(Stop("still", 1)).ok


def test_sigkill_is_seen_within_milliseconds(agent: Agent, tmp_path: Path) -> None:
    path = script(tmp_path, "sleeper", SLEEPER)

    def seen_after(round_: int) -> float:
        prepared = start_job(agent.plane, prepare_order("kill", path, generation=round_ + 1))
        before = time.time()
        os.kill(prepared.workers[0].pid, signal.SIGKILL)
        exited = agent.plane.wait_for_signal(WorkerExited, lambda e: (e.job, e.generation) == ("kill", round_ + 1))
        assert (exited.signal, exited.exit_code, exited.expected) == (signal.SIGKILL, None, False)
        assert 0.0 < exited.uptime_s <= time.monotonic(), "by the clock that nobody sets, as its reaper saw it"
        return exited.at - before

    assert quickest(seen_after, below_s=0.5) < 0.5
    started = agent.plane.wait_for_signal(GenerationStarted, lambda s: s.job == "kill")
    assert started.ranks == (0,)


def test_exception_reaches_the_signal_with_type_frames_and_log(agent: Agent, tmp_path: Path) -> None:
    path = script(tmp_path, "raises", "def inner():\n    raise KeyError('no such batch')\nprint('before')\ninner()\n")
    start_job(agent.plane, prepare_order("raises", path))
    exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "raises")
    assert exited.exit_code == 1
    assert exited.error is not None
    assert 0.0 < exited.error.uptime_s <= exited.uptime_s
    assert exited.error.type == "KeyError"
    assert "no such batch" in exited.error.message
    assert exited.error.frames == (f"{path}:4 <module>", f"{path}:2 inner")
    assert "before" in exited.log_tail
    assert "forked.py" not in "\n".join(exited.log_tail)  # the user's traceback is the user's


ABORTED = """
import os
os.write(2, b"terminate called after throwing an instance of 'std::runtime_error'\\n  what():  an earlier one\\n")
os.write(2, b"terminate called after throwing an instance of 'c10::DistBackendError'\\n"
    b"  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: CUDA error: "
    b"uncorrectable ECC error encountered\\nCUDA kernel errors might be reported later\\n\\n"
    b"Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):\\n"
    b"frame #5: c10d::ProcessGroupNCCL::watchdogHandler() + 0x77c (0x7f in libtorch_cuda.so)\\n\\n"
    b"Fatal Python error: Aborted\\n\\n" + b'  File "/model.py", line 9 in forward\\n' * 500)
os.abort()
"""


def test_exception_of_cpp_that_aborts_the_process_is_read_from_its_log(agent: Agent, tmp_path: Path) -> None:
    start_job(agent.plane, prepare_order("aborts", script(tmp_path, "aborts", ABORTED)))
    exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "aborts")
    assert (exited.signal, exited.exit_code) == (signal.SIGABRT, None)
    assert exited.error is not None
    assert exited.error.type == "c10.DistBackendError"
    assert exited.error.message == (
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported later"
    )


@pytest.mark.parametrize(("body", "code"), [("sys.exit(7)", 7), ("sys.exit('the reason')", 1), ("sys.exit()", 0)])
def test_system_exit_keeps_its_code_and_runs_exit_handlers(agent: Agent, tmp_path: Path, body: str, code: int) -> None:
    job = f"exit-{code}"
    path = script(tmp_path, "exits", f"import atexit, sys\natexit.register(print, 'handler ran')\n{body}\n")
    start_job(agent.plane, prepare_order(job, path))
    exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == job)
    assert (exited.exit_code, exited.error) == (code, None)
    assert "handler ran" in agent.worker_log(job, 1, 0)


def test_a_clean_end_is_dated_by_the_script_and_not_by_its_exit_handlers(agent: Agent, tmp_path: Path) -> None:
    """As of a script that uploads its metrics at its end, while the ranks that it has left fail."""
    body = "import atexit, time\nprint(repr(time.time()), flush=True)\n"
    handler = "def upload():\n    time.sleep(0.2)\n    print(repr(time.time()), flush=True)\natexit.register(upload)\n"
    start_job(agent.plane, prepare_order("uploads", script(tmp_path, "uploads", body + handler)))
    exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "uploads")
    began, uploaded = map(float, agent.worker_log("uploads", 1, 0).split())
    assert exited.exit_code == 0
    assert began <= exited.at < uploaded


def test_error_file_of_torch_record_is_understood(agent: Agent, tmp_path: Path) -> None:
    path = script(tmp_path, "recorded", RECORDED)
    start_job(agent.plane, prepare_order("record", path))
    exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "record")
    assert exited.error is not None
    assert (exited.error.type, exited.error.message) == ("ValueError", "bad loss")


def test_notes_become_columns_progress_and_first_steps(agent: Agent, tmp_path: Path) -> None:
    start_job(agent.plane, prepare_order("notes", script(tmp_path, "notes", NOTES), nproc=2))
    stepping = agent.plane.wait_for(RanksStepping, lambda r: r.job == "notes")
    assert stepping.ranks == (0, 1)
    assert stepping.step >= 1
    assert dict(stepping.phases_s)["first_step"] == 0.2
    wait_until(
        lambda: sum(len(s.step) for s in agent.plane.signals(StepColumns) if s.job == "notes") == 4,
        description="two steps of two ranks",
    )
    progress = agent.plane.wait_for_signal(RankProgress, lambda p: p.job == "notes" and p.step == (2, 2))
    assert all(state in "RSD" for state in progress.process_state)
    assert agent.plane.ask(Stop("notes", 1)).ok
    exits = [e for e in agent.plane.signals(WorkerExited) if e.job == "notes"] or [
        agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "notes")
    ]
    assert all(e.expected and e.step == 2 for e in exits)
    agent.plane.wait_for_signal(GenerationStopped, lambda s: s.job == "notes")
    assert len([r for r in agent.plane.all_of(RanksStepping) if r.job == "notes"]) == 1


def test_unmodified_script_counts_as_stepping_only_after_it_has_lived(agent: Agent, tmp_path: Path) -> None:
    before = time.time()
    start_job(agent.plane, prepare_order("blind", script(tmp_path, "sleeper", SLEEPER)))
    stepping = agent.plane.wait_for(RanksStepping, lambda r: r.job == "blind")
    assert stepping.step == 0
    assert stepping.at - before >= 0.5
    agent.plane.ask(Stop("blind", 1))


def test_two_generations_never_run_at_once(agent: Agent, tmp_path: Path) -> None:
    """Every worker keeps an exclusive lock while it runs, and ignores SIGTERM: an overlap would fail to take it."""
    path, lock = script(tmp_path, "locks", HOLDS_A_LOCK), str(tmp_path / "lock")
    pids: list[int] = []
    for generation in (1, 2, 3):
        prepared = start_job(agent.plane, prepare_order("locks", path, generation=generation, args=(lock,)))
        assert all(gone(pid) for pid in pids)
        assert {name for name, _ in prepared.phases_s} == {"stop", "fork", "stage"}
        pids.append(prepared.workers[0].pid)
        wait_until(lambda g=generation: agent.worker_log("locks", g, 0) == "got it\n", description="the lock")  # type: ignore[misc]
    old = agent.plane.ask(prepare_order("locks", path, generation=2))
    assert not old.ok
    assert "generation 2 of locks is over" in old.reason
    assert not agent.plane.ask(Start("locks", 2, "127.0.0.1:1")).ok
    assert not gone(pids[-1])
    assert agent.plane.ask(Stop("locks", 3)).ok
    assert gone(pids[-1])


def test_the_answer_to_prepare_reports_the_workers_to_supervisors_that_take_it(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        _the_answer_reports_the_workers(agent, tmp_path)


def _the_answer_reports_the_workers(agent: Agent, tmp_path: Path) -> None:
    path = script(tmp_path, "sleeper", SLEEPER)
    start_job(agent.plane, prepare_order("said", path, nproc=2))
    agent.plane.wait_for(WorkersChanged, lambda each: each.template is not None and "said" in each.template.jobs)
    said = agent.plane.ask(prepare_order("said", path, generation=2, nproc=2))
    assert said.workers_version
    os.kill(said.workers[1].pid, signal.SIGKILL)
    ended = agent.plane.wait_for(WorkersChanged, lambda each: each.version > said.workers_version)
    assert [(each.generation, each.rank) for each in ended.workers] == [(2, 0)]
    later = agent.plane.reports[agent.plane.reports.index(said) + 1 :]
    assert not [each for each in later if isinstance(each, WorkersChanged) and each.version == said.workers_version]


def test_heartbeats_answer_start(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        plane = agent.plane
        path = script(tmp_path, "sleeper", SLEEPER)
        prepared = plane.ask(prepare_order("beaten", path))
        assert RanksStarted("beaten", 1) not in plane.started, "it is only prepared"
        order = Start("beaten", 1, prepared.master)
        command = plane.send(order)
        wait_until(lambda: RanksStarted("beaten", 1) in plane.started, description="a heartbeat that names the start")
        assert not plane.answers(command)
        assert plane.ask(order, command_id=command).ok, "it answers the repeated order"
        failed = plane.ask(Start("beaten", 7, prepared.master))
        assert not failed.ok, "it answers at once what has failed"
        assert plane.ask(Stop("beaten", 1)).ok


def test_heartbeats_repeat_first_steps_until_they_are_recorded_also_on_the_next_session(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        plane = agent.plane
        plane.records_first_steps = False
        start_job(plane, prepare_order("unheard", script(tmp_path, "unheard", SLEEPER)))
        stepping = plane.wait_for(RanksStepping, lambda each: each.job == "unheard")
        wait_until(
            lambda: plane.first_steps.count(stepping) > 1, description="a heartbeat that repeats the first steps"
        )
        assert plane.all_of(RanksStepping).count(stepping) == 1
        heard = plane.first_steps.count(stepping)
        plane.drop_session()
        wait_until(
            lambda: plane.first_steps.count(stepping) > heard + 1,
            description="heartbeats of the next session with them",
        )
        assert plane.ask(Stop("unheard", 1)).ok


def test_data_loader_processes_go_with_their_worker(agent: Agent, tmp_path: Path) -> None:
    path = script(tmp_path, "family", HAS_A_CHILD)
    prepared = start_job(agent.plane, prepare_order("family", path))
    pid = int(wait_until(lambda: agent.worker_lines("family", 1, 0), description="the child's pid"))
    os.kill(prepared.workers[0].pid, signal.SIGKILL)
    wait_until(lambda: gone(pid), description="the worker's own child to go")


def test_a_worker_is_shown_with_its_job_and_rank(agent: Agent, tmp_path: Path) -> None:
    running = start_job(agent.plane, prepare_order("shown", script(tmp_path, "sleeper", SLEEPER), nproc=2))
    shown = [psutil.Process(worker.pid).cmdline()[0] for worker in running.workers]
    assert shown == ["holdfast: shown rank 0", "holdfast: shown rank 1"]
    assert agent.plane.ask(Stop("shown", 1)).ok


def started(agent: Agent, job: str, generation: int = 1) -> list[int]:
    """The pids that `LEAVES_MUCH` has printed."""
    return wait_until(
        lambda: (
            [int(word) for word in words]
            if len(words := agent.worker_log(job, generation, 0).split()) == len(LEFT)
            else None
        ),
        description="what the script starts",
    )


@pytest.mark.parametrize("end", ["stop", "kill", "exit"])
def test_nothing_that_a_worker_starts_outlives_it(agent: Agent, tmp_path: Path, end: str) -> None:
    """Sessions of their own, daemons, and forks that never called exec: none of them is in the worker's process group."""
    path, job = script(tmp_path, "leaves", LEAVES_MUCH), f"leaves-{end}"
    prepared = start_job(agent.plane, prepare_order(job, path, args=(str(tmp_path / "end"),)))
    left = started(agent, job)
    assert not any(map(gone, left)), "they live as long as the worker does"
    match end:
        case "stop":
            assert agent.plane.ask(Stop(job, 1)).ok
            assert all(map(gone, left)), "the answer means that they are gone"
        case "kill":
            os.kill(prepared.workers[0].pid, signal.SIGKILL)
        case "exit":
            (tmp_path / "end").touch()
    wait_until(lambda: all(map(gone, left)), description="what it started to go")
    note = "holdfast: rank 0 has ended with exit code 0, and the processes that it had started are killed: "
    said = [line for line in agent.worker_log(job, 1, 0).splitlines() if line.startswith(note)]
    assert len(said) == (end == "exit"), "a script that daemonizes appears to complete at once"
    killed = ["a fork of itself", "a fork of itself", "sleep 600", "sleep 600"]
    assert all(sorted(line.removeprefix(note).split(", ")) == killed for line in said)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_shared_memory_of_a_killed_worker_is_deleted(agent: Agent, tmp_path: Path, end: str) -> None:
    """As of data sets that ranks share. Otherwise each restart would take more of /dev/shm, until no save finds room."""
    path, job = script(tmp_path, "shares", SHARES_MEMORY), f"shares-{end}"
    prepared = start_job(agent.plane, prepare_order(job, path))
    name = wait_until(lambda: agent.worker_lines(job, 1, 0), description="the name of the segment").split()[0]
    segment = Path("/dev/shm") / name
    assert segment.exists()
    if end == "kill":
        os.kill(prepared.workers[0].pid, signal.SIGKILL)
    assert agent.plane.ask(Stop(job, 1)).ok
    wait_until(lambda: not segment.exists(), description="the segment to be deleted")


def test_a_helper_that_does_not_end_is_killed(agent: Agent, tmp_path: Path) -> None:
    prepared = start_job(agent.plane, prepare_order("deaf", script(tmp_path, "deaf", HAS_A_DEAF_CLEANER)))
    helper = int(wait_until(lambda: agent.worker_lines("deaf", 1, 0), description="the helper's pid"))
    os.kill(prepared.workers[0].pid, signal.SIGKILL)
    wait_until(lambda: gone(helper), description="the helper to go")


def test_a_script_that_daemonizes_is_named_in_its_log(agent: Agent, tmp_path: Path) -> None:
    path = script(tmp_path, "daemon", DAEMONIZES)
    start_job(agent.plane, prepare_order("daemon", path))
    exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "daemon")
    assert exited.exit_code == 0
    assert "the processes that it had started are killed: a fork of itself" in agent.worker_log("daemon", 1, 0)


def test_a_killed_reaper_takes_its_worker_along_and_the_agent_ends_the_rest(agent: Agent, tmp_path: Path) -> None:
    path = script(tmp_path, "leaves", LEAVES_MUCH)
    prepared = start_job(agent.plane, prepare_order("unreaped", path, args=(str(tmp_path / "end"),)))
    left, worker = started(agent, "unreaped"), psutil.Process(prepared.workers[0].pid)
    reaper = worker.parent()
    assert reaper is not None
    assert reaper.name() == REAPER
    reaper.kill()
    exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "unreaped")
    assert (exited.signal, exited.expected) == (signal.SIGKILL, False)
    wait_until(lambda: all(map(gone, left)), description="what it started to go")
    again = start_job(agent.plane, prepare_order("unreaped", path, generation=2, args=(str(tmp_path / "end"),)))
    assert not gone(again.workers[0].pid)
    assert agent.plane.ask(Stop("unreaped", 2)).ok
    dead = [each for each in psutil.Process(agent.process.pid).children() if each.status() == psutil.STATUS_ZOMBIE]
    assert not dead, "all that became the agent's child has been reaped"


def test_a_stopped_reaper_does_not_hold_up_a_stop(agent: Agent, tmp_path: Path) -> None:
    prepared = start_job(agent.plane, prepare_order("stopped", script(tmp_path, "sleeper", SLEEPER)))
    os.kill(psutil.Process(prepared.workers[0].pid).ppid(), signal.SIGSTOP)
    assert agent.plane.ask(Stop("stopped", 1)).ok
    assert gone(prepared.workers[0].pid)


def test_an_agent_that_was_frozen_with_its_ranks_counts_their_silence_from_then_on(
    agent: Agent, tmp_path: Path
) -> None:
    hang = HangSpec(floor_s=3.0)  # a standstill is reported after a third of it
    order = replace(prepare_order("frozen", script(tmp_path, "steps", STEPS)), hang=hang)
    worker = start_job(agent.plane, order).workers[0].pid
    agent.plane.wait_for_signal(StepColumns, lambda steps: steps.job == "frozen")
    try:
        for pid in (agent.process.pid, worker):  # in this order: the agent never sees that the rank alone is silent
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)  # the length of the freeze
        resumed_at = time.time()
    finally:
        os.kill(agent.process.pid, signal.SIGCONT)
    standstill = agent.plane.wait_for_signal(StallSnapshot, lambda still: still.job == "frozen")
    assert standstill.at - resumed_at >= hang.floor_s / 3
    assert "process was frozen" in agent.log()
    assert agent.plane.ask(Stop("frozen", 1)).ok


def test_no_socket_of_a_flight_recorder_is_left(tmp_path: Path) -> None:
    binds = script(tmp_path, "binds", BINDS_ITS_RECORDER)

    def sockets(agent: Agent) -> list[Path]:
        return list(agent.directory.glob("fr-*.sock"))

    with running_agent(tmp_path) as agent:
        start_job(agent.plane, prepare_order("binds", binds, nproc=2))
        wait_until(lambda: len(sockets(agent)) == 2, description="both sockets")
        assert agent.plane.ask(Stop("binds", 1)).ok
        assert not sockets(agent)
        prepared = start_job(agent.plane, prepare_order("binds", binds, generation=2, nproc=2))
        wait_until(lambda: len(sockets(agent)) == 2, description="both sockets")
        reapers = [psutil.Process(worker.pid).ppid() for worker in prepared.workers]
        agent.process.kill()
        agent.process.wait()
        everybody = [*reapers, *(worker.pid for worker in prepared.workers)]
        wait_until(lambda: all(map(gone, everybody)), description="an agent's workers to go with it")
        agent.restart()
        assert not sockets(agent)


def test_an_unwritable_log_directory_is_named(agent: Agent, tmp_path: Path) -> None:
    (agent.directory / "logs" / "nowhere").write_text("in the way")
    answer = agent.plane.ask(prepare_order("nowhere", script(tmp_path, "sleeper", SLEEPER)))
    assert not answer.ok
    assert str(agent.directory / "logs" / "nowhere") in answer.reason


def test_grace_lets_an_unmodified_script_leave_by_itself(agent: Agent, tmp_path: Path) -> None:
    path = script(tmp_path, "graceful", LEAVES_ON_SIGTERM)
    start_job(agent.plane, prepare_order("graceful", path))
    wait_until(lambda: agent.worker_log("graceful", 1, 0) == "up\n", description="the script to be up")
    assert agent.plane.ask(Stop("graceful", 1, grace_s=10)).ok
    assert agent.worker_log("graceful", 1, 0) == "up\nsaved\n"
    exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "graceful")
    assert exited.expected
    assert not [r for r in agent.plane.all_of(RanksFinished) if r.job == "graceful"]
