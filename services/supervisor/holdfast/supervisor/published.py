"""What the events stream carries: the core's records, and three kinds of the shell's own. History and SSE read nothing else."""

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
    """An operator's request was folded, or refused. Written with the state that it led to, so it is done exactly once."""

    at: float
    operation: str
    ok: bool
    reason: str  # one English sentence; of a refusal: what stands in the way
    fingerprint: str  # of the request: an idempotency key must not be used for two different ones


@dataclass(frozen=True, slots=True)
class PolicyAsked:
    """A job's policy was asked about an incident, and answered: all that it was shown, so that another policy can be asked the
    same later. Whether the answer was carried out is told by the incident."""

    at: float
    incident: Incident
    job: JobView
    action: Action
    decided_by: str


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """A supervisor became the leader. `api` is where its REST API answers: the hint that a standby gives."""

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
