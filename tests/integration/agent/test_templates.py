"""The worker template of a node: what it preloads and prepares, what it leaves out, and how it is replaced."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from agent_harness import SLEEPER, Agent, prepare_order, running_agent, script, start_job
from leftovers import gone
from waiting import wait_until

from holdfast.domain.job import LaunchSpec
from holdfast.domain.nodes import TemplateState
from holdfast.domain.orders import CheckpointNow, PrepareTemplate, Stop, WorkersChanged
from holdfast.domain.signals import WorkerExited


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with running_agent(tmp_path_factory.mktemp("node")) as agent:
        yield agent


STARTS_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""

UNTIL_TOLD = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def test_what_cannot_be_prepared_says_why_and_leaves_nothing(agent: Agent, tmp_path: Path) -> None:
    missing = agent.plane.ask(prepare_order("bad", "/no/such/script.py"))
    assert not missing.ok
    assert "/no/such/script.py" in missing.reason
    fine = script(tmp_path, "sleeper", SLEEPER)
    preload = agent.plane.ask(PrepareTemplate("bad", LaunchSpec(fine, preload=("no_such_module",))))
    assert not preload.ok
    assert "no_such_module" in preload.reason
    nobody = agent.plane.ask(CheckpointNow("bad", 1, 5))
    assert not nobody.ok
    assert "no workers on this node" in nobody.reason
    start_job(agent.plane, prepare_order("good", fine))  # the template is still there
    agent.plane.ask(Stop("good", 1))


def test_a_module_that_starts_a_thread_is_left_out_and_named(agent: Agent, tmp_path: Path) -> None:
    script(tmp_path, "threads_at_import", STARTS_A_THREAD)
    script(tmp_path, "needs_it", "import threads_at_import\n")
    script(tmp_path, "ends_at_import", "import os\nos._exit(3)\n")
    script(tmp_path, "harmless", "import os\nIMPORTED_IN = os.getpid()\n")
    path = script(tmp_path, "uses", "import os, harmless\nprint(harmless.IMPORTED_IN != os.getpid(), flush=True)\n")
    preload = ("threads_at_import", "needs_it", "ends_at_import", "harmless")
    start_job(agent.plane, prepare_order("threads", path, preload=preload))
    agent.plane.wait_for_signal(WorkerExited, lambda each: each.job == "threads")
    *notes, last = agent.worker_log("threads", 1, 0).splitlines()
    assert last == "True", "preloaded"
    assert [note.partition(", because ")[0] for note in notes] == [
        f"holdfast: not preloaded: {name}" for name in ("threads_at_import", "needs_it", "ends_at_import")
    ]
    assert "threads_at_import started 1 thread(s)" in notes[0]
    assert "its import ends the process" in notes[2]


PREPARES = """
import os, threading, time

def prepare():
    import torch
    drawn = torch.rand(1).item()
    return {"drawn": drawn, "made_in": os.getpid(), "tensor": torch.ones(1_000_000), "model": torch.nn.Linear(512, 512)}

def starts_a_thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return "made anyway"

def leaves_a_process():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid

def raises():
    raise ValueError("no such data set")
"""


def whole_line(agent: Agent, job: str, generation: int, rank: int) -> str:
    """What the rank has printed, once it has printed a line; its parts are written one by one."""
    said = agent.worker_log(job, generation, rank)
    return said if said.endswith("\n") else ""


def test_what_a_prepare_function_returned_is_shared_by_workers_and_later_starts(agent: Agent, tmp_path: Path) -> None:
    script(tmp_path, "mine", PREPARES)
    uses = (
        "import os, torch, mine, holdfast.train as hf\n"
        "found = hf.prepared(mine.prepare)\n"
        "same, own = hf.prepared(mine.prepare) is found, found['made_in'] == os.getpid()\n"
        "drawn = torch.rand(1).item() == found['drawn']\n"
        "print(found['made_in'], same, own, drawn, len(os.listdir('/proc/self/task')), flush=True)\n"
    )
    path = script(tmp_path, "uses", uses)
    said: list[list[str]] = []
    for generation in (1, 2):
        order = prepare_order("shares", path, generation=generation, nproc=2, preload=("mine:prepare",))
        start_job(agent.plane, order)
        for rank in (0, 1):
            read = functools.partial(whole_line, agent, "shares", generation, rank)
            said.append(wait_until(read, description="its line").split())
        assert agent.plane.ask(Stop("shares", generation)).ok
    assert len({each[0] for each in said}) == 1, "one call, in the template"
    assert all(each[1:3] == ["True", "False"] for each in said)
    assert all(each[3] == "True" for each in said), "its random numbers do not change those of the script"
    assert all(each[4] == "1" for each in said), "no thread"


def test_a_prepare_function_that_spoils_the_template_is_left_out_and_named(agent: Agent, tmp_path: Path) -> None:
    script(tmp_path, "mine", PREPARES)
    uses = (
        "import os, mine, holdfast.train as hf\n"
        "print(hf.prepared(mine.starts_a_thread), hf.prepared(mine.prepare)['made_in'] != os.getpid(), flush=True)\n"
    )
    preload = ("mine:prepare", "mine:starts_a_thread", "mine:leaves_a_process")
    start_job(agent.plane, prepare_order("spoils", script(tmp_path, "uses", uses), preload=preload))
    agent.plane.wait_for_signal(WorkerExited, lambda each: each.job == "spoils")
    thread, process, said = agent.worker_log("spoils", 1, 0).splitlines()
    note = "holdfast: not preloaded: mine:{0}, because mine:{0} {1}"
    assert thread.startswith(note.format("starts_a_thread", "started 1 thread(s): ")), thread
    assert process.startswith(note.format("leaves_a_process", "left 1 process(es) running: ")), process
    assert said == "made anyway True", "the worker has called the one, and the template the other"
    left = int(process.rpartition(" ")[2])
    wait_until(lambda: gone(left), description="the process that the function left to end")


def test_a_prepare_function_that_fails_fails_the_start_and_is_named(agent: Agent, tmp_path: Path) -> None:
    script(tmp_path, "mine", PREPARES)
    launch = LaunchSpec(script(tmp_path, "sleeper", SLEEPER), preload=("mine:raises",))
    answer = agent.plane.ask(PrepareTemplate("bad", launch))
    assert not answer.ok
    assert "mine:raises failed: ValueError: no such data set" in answer.reason


def test_a_preloaded_pyarrow_starts_no_thread(agent: Agent, tmp_path: Path) -> None:
    """Its allocator starts one when it is imported by anybody else."""
    path = script(tmp_path, "threads", "import os, pyarrow\nprint(len(os.listdir('/proc/self/task')), flush=True)\n")
    start_job(agent.plane, prepare_order("arrow", path, preload=("pyarrow",)))
    assert wait_until(lambda: agent.worker_lines("arrow", 1, 0), description="the script's line") == "1\n"


def test_another_template_takes_over_without_touching_running_workers(agent: Agent, tmp_path: Path) -> None:
    path = script(tmp_path, "sleeper", SLEEPER)
    (tmp_path / "mine.py").write_text("import os\nIMPORTED_IN = os.getpid()\n")
    said = "mine.IMPORTED_IN != os.getpid(), gc.isenabled()"
    uses = script(tmp_path, "uses", f"import gc, os, mine\nprint({said}, flush=True)\n")
    running = start_job(agent.plane, prepare_order("stays", path))
    before = set(agent.running("holdfast.train.warm.template"))
    assert agent.plane.ask(PrepareTemplate("other", LaunchSpec(uses, preload=("mine",)))).ok
    assert not gone(running.workers[0].pid)
    start_job(agent.plane, prepare_order("other", uses, preload=("mine",)))
    assert wait_until(lambda: agent.worker_lines("other", 1, 0), description="the script's line") == "True True\n", (
        "preloaded"
    )
    assert agent.plane.ask(Stop("stays", 1)).ok
    wait_until(
        lambda: not before & set(agent.running("holdfast.train.warm.template")), description="the old template to end"
    )


def templates(agent: Agent) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(agent.process.pid).children():
        try:
            if "holdfast.train.warm.template" in child.cmdline() and child.name() != "holdfast-reaper":
                found.append(child)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def test_a_template_that_dies_is_replaced_and_its_workers_go_on(agent: Agent, tmp_path: Path) -> None:
    path = script(tmp_path, "until", UNTIL_TOLD)
    prepared = start_job(agent.plane, prepare_order("orphans", path, nproc=2, args=(str(tmp_path / "end"),)))
    before = templates(agent)

    def templates_reported() -> list[TemplateState]:
        sets = agent.plane.all_of(WorkersChanged)
        return [each.template for each in sets if each.template is not None and "orphans" in each.template.jobs]

    wait_until(lambda: any(each.ready for each in templates_reported()), description="the report of the first template")
    reported = len(templates_reported())
    for template in before:
        template.kill()
    wait_until(lambda: [each for each in templates(agent) if each not in before], description="another template")
    wait_until(  # one report if the successor was ready before the report of the end was due
        lambda: [each.ready for each in templates_reported()[reported:]][-1:] == [True],
        description="the report of its successor",
    )
    assert not any(each.failure for each in templates_reported()), "once is no row"
    again = start_job(agent.plane, prepare_order("others", script(tmp_path, "sleeper", SLEEPER)))
    assert not gone(again.workers[0].pid)
    assert not any(gone(worker.pid) for worker in prepared.workers)
    os.kill(prepared.workers[1].pid, signal.SIGKILL)
    exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "orphans")
    assert (exited.rank, exited.signal, exited.expected) == (1, signal.SIGKILL, False)
    (tmp_path / "end").touch()
    ended = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "orphans" and e.rank == 0)
    assert ended.exit_code == 0, "how it ended is known without the template that it came from"
    assert agent.plane.ask(Stop("others", 1)).ok
