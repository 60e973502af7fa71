"""The states of a job: the table is complete, what it does not list is refused, and what a state does not know it cannot leave
behind."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from fleet import JOB, job, running

from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import Action, ActionKind, IncidentState
from holdfast.domain.orders import Prepare
from holdfast.supervisor import state_diagram
from holdfast.supervisor.core.model.lifecycle import (
    TRANSITIONS,
    AwaitedNodes,
    Cause,
    Change,
    Completed,
    Deferred,
    Doing,
    Failed,
    IllegalTransition,
    Pending,
    Preparing,
    Replanning,
    Resetting,
    Running,
    Saving,
    Starting,
    Stopped,
    Stopping,
    Suspended,
    Waiting,
    check,
)
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.protocol import JobPhase, JobStopRequested, NodeCordonRequested

DOCUMENT = Path(__file__).parents[3] / "docs" / "architecture.md"
CHANGE = Change((), 0.0)
ONE_OF_EACH: tuple[Doing, ...] = (
    Pending(),
    Preparing(CHANGE, {}),
    Starting(CHANGE, 0.0),
    Replanning(),
    Resetting("i-1", ("n1",)),
    Running(),
    Waiting(AwaitedNodes(0.0, ())),
    Suspended(AwaitedNodes(0.0, ()), 0.0),
    Deferred(0.0, 1.0),
    Saving("enough", 10),
    Stopping("enough"),
    Stopped(),
    Completed(),
    Failed(),
)


def test_the_table_has_every_state_and_every_state_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(get_args(Doing)) == {type(each) for each in ONE_OF_EACH}
    reached: set[type[Doing]] = {Pending}
    while more := {then for state in reached for then in TRANSITIONS[state].values()} - reached:
        reached |= more
    assert reached == set(TRANSITIONS)
    assert {each.phase for each in ONE_OF_EACH} == set(JobPhase)
    assert {cause for legal in TRANSITIONS.values() for cause in legal} == set(Cause)


def test_only_what_is_finished_is_submitted_again() -> None:
    assert {state.phase for state, legal in TRANSITIONS.items() if Cause.SUBMIT in legal} == {
        phase for phase in JobPhase if phase.finished
    }


@pytest.mark.parametrize("doing", ONE_OF_EACH, ids=lambda doing: type(doing).__name__)
def test_what_the_table_does_not_list_is_refused_by_name(doing: Doing) -> None:
    for cause in Cause:
        for then in ONE_OF_EACH:
            if TRANSITIONS[type(doing)].get(cause) is type(then):
                check(JOB, doing, cause, then)
                continue
            with pytest.raises(IllegalTransition, match=f"{JOB} is {type(doing).__name__}: {cause.name}"):
                check(JOB, doing, cause, then)


def test_a_refused_transition_leaves_no_trace() -> None:
    fleet = running(job(dp=2))
    turn = Turn(fleet.state, fleet.now)
    with pytest.raises(IllegalTransition):
        turn.move(JOB, Cause.STEP, Running(), "it runs already")
    assert turn.finish() is fleet.state
    assert not turn.commands


def test_the_diagram_in_the_documentation_is_that_of_the_table() -> None:
    text = DOCUMENT.read_text()
    assert state_diagram.drawn_into(text) == text, "run make state-diagram"


@pytest.mark.parametrize("save", [False, True])
def test_a_policy_that_answers_after_the_stop_starts_nothing(save: bool) -> None:
    fleet = running(job(dp=2), saved=10, decide=False)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.questions
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough", save=save))
    fleet.answer(Action(ActionKind.RESTART, "again"))
    assert not fleet.orders(Prepare)
    assert isinstance(fleet.job.doing, Saving if save else Stopping)
    assert fleet.incident.state is IncidentState.RESOLVED
    fleet.wait(2 * fleet.state.config.save_s)
    fleet.answer_orders()
    assert fleet.job.phase is JobPhase.STOPPED


def test_a_planned_change_that_waits_does_not_shorten_the_wait_for_lost_checkpoints() -> None:
    """Since when a healthy run waits for a spare says nothing of how long its checkpoints have been missing."""
    fleet = running(job(dp=2, min_dp=2), saved=30)
    fleet.train(45)
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "a fan is loud"))
    assert fleet.job.awaited_nodes is not None
    fleet.wait(600.0)
    fleet.fold(NodeCordonRequested(fleet.now, "n1", False, "it was another one"))
    fleet.gone("n0", "n1")
    for node in ("n0", "n1"):
        fleet.connect(node)  # with empty disks
    fleet.wait(fleet.state.config.inventory_s + 1.0)
    assert (fleet.job.phase, "none is complete" in fleet.job.reason) == (JobPhase.WAITING, True)
    fleet.wait(fleet.state.config.scratch_s)
    assert fleet.orders(Prepare)
