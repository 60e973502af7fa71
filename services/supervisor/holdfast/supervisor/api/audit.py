"""One line for each request that changes something: who, what, how it was before, and the answer.

The lines have event `audit` in the log of the supervisor that answered, which is the leader where it can be reached; the newest
are kept (`audit_store`). Secrets and texts of scripts are not in them: what is logged of a request is listed here, by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

import structlog

from holdfast.domain.errors import HoldfastError
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import (
    AgentRestartRequested,
    BreakerResetRequested,
    CheckpointRequested,
    FaultRequested,
    InviteMade,
    InviteRevoked,
    InviteUsed,
    JobStopRequested,
    JobSubmitted,
    NodeCordonRequested,
    NodeRepaired,
    NoticeRequested,
    PolicyChangeRequested,
    PruneRequested,
    ResizeRequested,
)
from holdfast.supervisor.requests import OperatorEvent

TEXT_CHARS_MAX = 200  # of a reason in a request

log = structlog.get_logger("holdfast.supervisor.audit")
Fields = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Asked:
    """`subject`: `job NAME`, `node NAME`, `invitation ID` or `breaker`; `fields`: what the request says, without secrets."""

    what: str
    subject: str
    fields: Fields


def accepted(who: str, role: str, event: OperatorEvent, before: Fields, operation: str) -> Fields:
    """Log a request that was accepted, and return the line; the operation says what became of it."""
    return _write(who, role, event, before, result="accepted", operation=operation)


def refused(who: str, role: str, event: OperatorEvent, before: Fields, error: HoldfastError) -> Fields:
    """Log a request that the state rules out, and return the line."""
    return _write(who, role, event, before, result="refused", reason=_short(str(error)))


def _write(who: str, role: str, event: OperatorEvent, before: Fields, **result: str) -> Fields:
    asked = asked_of(event)
    line: dict[str, object] = {
        "who": who or "anybody",
        "role": role,
        "what": asked.what,
        "subject": asked.subject,
        "asked": dict(asked.fields),
        "before": dict(before),
        **result,
    }
    log.info("audit", **line)
    return line


def before_of(state: State, event: OperatorEvent) -> Fields:
    """What the request's subject is now; empty for one that is not there."""
    kind, _, name = asked_of(event).subject.partition(" ")
    if kind == "job" and (job := state.jobs.get(name)) is not None:
        number = job.generation.number if job.generation else 0
        policy = job.spec.policy_spec.name
        return {
            "phase": str(job.phase),
            "generation": number,
            "dp": job.target_dp,
            "policy": policy,
            "owner": job.owner,
        }
    if kind == "node" and (node := state.nodes.get(name)) is not None:
        return {"state": str(node.state), "notices": sorted(each.source for each in node.notices if each.event)}
    if kind == "breaker":
        return {"state": "closed" if state.breaker.open_until is None else "open"}
    return {}


def asked_of(event: OperatorEvent) -> Asked:
    """Return what is logged of a request."""
    match event:
        case JobSubmitted():
            spec = event.spec
            fields: Fields = {"nodes": spec.nodes, "ranks": spec.mesh.world_size, "start": str(event.start)}
            return Asked("submit", f"job {spec.name}", fields)
        case JobStopRequested():
            return Asked("stop", f"job {event.job}", {"reason": _short(event.reason), "save": event.save})
        case CheckpointRequested():
            return Asked("checkpoint", f"job {event.job}", {"grace_s": event.grace_s})
        case PruneRequested():
            steps = [f"{each.attempt}/{each.step}" for each in event.steps[:10]]
            return Asked("prune", f"job {event.job}", {"count": len(event.steps), "steps": steps})
        case FaultRequested():
            return Asked(
                "inject", f"job {event.job}", {"kind": str(event.kind), "rank": event.rank, "for_s": event.for_s}
            )
        case ResizeRequested():
            return Asked("resize", f"job {event.job}", {"dp": event.dp, "reason": _short(event.reason)})
        case PolicyChangeRequested():
            return Asked("policy", f"job {event.job}", {"policy": event.policy.name})
        case NodeCordonRequested():
            what = "cordon" if event.cordoned else "uncordon"
            return Asked(what, f"node {event.node}", {"reason": _short(event.reason)})
        case NodeRepaired():
            return Asked("repair", f"node {event.node}", {})
        case AgentRestartRequested():
            return Asked("restart-agent", f"node {event.node}", {"reason": _short(event.reason)})
        case NoticeRequested():
            fields = {"source": event.source, "event": _short(event.event), "starts_at": event.starts_at}
            return Asked("notice" if event.event else "withdraw-notice", f"node {event.node}", fields)
        case BreakerResetRequested():
            return Asked("reset", "breaker", {"reason": _short(event.reason)})
        case InviteMade():
            fields = {"node": event.node, "uses": event.uses, "ttl_s": event.ttl_s}
            return Asked("invite", f"invitation {event.invite}", fields)
        case InviteRevoked():
            return Asked("revoke", f"invitation {event.invite}", {})
        case InviteUsed():
            return Asked("join", f"node {event.node}", {"invitation": event.invite})
    assert_never(event)


def _short(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + "…"
