"""Operators' requests on their way through the inbox, and the checks that reject them. Pure.

A request is checked twice by the same function. The API checks it against its newest view of the state, for an immediate
answer. The leader checks it against the state that it is folded into; this result counts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import assert_never

from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.domain.words import plural
from holdfast.supervisor.core import (
    State,
    check_agent_restart,
    check_earlier,
    check_fault,
    check_notice,
    check_pruning,
    check_submission,
)
from holdfast.supervisor.core.fleet import invites
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.protocol import (
    AgentRestartRequested,
    BreakerResetRequested,
    CheckpointRequested,
    FaultRequested,
    InviteMade,
    InviteRevoked,
    InviteUsed,
    JobPhase,
    JobStopRequested,
    JobSubmitted,
    NodeCordonRequested,
    NodeRepaired,
    NoticeRequested,
    PolicyChangeRequested,
    PruneRequested,
    ResizeRequested,
)
from holdfast.wire import records

OperatorEvent = (
    JobSubmitted
    | JobStopRequested
    | CheckpointRequested
    | PruneRequested
    | FaultRequested
    | ResizeRequested
    | PolicyChangeRequested
    | NodeCordonRequested
    | NodeRepaired
    | AgentRestartRequested
    | NoticeRequested
    | BreakerResetRequested
    | InviteMade
    | InviteRevoked
    | InviteUsed
)


@dataclass(frozen=True, slots=True)
class OperatorRequest:
    """An operator's event with the operation that answers it."""

    operation: str
    event: OperatorEvent
    fingerprint: str


def fingerprint(event: OperatorEvent) -> str:
    """Equal for equal requests, whenever they are made: their time and a job's random token are ignored."""
    match event:
        case JobSubmitted():
            bare: OperatorEvent = replace(event, token="", at=0.0, resumed=None, found=None)
        case CheckpointRequested():
            bare = replace(event, operation="", at=0.0, grace_s=0.0)
        case FaultRequested():
            bare = replace(event, operation="", at=0.0, refusal=None)
        case NoticeRequested():
            bare = replace(event, at=0.0, starts_at=None)  # `in_s` results in another time for each request
        case _:
            bare = replace(event, at=0.0)
    return hashlib.sha256(records.dumps(bare, OperatorEvent)).hexdigest()[:32]


def check(state: State, event: OperatorEvent) -> None:
    """Raises `NotFound`, `Conflict` or `InvalidSpec`, with the reason, if `event` is not possible in `state`."""
    match event:
        case JobSubmitted():
            check_submission(state, event.spec)
            check_earlier(state, event)
        case JobStopRequested():
            if event.job in state.jobs or event.job not in state.live:
                _unfinished(state, event.job)  # else nodes have workers of a run that this state does not contain
        case CheckpointRequested():
            job = _unfinished(state, event.job)
            if job.phase is not JobPhase.RUNNING:
                raise Conflict(f"{event.job} is {job.phase}: only a running job can save a checkpoint")
        case PruneRequested():
            check_pruning(state, event)
        case FaultRequested():
            check_fault(state, event)
        case ResizeRequested():
            spec = _unfinished(state, event.job).spec
            if not spec.min_dp <= event.dp <= spec.max_dp:
                raise InvalidSpec("dp", event.dp, f"a number in the job's range, {spec.min_dp} to {spec.max_dp}")
        case PolicyChangeRequested():
            _unfinished(state, event.job)
        case NodeCordonRequested() | NodeRepaired():
            if event.node not in state.nodes:
                raise NotFound(f"there is no node {event.node}")
        case AgentRestartRequested():
            check_agent_restart(state, event)
        case NoticeRequested():
            check_notice(state, event)
        case BreakerResetRequested():
            pass
        case InviteMade():
            invites.check_made(state, event)
        case InviteRevoked():
            invites.check_revoked(state, event)
        case InviteUsed():
            invites.check_used(state, event)
        case _:
            assert_never(event)


def accepted(event: OperatorEvent) -> str:
    """The text of the operation's answer once its event is folded."""
    match event:
        case JobSubmitted():
            return f"{event.spec.name} is accepted"
        case JobStopRequested():
            return f"{event.job} stops: {event.reason}"
        case CheckpointRequested():
            return f"{event.job} saves a checkpoint within the next steps"
        case PruneRequested():
            return f"{len(event.steps)} saved steps of {event.job} are being deleted"
        case FaultRequested():
            return f"{event.kind} is ordered for {event.job}"
        case ResizeRequested():
            return f"{event.job} is to run with dp {event.dp}: {event.reason}"
        case PolicyChangeRequested():
            return f"{event.policy.name or 'the default policy'} decides the incidents of {event.job} from now on"
        case NodeCordonRequested():
            return f"{event.node} is {'cordoned' if event.cordoned else 'uncordoned'}: {event.reason}"
        case NodeRepaired():
            return f"{event.node} is repaired"
        case AgentRestartRequested():
            return f"the agent of {event.node} is ordered to restart: {event.reason}"
        case NoticeRequested():
            return f"{event.node}: {event.event or 'the notice is withdrawn'}"
        case BreakerResetRequested():
            return f"the breaker is reset: {event.reason}"
        case InviteMade():
            whom = event.node or f"{plural(event.uses, 'node')} of any name"
            return f"invitation {event.invite} for {whom} is valid for {event.ttl_s:.0f} s"
        case InviteRevoked():
            return f"invitation {event.invite} is revoked"
        case InviteUsed():
            return f"{event.node} joins by invitation {event.invite}"
    assert_never(event)


def _unfinished(state: State, name: str) -> Job:
    job = state.jobs.get(name)
    if job is None:
        raise NotFound(f"there is no job {name}")
    if job.phase.finished:
        raise Conflict(f"{name} is {job.phase} already: {job.reason}")
    return job
