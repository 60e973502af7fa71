"""The records of the events stream: the core's, and three kinds of the shell's own. History and SSE read only these."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.domain.incidents import Action, Incident
from holdfast.policy import JobView
from holdfast.supervisor.protocol import (
    FindingJudged,
    GenerationChanged,
    IncidentChanged,
    JobAccepted,
    JobChanged,
    NodeChanged,
    Noted,
    PolicyChanged,
)


@dataclass(frozen=True, slots=True)
class OperationDone:
    """An operator's request was folded or refused. Committed with the resulting state, so it is done exactly once."""

    at: float
    operation: str
    ok: bool
    reason: str  # one English sentence; for a refusal: what prevents it
    fingerprint: str  # of the request: an idempotency key must not be used for two different ones


@dataclass(frozen=True, slots=True)
class PolicyAsked:
    """A job's policy was asked about an incident, and answered. Contains everything that the policy saw, so that another policy
    can be asked the same later. Whether the action was carried out is part of the incident."""

    at: float
    incident: Incident
    job: JobView
    action: Action
    decided_by: str


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """A supervisor became the leader. `api` is the address of its REST API, to which a standby refers clients."""

    at: float
    epoch: int
    supervisor: str
    api: str


Published = (
    JobAccepted
    | JobChanged
    | GenerationChanged
    | IncidentChanged
    | NodeChanged
    | FindingJudged
    | Noted
    | PolicyChanged
    | PolicyAsked
    | OperationDone
    | LeaderChanged
)
