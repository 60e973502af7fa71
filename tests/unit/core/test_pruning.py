"""Saved steps are deleted from the nodes when somebody asks for it, and none that a job may go back to."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, NotFound
from holdfast.domain.orders import Prune
from holdfast.supervisor.core import check_pruning, saved_steps
from holdfast.supervisor.protocol import JobPhase, JobStopRequested, JobSubmitted, PruneRequested, StartFrom


def stopped() -> Fleet:
    fleet = running(job(dp=2), saved=10)
    fleet.train(20, save=True)
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough", save=False))
    fleet.answer_orders()
    assert fleet.job.phase is JobPhase.STOPPED
    fleet.answer_orders()
    return fleet


def attempt(fleet: Fleet) -> int:
    assert fleet.job.running is not None
    return fleet.job.running.attempt


def ask(fleet: Fleet, *steps: tuple[int, int]) -> dict[str, tuple[tuple[int, int], ...]]:
    event = PruneRequested(fleet.now, JOB, tuple(CheckpointId(*step) for step in steps))
    check_pruning(fleet.state, event)
    fleet.fold(event)
    return {node: order.steps for node, order in fleet.orders(Prune).items() if isinstance(order, Prune)}


def test_every_node_that_has_a_step_of_a_job_that_is_over_deletes_it() -> None:
    fleet = stopped()
    oldest = (attempt(fleet), 10)
    assert ask(fleet, oldest) == {"n0": (oldest,), "n1": (oldest,)}
    fleet.answer_orders()
    assert not list(fleet.state.sends())


def test_a_node_that_is_away_hears_of_it_when_it_comes_back() -> None:
    fleet = stopped()
    fleet.gone("n1")
    ask(fleet, (attempt(fleet), 10))
    fleet.answer_orders()
    fleet.connect("n1")
    assert set(fleet.orders(Prune)) == {"n1"}


def test_what_a_running_job_may_go_back_to_is_refused_and_what_it_never_will_is_not() -> None:
    fleet = stopped()
    first = attempt(fleet)
    with pytest.raises(NotFound, match="no node has step 15"):
        ask(fleet, (first, 15))
    fleet.fold(JobSubmitted(fleet.now, job(dp=2), "token", start=StartFrom.CHECKPOINT))
    fleet.run()
    fleet.train(30, save=True)
    with pytest.raises(Conflict, match=r"job is running, and may go back to step 20"):
        ask(fleet, (first, 20))
    with pytest.raises(Conflict, match=r"may go back to step 30"):
        ask(fleet, (attempt(fleet), 30))
    assert {step.step: step.needed for step in saved_steps(fleet.state, JOB)} == {30: True, 20: True, 10: False}
    assert ask(fleet, (first, 10))
