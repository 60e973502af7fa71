"""Diagnostics says again what still holds: a repeat of what is known costs nothing, one of what was lost counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import Fleet, job, running

from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.supervisor.protocol import FindingArrived


def said_again(fleet: Fleet, finding: Finding, *, after_s: float = 0.0) -> None:
    """It arrives once more, and changes neither the state nor anything that is published."""
    fleet.wait(after_s)
    before = fleet.state
    assert fleet.fold(FindingArrived(fleet.now, replace(finding, repeat=1), after_s)) == ()
    assert (fleet.state.incidents, fleet.state.nodes, fleet.state.jobs) == (
        before.incidents,
        before.nodes,
        before.jobs,
    )


@pytest.mark.parametrize("recovered", [False, True])
@pytest.mark.parametrize("after_s", [30.0, 400.0])
def test_a_repeat_of_an_incident_costs_nothing(recovered: bool, after_s: float) -> None:
    fleet = running(job(dp=2), decide=recovered)
    finding = fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    if recovered:
        fleet.run()
    said_again(fleet, finding, after_s=after_s)


def test_a_repeat_of_a_loss_that_was_contradicted_costs_nothing() -> None:
    fleet = running(job(dp=2))
    finding = fleet.find(FindingKind.NODE_LOST, "n1")
    assert fleet.state.nodes["n1"].suspicion is not None
    said_again(fleet, finding, after_s=30.0)


def test_a_finding_of_which_only_the_repeat_arrived_is_acted_on() -> None:
    fleet = running(job(dp=2), decide=False)
    finding = Finding(
        "f1",
        FindingKind.WORKER_CRASH,
        Severity.ERROR,
        at=fleet.now - 30.0,
        since=fleet.now - 30.0,
        summary="rank 1 was killed",
        node="n1",
        job=fleet.job.name,
        generation=fleet.job.number,
        rank=1,
        repeat=1,
    )
    fleet.fold(FindingArrived(fleet.now, finding, 30.0))
    assert (fleet.incident.kind, fleet.incident.rank) == (FindingKind.WORKER_CRASH, 1)


def test_a_loss_that_diagnostics_withdraws_is_no_witness_any_more() -> None:
    fleet = running(job(dp=2))
    lost = fleet.find(FindingKind.NODE_LOST, "n1")
    fleet.find(FindingKind.NODE_LOST, "n1", severity=Severity.INFO, contradicts=lost.id)
    assert fleet.state.nodes["n1"].suspicion is None
    fleet.gone("n1")
    fleet.wait(30.0)
    assert not fleet.state.incidents
