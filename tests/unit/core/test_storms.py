"""When thousands of nodes fail: who has no reason to look again does not, and what is said stays readable."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import FindingKind, Severity
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.protocol import BreakerResetRequested, JobPhase
from holdfast.supervisor.timers import PolicyTimeout


@dataclass(frozen=True, slots=True)
class Value:
    a: int
    b: tuple[int, ...] = ()
    derived: int = field(default=7, init=False, compare=False)


def test_an_evolved_value_is_a_replaced_one() -> None:
    value = Value(1, (2, 3))
    assert evolve(value, b=()) == replace(value, b=())
    assert evolve(value).derived == 7
    with pytest.raises(KeyError):
        evolve(value, c=1)


def test_a_job_that_waits_looks_again_when_a_node_is_free_and_not_when_another_job_uses_it() -> None:
    fleet = Fleet(3)
    fleet.submit(job(dp=2, min_dp=2))
    fleet.run()
    fleet.submit(job(dp=2, min_dp=2, name="other"))
    assert fleet.state.jobs["other"].phase is JobPhase.PENDING

    def asked(node: str) -> list[str]:
        turn = Turn(fleet.state, fleet.now)
        turn.begin_live(JOB, 7, (node,))
        return turn.touched()

    assert asked("n0") == [JOB]
    assert asked("n2") == [JOB, "other"]


def test_the_reason_of_the_breaker_names_some_and_counts_the_rest() -> None:
    fleet = running(job(dp=70, min_dp=1))
    fleet.gone(*(f"n{index}" for index in range(25)))
    for index in range(25):
        fleet.find(FindingKind.NODE_LOST, f"n{index}")
    assert fleet.state.breaker.open_until is not None
    assert "22 of 70 nodes failed" in fleet.state.breaker.reason
    assert "and 6 more" in fleet.state.breaker.reason
    assert len(fleet.state.breaker.failed_nodes) == 25


def condemn(fleet: Fleet, *nodes: str) -> None:
    for node in nodes:
        fleet.find(FindingKind.GPU_ERROR, node, severity=Severity.FATAL)


def test_a_node_that_has_just_lost_its_session_belongs_to_the_fleet() -> None:
    """Three bad GPUs of ten nodes are to be believed, whoever else is being heard of at that moment."""
    fleet = running(job(dp=10, min_dp=1))
    fleet.gone(*(f"n{index}" for index in range(5, 10)))
    condemn(fleet, "n0", "n1", "n2")
    assert fleet.state.breaker.open_until is None
    condemn(fleet, "n3")
    assert "4 of 10 nodes failed" in fleet.state.breaker.reason


def test_a_node_that_has_been_away_for_long_does_not_belong_to_the_fleet() -> None:
    fleet = running(job(dp=10, min_dp=1))
    fleet.gone(*(f"n{index}" for index in range(5, 10)))
    fleet.wait(fleet.state.config.breaker_window_s + 1)
    condemn(fleet, "n0", "n1", "n2")
    assert "3 of 5 nodes failed" in fleet.state.breaker.reason


def test_a_breaker_that_opens_takes_back_what_is_being_asked_and_asks_again_when_it_closes() -> None:
    fleet = running(job(dp=8, min_dp=1), decide=False)
    number = fleet.job.number
    for index in range(3):
        fleet.lose(f"n{index}")
    assert fleet.state.breaker.open_until is not None
    held = list(fleet.state.incidents)
    assert len(held) == 3
    assert not fleet.state.questions
    assert not [timer for timer in fleet.state.timers if isinstance(timer, PolicyTimeout)]
    assert all(f"no action for {each} while the breaker is open" in fleet.notes() for each in held)
    while fleet.questions:
        fleet.answer()  # late: nobody wants it any more
    assert fleet.job.number == number
    fleet.fold(BreakerResetRequested(fleet.now, "the switch was replaced"))
    assert [question.incident for question in fleet.questions] == held
    fleet.answer()
    assert fleet.job.number == number + 1


def test_a_planned_change_is_still_decided_while_the_breaker_is_open() -> None:
    fleet = running(job(dp=4, min_dp=1), spares=6, decide=False)
    fleet.find(FindingKind.MAINTENANCE, "n0", severity=Severity.WARNING, source="file", event="reboot")
    (planned,) = fleet.state.questions
    condemn(fleet, *(f"n{index}" for index in range(6, 10)))
    assert fleet.state.breaker.open_until is not None
    assert fleet.state.questions == (planned,)
    fleet.answer()
    assert fleet.state.incidents[planned].action is not None
