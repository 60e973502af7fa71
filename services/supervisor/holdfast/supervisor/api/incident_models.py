"""The response models of incidents, actions and findings."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.domain.findings import FindingKind, Remedy, Severity
from holdfast.domain.incidents import ActionKind, IncidentState, RungEnd
from holdfast.supervisor.api.models import Model


class Decision(Model):
    kind: ActionKind
    reason: str
    nodes: list[str] = Field([])
    dp: int | None = None
    within_s: Annotated[float, Field(description="limit of this rung; 0 = none of its own")] = 0.0
    before: list[Decision] = Field([], description="steps of the rung before this action")
    fallbacks: list[Decision] = Field([], description="rungs of the recipe that are left")


class Rung(Model):
    """One rung of a recipe that was tried, or refused."""

    recipe: Annotated[int, Field(description="1 = the first recipe that answered the incident")]
    rung: Annotated[int, Field(description="within its recipe, from 1")]
    action: Annotated[str, Field(description="the actions of the rung in order: cordon then hot_swap")]
    nodes: list[str]
    began_at: float
    ended_at: float | None
    within_s: Annotated[float, Field(description="0 = no limit of its own")]
    end: Annotated[RungEnd | None, Field(description="null = it is being carried out")]
    reason: Annotated[str, Field(description="why the policy wanted it")]
    why: Annotated[str, Field(description="why it ended so")]


class RankLog(Model):
    """A part of the log of one rank."""

    job: str
    rank: int
    node: str
    generation: int
    offset: Annotated[int, Field(description="of the text in the log, in bytes")]
    next_offset: Annotated[int, Field(description="of what follows the text; ask for it to follow the log")]
    size: Annotated[int, Field(description="of the log now, in bytes; the agent drops the oldest part of a large one")]
    text: str


class Incident(Model):
    """One fault, or one planned change, from signal to first new step."""

    id: str
    job: str
    kind: str
    cause: str
    state: IncidentState
    severity: str
    node: str
    rank: int | None
    gpu: int | None
    generation: Annotated[int, Field(description="generation in which the fault occurred")]
    new_generation: int | None
    action: Decision | None
    decided_by: str
    fault_at: float
    detected_at: float
    decided_at: float | None
    prepared_at: float | None
    first_step_at: float | None
    restored_step: int | None
    last_step: Annotated[int | None, Field(description="newest step finished before the fault")]
    rework_steps: int
    phases_s: Annotated[
        dict[str, float],
        Field(
            description="slowest node or rank: gpu_reset and the self_test after it come before prepare; stop, fork, stage "
            "overlap inside prepare; the others follow START"
        ),
    ]
    restored_from: Annotated[
        dict[str, int], Field(description="shards by where they were: memory, disk, peer, object store")
    ]
    outcome: str
    trace_id: str
    findings: list[str]
    evidence: dict[str, str]
    walk: Annotated[list[Rung], Field(description="rungs of recipes in the order in which they were tried or refused")]
    confidence: Annotated[float, Field(description="0 … 1: how sure the finding is, and what it costs")] = 1.0
    cost_share: Annotated[
        float | None,
        Field(description="share of the job's rate that is lost while the condition lasts; null = not known"),
    ] = None


class Span(Model):
    """A part of an incident that took time, as OpenTelemetry has it."""

    name: str
    service: str
    span_id: str
    parent_id: Annotated[str, Field(description="empty for the first; a parent that is not listed is not on record")]
    start: float
    end: float
    attributes: dict[str, str | int | float | bool]
    error: Annotated[str, Field(description="why it failed; empty when it did not")]


class Trace(Model):
    """An incident from signal to first step, from the supervisor's record. A collector has the same ids, and more detail."""

    incident: str
    trace_id: str
    spans: Annotated[list[Span], Field(description="parents before their children")]


class Action(Model):
    """What was done about an incident. An incident that was decided again has several."""

    id: str
    incident: str
    job: str
    kind: ActionKind
    reason: str
    decided_by: str
    at: float
    nodes: list[str]
    dp: int | None
    generation: int
    new_generation: int | None


# ---------------------------------------------------------------- findings


class Finding(Model):
    """What a detector concluded, on which evidence, by which rule, and what became of it."""

    id: Annotated[str, Field(description="the same physical fault found again carries the same id")]
    kind: FindingKind
    severity: Severity
    summary: str
    node: str
    job: str
    generation: int
    rank: int | None
    gpu: int | None
    at: Annotated[float, Field(description="when it was concluded")]
    since: Annotated[float, Field(description="when the fault began, as far as is known")]
    confidence: float
    rule: Annotated[str, Field(description="the rule that fired")]
    source: Annotated[str, Field(description="where the rule comes from")]
    advice: Annotated[str, Field(description="what a person can do about it")]
    evidence: dict[str, str]
    recommended_actions: Annotated[list[Remedy], Field(description="recommended, mildest first")]
    ttl_s: Annotated[float, Field(description="when it is older, nobody acts on it")]
    judged_at: float
    verdict: Annotated[str, Field(description="what the supervisor did with it")]
    incident: Annotated[str, Field(description="that it opened or is a part of; empty = none")]
