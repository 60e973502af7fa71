"""What the fleet's endpoints answer: summaries of all jobs and nodes, and columns for what is too large for lists of objects.

Columns of one answer have one length: entry n of each belongs to the same rank, node or span. Times are Unix seconds.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.domain.nodes import NodeState
from holdfast.supervisor.api.incident_models import Incident
from holdfast.supervisor.api.job_models import Checkpoint, Interval, JobSummary
from holdfast.supervisor.api.models import Breaker, Model


class RecentGoodput(Model):
    """Where the job's time went lately: `useful_s`, `unmeasured_s` and the values of `badput_s` add up to `wall_s`."""

    since: Annotated[float, Field(description="24 hours ago, or later where the job or its kept steps begin later")]
    wall_s: float
    useful_s: float
    unmeasured_s: Annotated[float, Field(description="all ranks ran, and their script reports no steps")]
    badput_s: dict[str, float]


class Trend(Model):
    """Tokens per second in the last hour, or in the last hour of a job that is over. Buckets without a step are left out."""

    since: float
    bucket_s: float
    index: Annotated[list[int], Field(description="of the bucket, from 0; ascending")]
    tokens_per_s: list[float]


class FleetJob(JobSummary):
    """A job as one line of a list."""

    finished: bool
    ranks: Annotated[int, Field(description="of the newest generation, or as the job file asks for")]
    node_count: Annotated[int, Field(description="of the newest generation; `nodes` is empty here")]
    checkpoint_at: Annotated[float | None, Field(description="when `checkpoint_step` was complete; null: not known")]
    goodput: Annotated[RecentGoodput | None, Field(description="null: not computed yet")]
    trend: Annotated[Trend | None, Field(description="null: not computed yet")]


class Fleet(Model):
    """Everything that a page about the fleet shows."""

    at: float
    jobs: Annotated[list[FleetJob], Field(description="unfinished ones first, then by name")]
    jobs_left_out: Annotated[int, Field(description="more than fit into one answer; GET /v1/jobs has pages of all")]
    nodes: Annotated[dict[NodeState, int], Field(description="number of nodes by state; a state without nodes is 0")]
    disconnected: Annotated[int, Field(description="nodes without a control session")]
    incidents: Annotated[list[Incident], Field(description="open ones, the oldest first; at most 100")]
    incidents_open: int
    breaker: Breaker


class FleetCheckpoint(Model):
    """What is saved of one job."""

    job: str
    phase: str
    finished: bool
    ranks: Annotated[int, Field(description="of the newest generation, or as the job file asks for")]
    newest: Annotated[Checkpoint | None, Field(description="the step at which a restart would begin; null: at step 0")]
    saved_at: Annotated[float | None, Field(description="when it was complete, Unix seconds; null: not known")]
    complete: Annotated[int, Field(description="number of complete steps in reach")]
    incomplete: Annotated[int, Field(description="number of others")]
    stored_step: Annotated[int | None, Field(description="newest one in the object store; null: none")]
    store: Annotated[str, Field(description="the job's object store; empty = it has none")]
    interval: Annotated[Interval | None, Field(description="how often it saves; null: it has not started yet")]


class FleetCheckpoints(Model):
    at: float
    jobs: Annotated[list[FleetCheckpoint], Field(description="unfinished ones first, then by name")]
    jobs_left_out: Annotated[int, Field(description="more than fit into one answer")]


class FleetNodes(Model):
    """Every node, in columns. GET /v1/nodes/{name} has the rest of one."""

    at: float
    node: list[str]
    state: list[NodeState]
    connected: list[bool]
    job: Annotated[list[str], Field(description="empty: no unfinished job has ranks there")]
    zone: list[str]
    reason: Annotated[list[str], Field(description="why it is cordoned or lost, or will be; empty: nothing to say")]
    faults_per_day: list[float]


class RankColumns(Model):
    """Every rank of the newest generation; entry n is rank n. Empty while there is no generation, and when the job is over."""

    at: float
    job: str
    generation: int
    mesh: Annotated[
        dict[str, int], Field(description="outermost dimension first; the last one changes fastest with the rank")
    ]
    nodes: Annotated[list[str], Field(description="named by `node`")]
    faults_per_day: Annotated[list[float], Field(description="of `nodes`")]
    states: Annotated[
        list[str],
        Field(
            description="named by `state`; alive: its agent reports a process of this generation, absent: it reports none, "
            "starting: it reports none yet, and the job does not run, "
            "unreported: its agent does not report processes, lost: its node is lost or unknown, "
            "suspect: an open incident names it or its node"
        ),
    ]
    node: Annotated[list[int], Field(description="index in `nodes`")]
    state: Annotated[list[int], Field(description="index in `states`")]
    age_s: Annotated[list[int], Field(description="age of its process by the node's clock; -1 = not known")]


class Spans(Model):
    """What the job did when. A stretch of steps is one span: useful, degraded or rework."""

    begin: list[float]
    end: list[float]
    kind: Annotated[list[str], Field(description="class of goodput or badput")]


class Mark(Model):
    """An incident on the time axis."""

    id: str
    kind: str
    cause: str
    state: str
    at: float
    until: Annotated[float | None, Field(description="first step after it; null: none yet, or no change was made")]


class GenerationMark(Model):
    """A stage of a generation: planned, started or ended."""

    at: float
    generation: int
    attempt: Annotated[int, Field(description="its lineage of checkpoints: a return to a saved step begins a new one")]
    stage: str
    ranks: int
    reason: str


class Timeline(Model):
    """The newest run of a job over time. Steps that are no longer kept one by one are not part of it."""

    job: str
    since: float
    until: float
    bucket_s: float
    at: Annotated[list[float], Field(description="middle of each bucket in which a step was finished")]
    step: list[int]
    loss: Annotated[list[float | None], Field(description="mean of the bucket; null: no rank reported one")]
    tokens_per_s: Annotated[list[float], Field(description="steps that were done again count as well")]
    world_sizes: Annotated[
        list[tuple[float, int]], Field(description="(from then on, ranks of the running generation)")
    ]
    spans: Spans
    generations: Annotated[list[GenerationMark], Field(description="the newest 500, oldest first")]
    incidents: Annotated[list[Mark], Field(description="likewise")]
