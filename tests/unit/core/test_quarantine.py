"""Repeat offenders: what counts against a node, when it is quarantined, and what a quarantine must never do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import Fleet, job, running

from holdfast.domain import old_evidence
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.incidents import Incident, IncidentState
from holdfast.domain.nodes import NodeState
from holdfast.supervisor.core.model.indexing import index_of
from holdfast.supervisor.core.rules.offenders import Fault, added, offence, rate_per_day, score, weight_of
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.protocol import FindingArrived, JobPhase, JobStopRequested, NodeCordonRequested, NodeRepaired
from holdfast.supervisor.return_rules import DAY_S

RULES = OffenderRules()


def incident(kind: FindingKind, severity: str = "error", rank: int | None = None, **evidence: str) -> Incident:
    state = IncidentState.RESOLVED
    return Incident(
        "i-1",
        "job",
        kind,
        "cause",
        state,
        1,
        node="n1",
        rank=rank,
        severity=severity,
        evidence=dict(evidence),
        attribution=old_evidence.attribution(kind, evidence),
    )


# ---------------------------------------------------------------- what counts


@pytest.mark.parametrize(
    ("found", "weight"),
    [
        (incident(FindingKind.NODE_LOST), 1.0),
        (incident(FindingKind.GPU_ERROR, "fatal"), 1.0),
        (incident(FindingKind.WORKER_CRASH, blame="hardware", error_class="crash"), 1.0),
        (incident(FindingKind.WORKER_CRASH, blame="unknown", error_class="crash"), 0.5),
        (incident(FindingKind.WORKER_CRASH, blame="unknown", error_class="crash", prior_user="0.98"), 0.01),
        (incident(FindingKind.WORKER_CRASH, blame="unknown", error_class="crash", prior_user="no number"), 0.5),
        (incident(FindingKind.WORKER_EXCEPTION, blame="user", error_class="script"), 0.0),
        (incident(FindingKind.WORKER_EXCEPTION, blame="unknown", error_class="storage"), 0.0),
        (incident(FindingKind.WORKER_CRASH, root="not seen"), 0.0),
        (incident(FindingKind.WORKER_CRASH, blame="unknown", error_class="crash", signal="11"), 0.5),
        (incident(FindingKind.WORKER_CRASH, blame="unknown", error_class="crash", signal="9"), 0.0),
        (incident(FindingKind.WORKER_EXCEPTION, blame="unknown", error_class="script"), 0.0),
        (incident(FindingKind.WORKER_EXCEPTION, blame="unknown", error_class="device_oom"), 0.0),
        (incident(FindingKind.WORKER_EXCEPTION, blame="unknown", error_class="nan"), 0.0),
        (incident(FindingKind.HANG, rank=3, reason="its process is stopped"), 0.0),
        (incident(FindingKind.GPU_ERROR, "fatal", line="NVRM: Xid 79, injected by holdfast inject"), 0.0),
        (incident(FindingKind.HANG, rank=3), 0.5),
        (incident(FindingKind.HANG), 0.0),
        (incident(FindingKind.REPEATED_EXCEPTION, blame="user"), 0.0),
        (replace(incident(FindingKind.NODE_LOST), kind="repair"), 0.0),
        (replace(incident(FindingKind.NODE_LOST), node=""), 0.0),
    ],
    ids=lambda value: f"{value.kind} {dict(value.evidence)}" if isinstance(value, Incident) else None,
)
def test_what_an_incident_says_about_its_node(found: Incident, weight: float) -> None:
    assert weight_of(found, RULES) == pytest.approx(weight)


def faults(*days_ago: float, weight: float = 1.0, jobs: str = "", shared: bool = False) -> tuple[Fault, ...]:
    names = jobs or "a" * len(days_ago)
    return tuple(Fault(100 * DAY_S - ago * DAY_S, f"i-{n}", names[n], weight, shared) for n, ago in enumerate(days_ago))


@pytest.mark.parametrize(
    ("past", "offender"),
    [
        (faults(1.0, 0.5, 0.0), True),  # three within a day
        (faults(7.0, 5.25, 3.5, 1.75, 0.0), True),  # five in a week, which is NVSentinel's limit
        (faults(7.0, 3.5, 0.0), False),
        (faults(0.0, 0.0), False),
        (faults(*[0.1] * 8, weight=0.5), False),  # what may be the script's counts once per job
        (faults(*[0.1] * 6, weight=0.5, jobs="abcdef"), True),
        (faults(*[0.0] * 9, shared=True), False),  # a switch
        (faults(*[40.0] * 9), False),
    ],
)
def test_who_is_an_offender(past: tuple[Fault, ...], offender: bool) -> None:
    assert bool(offence(past, 100 * DAY_S, RULES)) is offender
    if offender:
        assert "i-0" in offence(past, 100 * DAY_S, RULES)


def test_a_rate_is_estimated_from_counts_and_time() -> None:
    now = 100 * DAY_S
    fresh, veteran = rate_per_day((), now, now, RULES), rate_per_day((), 0.0, now, RULES)
    assert veteran < fresh == pytest.approx(0.5 / 77)
    assert rate_per_day(faults(1.0), now, now, RULES) == pytest.approx(1.5 / 77)
    assert rate_per_day(faults(1.0), 0.0, now, RULES) > fresh


def test_the_past_is_bounded_and_an_incident_counts_once() -> None:
    past: tuple[Fault, ...] = ()
    for n in range(100):
        past = added(past, Fault(float(n), f"i-{n // 2}", "a", 1.0), RULES)
    assert len(past) == RULES.kept_max
    assert len({fault.incident for fault in past}) == len(past)
    assert score(past, 99.0, RULES) == pytest.approx(RULES.kept_max, rel=1e-3)


# ---------------------------------------------------------------- what the core does with it


def lose(fleet: Fleet, node: str, times: int, pause_s: float = 3600.0) -> None:
    """The node is lost and comes back, again and again; the fleet recovers in between."""
    for _ in range(times):
        fleet.wait(pause_s)
        fleet.gone(node)
        fleet.find(FindingKind.NODE_LOST, node)
        fleet.run()
        fleet.connect(node)
        fleet.run()


def crash(fleet: Fleet, node: str, times: int, pause_s: float = 3600.0) -> None:
    for _ in range(times):
        fleet.wait(pause_s)
        assert fleet.job.generation is not None
        rank = fleet.nodes().index(node)
        fleet.find(FindingKind.WORKER_CRASH, node, rank=rank, blame="hardware", error_class="crash")
        fleet.run()
        fleet.train(fleet.job.progress.best_step + 1)


def test_a_node_that_keeps_failing_is_quarantined_and_says_why() -> None:
    fleet = running(job(dp=2), spares=1)
    crash(fleet, "n1", 3)
    node = fleet.state.nodes["n1"]
    assert node.quarantined
    assert node.state is NodeState.CORDONED
    assert "3 faults in 0.1 days" in node.unschedulable_reason
    assert "n1" not in fleet.nodes()
    assert fleet.job.phase is JobPhase.RUNNING


def test_jobs_of_one_node_cannot_quarantine_it_by_what_may_be_their_own_fault() -> None:
    fleet = Fleet(2, decide=False)
    for name in "abcdefgh":
        fleet.submit(job(dp=1, name=name))
        fleet.answer_orders()
        finding = Finding(
            f"f-{name}", FindingKind.WORKER_CRASH, Severity.ERROR, fleet.now, fleet.now, "crashed", "n0", name, 1, 0,
            evidence={"blame": "unknown", "error_class": "crash", "signal": "11"},
        )  # fmt: skip
        fleet.fold(FindingArrived(fleet.now, finding))
        assert fleet.state.jobs[name].generation is not None
        fleet.fold(JobStopRequested(fleet.now, name, "next", save=False))
        fleet.answer_orders()
        fleet.wait(60)
    assert fleet.state.incidents_opened == 8
    assert fleet.state.nodes["n0"].faults == ()


def test_the_spare_with_the_cleanest_past_is_taken() -> None:
    fleet = running(job(dp=2), spares=2)
    lose(fleet, "n2", 1)  # without ranks: nobody is concerned, nothing counts
    fleet.wait(3600)
    fleet.gone("n0")
    fleet.find(FindingKind.NODE_LOST, "n0")
    fleet.run()
    assert "n2" in fleet.nodes()
    fleet.connect("n0")  # a spare now, with a fault
    fleet.wait(3600)
    fleet.gone("n1")
    fleet.find(FindingKind.NODE_LOST, "n1")
    fleet.run()
    assert set(fleet.nodes()) == {"n2", "n3"}


def test_without_a_spare_the_run_keeps_its_size() -> None:
    fleet = running(job(dp=2))
    crash(fleet, "n1", 5)
    assert not fleet.state.nodes["n1"].quarantined
    assert "not quarantined, though" in fleet.notes()
    assert "could not run 2 replicas without it" in fleet.notes()
    assert len(fleet.nodes()) == 2


def test_a_tenth_of_the_fleet_at_most() -> None:
    fleet = running(job(dp=3), spares=3)
    crash(fleet, "n0", 3)
    crash(fleet, "n1", 3)
    assert [name for name, node in sorted(fleet.state.nodes.items()) if node.quarantined] == ["n0"]
    assert "in quarantine already" in fleet.notes()


def test_what_strikes_several_nodes_at_once_counts_against_none() -> None:
    fleet = running(job(dp=3), spares=3)
    for _ in range(4):
        fleet.wait(3600)
        for node in ("n0", "n1"):
            if node in fleet.nodes():
                crash(fleet, node, 1, pause_s=1.0)
    assert all(fault.shared for name in ("n0", "n1") for fault in fleet.state.nodes[name].faults)
    assert not any(node.quarantined for node in fleet.state.nodes.values())


def test_an_operator_releases_it_and_a_repair_forgets_its_past() -> None:
    fleet = running(job(dp=2), spares=1)
    crash(fleet, "n1", 3)
    fleet.fold(NodeCordonRequested(fleet.now, "n1", False, "looked at it"))
    assert fleet.state.nodes["n1"].state is NodeState.SPARE
    assert len(fleet.state.nodes["n1"].faults) == 3
    fleet.fold(NodeRepaired(fleet.now, "n1"))
    assert not fleet.state.nodes["n1"].faults


def test_a_word_against_it_outweighs_the_quarantine() -> None:
    fleet = running(job(dp=2), spares=1)
    crash(fleet, "n1", 3)
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "to the workshop"))
    assert not fleet.state.nodes["n1"].quarantined
    assert "to the workshop" in fleet.state.nodes["n1"].unschedulable_reason


def test_a_job_that_cannot_run_gets_it_back() -> None:
    fleet = running(job(dp=2, min_dp=2), spares=1)
    crash(fleet, "n1", 3)
    assert fleet.state.nodes["n1"].quarantined
    fleet.wait(3600)
    fleet.find(FindingKind.GPU_ERROR, "n0", severity=Severity.FATAL)
    fleet.run()
    assert set(fleet.nodes()) == {"n1", "n2"}
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.state.nodes["n1"].quarantined


def test_what_was_no_loss_counts_nothing() -> None:
    fleet = running(job(dp=2), decide=False)
    fleet.gone("n1")
    fleet.find(FindingKind.NODE_LOST, "n1")
    assert fleet.state.nodes["n1"].faults
    fleet.hello("n1")
    assert not fleet.state.nodes["n1"].faults


def test_no_more_nodes_are_given_back_than_the_job_needs() -> None:
    """The one with the fewest faults is tried first, but a larger one is needed."""
    fleet = Fleet(2, capacity=2)
    fleet.connect("small", capacity=1)
    fleet.connect("large", capacity=2)
    fleet.submit(job(dp=4, min_dp=4, nproc=2))
    fleet.run()
    nodes = dict(fleet.state.nodes)
    for name, faults in (("small", 0), ("large", 2)):
        past = tuple(Fault(fleet.now - 10 * i, f"i-{i}", "other", 1.0) for i in range(faults))
        nodes[name] = replace(nodes[name], unschedulable_reason="quarantined: faults", quarantined=True, faults=past)
    state = replace(fleet.state, nodes=nodes)
    fleet.state = state.indexed(index_of(state))
    fleet.lose(fleet.nodes()[1])
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert "large" in fleet.nodes()
    assert fleet.state.nodes["small"].quarantined
