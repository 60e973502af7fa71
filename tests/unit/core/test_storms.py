"""When thousands of nodes fail: who has no reason to look again does not, and what is said stays readable."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.findings import FindingKind
from holdfast.supervisor.core.evolve import evolve
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.protocol import JobPhase


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
        turn.put_node(node, holds={JOB: (7,)})
        return turn.touched()

    assert asked("n0") == [JOB]
    assert asked("n2") == [JOB, "other"]


def test_the_reason_of_the_breaker_names_some_and_counts_the_rest() -> None:
    fleet = running(job(dp=70, min_dp=1))
    fleet.gone(*(f"n{index}" for index in range(25)))
    for index in range(25):
        fleet.find(FindingKind.NODE_LOST, f"n{index}")
    assert fleet.state.breaker.open_until is not None
    assert "20 of 65 nodes condemned" in fleet.state.breaker.reason
    assert "and 4 more" in fleet.state.breaker.reason
    assert len(fleet.state.breaker.condemned) == 25
