"""Nodes, their tests and their state → response models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from holdfast.domain.clocks import in_words
from holdfast.domain.incidents import Incident
from holdfast.domain.nodes import TERMINATION, NodeState, Preflight
from holdfast.supervisor.api import node_models
from holdfast.supervisor.api.incident_views import incident
from holdfast.supervisor.core.fleet import returns
from holdfast.supervisor.core.fleet.nodes import unknown_job
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.rules.links import LinkTest
from holdfast.supervisor.core.rules.offenders import rate_per_day, score
from holdfast.supervisor.core.rules.wording import moment
from holdfast.supervisor.picture import Picture

NO_LEADER = "no supervisor leads, so this is the state"


def node(picture: Picture, value: Node, at: float) -> node_models.Node:
    """`at`: Unix seconds; a node's faults count less the older they are."""
    facts, versions = value.facts, picture.versions_of(value.name)
    return node_models.Node.of(
        facts,
        node=value.name,
        state=value.state,
        connected=value.connected,
        inventoried=value.inventoried,
        job=_job_of(picture, value.name),
        reason=reason_of_node(picture, value, at),
        zone=value.zone,
        diagnostics_version=versions.diagnostics,
        replicator_version=versions.replicator,
        quarantined=value.quarantined,
        preflight=preflight(value.preflight) if value.preflight is not None else None,
        faults_per_day=rate_per_day(value.faults, value.known_since, at, picture.state.config.offenders),
        hold_until=returns.held_until(value, at),
        probation_until=returns.on_probation_until(value, at),
        returns_by=_returns_by(value),
        notices=[node_models.Notice.of(each) for each in value.notices if each.event],
        telemetry_cut_since=picture.telemetry_cut_since(value.name),
        clock_ahead_s=picture.clock_ahead_s(value.name),
    )


def _returns_by(value: Node) -> Literal["", "itself", "operator"]:
    if not value.unschedulable_reason:
        return "itself" if value.unfit and value.state is NodeState.CORDONED else ""
    return "itself" if returns.comes_back(value) else "operator"


def node_detail(picture: Picture, value: Node, at: float, incidents: Sequence[Incident]) -> node_models.NodeDetail:
    faults = [node_models.Fault.of(each) for each in value.faults]
    past = [incident(each) for each in incidents]
    links = [link_test(each) for each in value.links]
    rules = picture.state.config.offenders
    return node_models.NodeDetail(
        **dict(node(picture, value, at)),
        faults=faults,
        incidents=past,
        links=links,
        faults_weigh=round(score(value.faults, at, rules), 3),
        quarantine_limit=rules.limit,
    )


def link_test(value: LinkTest) -> node_models.LinkTest:
    than = value.expected
    return node_models.LinkTest.of(
        value.measured,
        at=value.at,
        partner=value.partner,
        verdict=value.verdict.value,
        expected_bytes_per_s=than.bytes_per_s if than is not None else None,
        expected_round_trip_s=than.round_trip_s if than is not None else None,
    )


def preflight(value: Preflight) -> node_models.Preflight:
    passed = bool(value.at) and not value.failures
    return node_models.Preflight.of(value, passed=passed, duration_s=round(value.duration_s, 3))


def _job_of(picture: Picture, name: str) -> str:
    """The unfinished job whose newest generation includes the node."""
    for job in picture.state.jobs.values():
        if job.generation is not None and not job.phase.finished and job.generation.slot_of(name) is not None:
            return job.name
    return ""


def reason_of_node(picture: Picture, value: Node, at: float) -> str:
    """Why it is cordoned or lost, or will be; empty when there is nothing to say. `at`: Unix seconds."""
    reasons = [_standing_of_node(picture, value, at)]
    if (since := picture.telemetry_cut_since(value.name)) is not None:
        reasons.append(
            f"no telemetry of it has reached diagnostics since {moment(since, at)}: faults there are found late; check "
            "diagnostics and the network between them"
        )
    if ahead_s := picture.clock_ahead_s(value.name):
        reasons.append(f"its clock is {in_words(ahead_s)} the supervisor's: check the time service of both machines")
    return "; ".join(filter(None, reasons))


def _standing_of_node(picture: Picture, value: Node, at: float) -> str:
    if not picture.leading:
        return f"{NO_LEADER} at {moment(picture.state.folded_at, at)}"
    standing = returns.standing(value, at, picture.state.config.returns.probation_s)
    if value.unschedulable_reason and value.removal is None:
        # An operator's cordon; the standing is about an earlier fault.
        return "; ".join(filter(None, (value.unschedulable_reason, standing)))
    if value.unschedulable_reason:
        return standing or value.unschedulable_reason
    if value.lost:
        if value.asked_to_end:
            return "left: its agent was asked to end; it comes back when an agent is started there again"
        return (
            "lost: no contact with its agent; check its power, network and agent; it comes back when its agent connects"
        )
    leaves = value.notice is not None and value.notice.source == TERMINATION
    if not value.connected:
        return "left: its agent was asked to end" if leaves else "no control session at the moment"
    if unknown := unknown_job(value, picture.state.jobs):
        return (
            f"runs workers of {unknown}, a job that is not known here: left alone until `holdfast jobs stop {unknown}`"
        )
    if value.notice is not None:
        return f"leaves: {value.notice.event}" if leaves else f"its machine will be taken: {value.notice.event}"
    if value.reset_due is not None:
        return f"gets no ranks before a GPU is reset: {value.reset_due.cause}"
    if value.unfit:
        again = "it tests itself again every minute, and may have ranks when it passes"
        return f"failed its pre-flight: {value.unfit}; {again}"
    return "tests itself before it gets ranks" if value.untested else standing
