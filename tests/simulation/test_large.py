"""One job of 256 nodes, 2,048 ranks, recovers from each fault; and a fault that it does not recover from is found. What the
simulator does and remembers for a fault depends on the number of nodes alone."""

from __future__ import annotations

import gc
from functools import partial

import pytest

from holdfast.diagnostics.detectors.worker_exit import WorkerExit
from holdfast.sim import large
from holdfast.sim.agent import JOB
from holdfast.sim.answers import Answers
from holdfast.sim.large import ORDERS_KEPT, LargeJob
from holdfast.sim.supervisor import Supervisor
from holdfast.sim.world import Violation


def test_every_fault_of_a_large_job_is_recovered() -> None:
    result = LargeJob(256, 20).run()
    assert result.recovered == 20
    assert set(result.kinds) == {"worker crash", "lost node", "GPU off the bus"}


def test_recoveries_of_a_large_job_restore_checkpoints() -> None:
    saved = LargeJob(16, 10, checkpoints=True)
    assert saved.run().furthest > 2 * large.SAVE_STEPS
    running = saved.supervisor.committed.jobs[JOB].running
    assert running is not None
    assert running.restore.step >= 2 * large.SAVE_STEPS
    assert LargeJob(16, 10).run().furthest < large.SAVE_STEPS


def test_a_fault_that_is_not_recovered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerExit, "_exited", lambda *of: ())
    with pytest.raises(Violation, match="no finding about the worker_crash"):
        LargeJob(16, 20).run()


def test_reports_that_share_an_entry_lead_to_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = LargeJob(16, 6)
    result = gathered.run()
    monkeypatch.setattr(large, "Supervisor", partial(_supervisor, gathers=False))
    alone = LargeJob(16, 6)
    assert alone.run().kinds == result.kinds
    assert alone.world.now == gathered.world.now
    assert alone.supervisor.committed == gathered.supervisor.committed


def _supervisor(*world: object, gathers: bool, **options: object) -> Supervisor:
    return Supervisor(*world, **(options | {"gathers": gathers}))  # type: ignore[arg-type]


def test_the_events_of_a_fault_are_proportional_to_the_nodes() -> None:
    few, many = (LargeJob(nodes, 4).run() for nodes in (32, 256))
    assert many.kinds == few.kinds
    assert many.events / many.nodes < 1.1 * few.events / few.nodes


def test_what_is_remembered_does_not_grow_with_the_faults() -> None:
    job = LargeJob(8, 40)
    job.run()
    for agent in job.agents.values():
        assert len(agent.orders) <= ORDERS_KEPT + 1
        assert agent.executed.keys() <= agent.orders.keys()
        assert isinstance(agent.record, Answers)
        assert len(agent.record) <= ORDERS_KEPT
    assert sum(map(len, job.diagnostics._engine._folded.values())) <= 2 * len(job.agents)
    assert not any(link.telemetry.unread for link in job.diagnostics._links.values())


def test_events_leave_no_garbage_with_cycles() -> None:
    """The command collects none, because a collection walks a heap that grows with the nodes."""
    LargeJob(32, 2).run()  # creates the codecs
    gc.collect()
    gc.disable()
    try:
        job = LargeJob(32, 8)
        job.run()
        assert gc.collect() < job.nodes
    finally:
        gc.enable()
