"""An agent without free file descriptors: it takes no new work and says why, and its workers live on."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_harness import Agent, prepare_order, running_agent, script, start_job
from leftovers import gone
from waiting import wait_until

from holdfast.agent.host.descriptors import LOW, RESERVE
from holdfast.domain.orders import RanksFinished, Stop
from holdfast.domain.signals import HostSample, RankProgress, WorkerExited

UNTIL_TOLD = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@contextmanager
def no_descriptors(agent: Agent) -> Iterator[None]:
    """A real limit, below what the agent has open: not one call that needs another descriptor succeeds at first."""
    pid = agent.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (RESERVE + LOW // 2, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def ticks_go_on(agent: Agent, count: int) -> None:
    def reported() -> int:
        return len(agent.plane.ticks)

    before = reported()
    wait_until(lambda: reported() >= before + count, description=f"{count} more ticks")
    assert agent.process.poll() is None, agent.log()[-3000:]


def test_new_work_is_refused_with_the_cause_and_workers_live_on(tmp_path: Path) -> None:
    path, end = script(tmp_path, "until", UNTIL_TOLD), tmp_path / "end"
    with running_agent(tmp_path, replicator=True) as agent:
        plane = agent.plane
        prepared = start_job(plane, prepare_order("lives", path, nproc=3, args=(str(end),)))
        pids = [worker.pid for worker in prepared.workers]
        with no_descriptors(agent):
            refused = plane.ask(prepare_order("new", path, args=(str(end),)))
            assert not refused.ok
            for part in ("this node has ", " file descriptors left: ", "takes no new work", "ulimit -n"):
                assert part in refused.reason
            plane.wait_for_signal(HostSample, lambda s: s.files_left == 0)
            ticks_go_on(agent, 3)
            assert not any(map(gone, pids))
            reported = [s for s in plane.signals(RankProgress) if s.job == "lives"][-1]
            assert not {"", "T"} & set(reported.process_state), "unknown is not gone"
            os.kill(pids[2], signal.SIGKILL)
            exited = plane.wait_for_signal(WorkerExited, lambda e: e.job == "lives")
            assert (exited.rank, exited.signal) == (2, signal.SIGKILL)
            for child in agent.running("holdfast.replicator"):  # what it needs for this is in its reserve
                os.kill(child, signal.SIGKILL)
            wait_until(lambda: agent.running("holdfast.replicator"), description="the replicator again")
            assert plane.ask(Stop("new", 9)).ok, "what ends work is no new work"
            ticks_go_on(agent, 2)
        wait_until(
            lambda: "file descriptors available again" in agent.log(), description="the reserve to be held again"
        )
        accepted = start_job(plane, prepare_order("new", path, generation=10, args=(str(end),)))
        assert not gone(accepted.workers[0].pid)
        assert not any(map(gone, pids[:2]))
        end.touch()
        plane.wait_for(RanksFinished, lambda r: r.job == "new")
