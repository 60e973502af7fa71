"""Injected faults in the core: asked of the right node, refused unless the job allows them, answered once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, NotFound
from holdfast.domain.evolve import evolve
from holdfast.domain.faults import INJECT_TIMEOUT_S, FaultKind
from holdfast.domain.findings import FindingKind
from holdfast.domain.orders import Inject, OrderDone, Prepare
from holdfast.supervisor.protocol import Answer, CauseFault, FaultRequested
from holdfast.supervisor.requests import check, fingerprint


def allowing(**changes: Any) -> Fleet:
    return running(replace(job(dp=3), chaos=True), **changes)


def fault(fleet: Fleet, **changes: Any) -> FaultRequested:
    return replace(FaultRequested(fleet.now, JOB, FaultKind.CRASH, 1, 60.0, 0, "op-1"), **changes)


def answers(fleet: Fleet) -> list[tuple[str, bool, str]]:
    return [(each.operation, each.ok, each.reason) for each in fleet.answers]


def test_the_node_of_the_rank_is_asked_and_its_answer_is_the_operations() -> None:
    fleet = allowing()
    fleet.fold(fault(fleet))
    orders = fleet.orders(Inject)
    assert orders == {"n1": Inject(JOB, 1, "crash", 1, 60.0, 0, fleet.now + INJECT_TIMEOUT_S, "op-1")}
    (send,) = [send for send in fleet.sent if isinstance(send.order, Inject)]
    for _ in range(2):
        fleet.report("n1", OrderDone(send.command_id, ok=True, at=fleet.now))
        assert answers(fleet) == [("op-1", True, "crash of rank 1 of job on n1")]


def test_a_refusal_of_the_agent_is_the_operations() -> None:
    fleet = allowing()
    fleet.fold(fault(fleet))
    fleet.done("n1", Inject, ok=False, reason="the order is too old")
    assert answers(fleet) == [("op-1", False, "the order is too old")]


def test_orders_contain_whether_the_job_allows_faults() -> None:
    for allowed in (False, True):
        fleet = running(replace(job(dp=2), chaos=allowed))
        fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
        assert {order.chaos for order in fleet.orders(Prepare).values() if isinstance(order, Prepare)} == {allowed}


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"job": "other"}, NotFound, "there is no job other"),
        ({"rank": 3}, InvalidSpec, "rank: 3 is not valid; expected a rank of job, 0 to 2"),
        ({"for_s": 0.0}, InvalidSpec, "for_s: 0"),
        ({"for_s": 1e6}, InvalidSpec, "at most 3600 s"),
        ({"kind": FaultKind.XID}, InvalidSpec, "xid: 0 is not valid; expected 1 to 999"),
        ({"kind": FaultKind.LOSSY_LINK}, InvalidSpec, r"loss_percent: 0.0 is not valid; expected 0.1 to 95"),
        (
            {"kind": FaultKind.CLOCK_JUMP},
            InvalidSpec,
            r"offset_s: 0.0 is not valid; expected seconds from -86400 to 86400",
        ),
        ({"kind": FaultKind.LEADER_KILL, "refusal": "no standby"}, Conflict, "no standby"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], error: type[HoldfastError], why: str) -> None:
    fleet = allowing()
    with pytest.raises(error, match=why):
        check(fleet.state, fault(fleet, **changes))


def test_a_job_that_does_not_allow_faults_and_one_that_does_not_run_get_none() -> None:
    fleet = running(job(dp=3))
    with pytest.raises(Conflict, match=r"does not allow injected faults; .* has `chaos: true` in its file"):
        check(fleet.state, fault(fleet))
    fleet = allowing()
    check(fleet.state, fault(fleet))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    with pytest.raises(Conflict, match="job is preparing: faults are injected into a running job only"):
        check(fleet.state, fault(fleet))


def test_a_node_that_is_away_gets_none() -> None:
    fleet = allowing()
    fleet.gone("n1")
    with pytest.raises(Conflict, match="n1, which runs rank 1, is not connected"):
        check(fleet.state, fault(fleet))


def test_the_recovery_from_the_fault_does_not_withdraw_the_order_that_caused_it() -> None:
    fleet = allowing()
    fleet.fold(fault(fleet))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.done("n1", Inject)
    assert [ok for _, ok, _ in answers(fleet)] == [True]


def test_an_agent_that_restarts_before_it_answers_ends_the_operation() -> None:
    fleet = allowing()
    fleet.fold(fault(fleet, kind=FaultKind.NODE_LOSS))
    fleet.gone("n1")
    fleet.life["n1"] += 1
    fleet.seq["n1"] = 0
    fleet.hello("n1")
    assert answers(fleet) == [("op-1", False, "its agent restarted before it answered")]
    assert not fleet.orders(Inject)


def test_equal_requests_are_equal_whenever_they_were_made() -> None:
    fleet = allowing()
    one = fault(fleet)
    assert fingerprint(one) == fingerprint(evolve(one, at=one.at + 5, operation="op-2"))
    assert fingerprint(one) != fingerprint(evolve(one, rank=2))
    assert fingerprint(one) == fingerprint(evolve(one, refusal=""))


def test_the_order_contains_the_amount_and_the_answer_of_the_agent_is_that_of_the_request() -> None:
    for changes in (
        {"kind": FaultKind.LOSSY_LINK, "loss_percent": 5.0},
        {"kind": FaultKind.CLOCK_JUMP, "offset_s": -9.0},
    ):
        fleet = allowing()
        asked = fault(fleet, **changes)
        fleet.fold(asked)
        (order,) = fleet.orders(Inject).values()
        assert isinstance(order, Inject)
        assert (order.loss_percent, order.offset_s) == (asked.loss_percent, asked.offset_s)
        fleet.done("n1", Inject)
        assert [fingerprint(each.request) for each in fleet.answers] == [fingerprint(asked)]


# ---------------------------------------------------------------- faults of the control plane

KILLS = (FaultKind.LEADER_KILL, FaultKind.REDIS_KILL)


@pytest.mark.parametrize("kind", KILLS)
def test_a_fault_of_the_control_plane_is_answered_in_the_commit_before_it_is_caused(kind: FaultKind) -> None:
    fleet = allowing()
    asked = fault(fleet, kind=kind, rank=0, refusal="")
    check(fleet.state, asked)
    commands = fleet.fold(asked)
    assert CauseFault(JOB, kind) in commands
    assert [(each.operation, each.ok) for each in commands if isinstance(each, Answer)] == [("op-1", True)]
    assert [fingerprint(each.request) for each in fleet.answers] == [fingerprint(asked)]
    assert not fleet.orders(Inject)
    assert not [each for each in fleet.fold(replace(asked, kind=FaultKind.CRASH)) if isinstance(each, CauseFault)]


@pytest.mark.parametrize("kind", KILLS)
def test_what_no_leader_has_examined_or_one_has_refused_is_not_caused(kind: FaultKind) -> None:
    fleet = allowing()
    check(fleet.state, fault(fleet, kind=kind, refusal=None))  # by an API, which cannot know
    for refusal, why in ((None, "nothing has examined whether it may"), ("no standby", "no standby")):
        with pytest.raises(Conflict, match=why):
            fleet.fold(fault(fleet, kind=kind, refusal=refusal))


@pytest.mark.parametrize("kind", KILLS)
def test_a_job_that_does_not_allow_it_does_not_end_the_control_plane(kind: FaultKind) -> None:
    fleet = running(job(dp=3))
    for act in (lambda event: check(fleet.state, event), fleet.fold):
        with pytest.raises(Conflict, match="does not allow injected faults"):
            act(fault(fleet, kind=kind, refusal=""))
