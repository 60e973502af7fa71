"""The response models of jobs, their checkpoints, policies and goodput."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from holdfast.domain.tiers import NEARNESS, STORE
from holdfast.supervisor.api.incident_models import Incident
from holdfast.supervisor.api.models import Model
from holdfast.supervisor.protocol import JobPhase
from holdfast.wire.job_sections import JobFile


class Rank(Model):
    rank: int
    node: str
    state: Annotated[str, Field(description="of its node; 'unknown' when the supervisor has never heard of it")]
    pid: Annotated[int | None, Field(description="on the node; null while its agent reports no process for the rank")]
    since: Annotated[float | None, Field(description="when the process was started, Unix seconds by the node's clock")]


class JobSummary(Model):
    name: str
    phase: Annotated[
        JobPhase | Literal["unknown"],
        Field(
            description="'unknown': it ran when agents last said so, and not all of them have said so within seconds"
        ),
    ]
    reason: str
    unknown_since: Annotated[float | None, Field(description="Unix seconds; null unless the phase is 'unknown'")]
    mesh: Annotated[dict[str, int], Field(description="of the newest generation, outermost dimension first")]
    target_dp: int
    min_dp: int
    max_dp: int
    generation: Annotated[int, Field(description="0 = none yet")]
    nodes: list[str]
    step: Annotated[
        int | None,
        Field(
            description="newest step finished by every rank; null = the script reports no steps: optimizer "
            "steps are observed in it, or it has been silent for a minute"
        ),
    ]
    observed_steps: Annotated[
        int | None,
        Field(
            description="of a script that reports no steps: optimizer steps that were observed in every rank since its start"
        ),
    ]
    observed_step_s: Annotated[float | None, Field(description="seconds for one of these, recently")]
    checkpoint_step: Annotated[int, Field(description="newest step saved by every rank of the running generation")]
    loss: float | None
    tokens_per_s: Annotated[float | None, Field(description="over the last steps; null when the job does not run")]
    submitted_at: float
    priority: Annotated[int, Field(description="of several jobs that want nodes the one with the higher one gets them")]
    permanent_failure: Annotated[
        bool, Field(description="failed by an error of its script: another attempt would fail in the same way")
    ]
    leaving: Annotated[bool, Field(description="completed, and its last checkpoint is on its way to the object store")]
    incident: Annotated[Incident | None, Field(description="the open one; the oldest of several")]


class Interval(Model):
    """How often the job saves, and why so often."""

    steps: int
    auto: Annotated[bool, Field(description="chosen by the supervisor, and chosen again while the job runs")]
    store_s: Annotated[float, Field(description="at most one step per so many seconds goes to the object store")]
    reason: str


class Checkpoint(Model):
    """One saved step, as far as connected nodes and the object store tell."""

    attempt: Annotated[int, Field(description="its lineage: every return to a saved step begins a new one")]
    step: int
    mesh: Annotated[dict[str, int], Field(description="of the generation that saved it, outermost dimension first")]
    tiers: Annotated[
        dict[str, int | bool],
        Field(
            description=f"{', '.join(NEARNESS)}: the number of ranks whose shard some node holds there; "
            f"{STORE}: whether the object store has all of them"
        ),
    ]
    complete: Annotated[bool, Field(description="every rank's shard is in reach")]
    newest: Annotated[bool, Field(description="the newest complete one of the run: a restart would begin here")]
    needed: Annotated[bool, Field(description="the job is not over and may go back to it: it cannot be deleted")]


class CheckpointHolders(Model):
    """Who has the shards of one saved step."""

    attempt: int
    step: int
    ranks: Annotated[dict[int, list[str]], Field(description="rank → connected nodes that hold its shard")]


class Kept(Model):
    """The newest complete step that the nodes of a job that is over still have."""

    attempt: int
    step: int
    on_disk: Annotated[bool, Field(description="every rank's shard is on some node's disk")]
    directories: Annotated[dict[str, str], Field(description="node → the directory of the job's files on its disk")]
    unwritten: Annotated[
        dict[str, int],
        Field(description="node → bytes of its shards that are only in memory, and that its disk must take"),
    ] = Field({})


class Suspended(Model):
    """Where a suspended job goes on when there are nodes for it, and where that checkpoint is."""

    since: float
    step: Annotated[int, Field(description="the newest complete one; 0 = none: it starts again from step 0")]
    attempt: int
    tiers: Annotated[
        dict[str, int | bool], Field(description="as those of a checkpoint, with what nodes had that have gone since")
    ]
    durable: Annotated[bool, Field(description="all of it is on disks, and in the object store if the job has one")]
    directories: Annotated[dict[str, str], Field(description="node → the directory of the job's files on its disk")]
    nodes_left: Annotated[list[str], Field(description="nodes of the job that are connected; their copies go on")]


class ShardSources(Model):
    """Where the shards of one saved step can be fetched, and with which secret: whoever has it can read the job's shards."""

    attempt: int
    step: int
    mesh: Annotated[dict[str, int], Field(description="of the generation that saved it, outermost dimension first")]
    token: str
    ranks: Annotated[
        dict[int, dict[str, str]], Field(description="rank → node → host:port of its replicator's data plane")
    ]


class Job(JobSummary):
    goes_on_from: Annotated[int | None, Field(description="the step that it was submitted to go on from; null = none")]
    kept: Annotated[Kept | None, Field(description="null while the job is not over, and when nothing is left")]
    suspended: Annotated[Suspended | None, Field(description="null in any other phase")]
    interval: Annotated[Interval | None, Field(description="null before the first start")]
    reserved: Annotated[list[str], Field(description="free nodes that are reserved as its spares now")]
    ranks: list[Rank]
    spec: JobFile


class EarlierPolicy(Model):
    name: str
    sha256: str
    since: float


class Policy(Model):
    """What decides about a job's incidents. The default policy has no name; a plug-in has no text."""

    name: Annotated[
        str, Field(description="path of the script as it was submitted, or plugin:NAME; empty = the default policy")
    ]
    sha256: Annotated[str, Field(description="of the text; empty without one")]
    params: dict[str, str | int | float | bool]
    source: str
    since: Annotated[float | None, Field(description="Unix seconds; null = longer than the history reaches back")]
    before: Annotated[list[EarlierPolicy], Field(description="of the newest run, oldest first")]


class PolicyQuestion(Model):
    """One question to a policy and its answer, in the format that `holdfast policy test` reads."""

    at: float
    incident: Annotated[dict[str, Any], Field(description="as the policy saw it")]
    job: Annotated[dict[str, Any], Field(description="as the policy saw it")]
    action: dict[str, Any]
    decided_by: str


class Goodput(Model):
    """Every second of wall time in exactly one class: `useful_s`, `unmeasured_s` and the values of `badput_s` are `wall_s`."""

    job: str
    started_at: float
    wall_s: float
    useful_s: float
    unmeasured_s: Annotated[float, Field(description="all ranks ran, and their script reports no steps")]
    badput_s: dict[str, float]
    goodput_job: Annotated[
        float | None, Field(description="useful ÷ wall; null = not known: the script reports no steps")
    ]
    goodput_paid: Annotated[
        float | None, Field(description="useful ÷ paid node time, spares included; null = not known")
    ]
    fault_free_tokens_per_s: float
    fault_free_flops_per_s: Annotated[float, Field(description="as the script reports them; 0 = it does not")] = 0.0
    tokens: int
    rework_steps: int
    world_sizes: Annotated[list[tuple[float, int]], Field(description="(seconds since submission, ranks from then on)")]
    tokens_per_s: Annotated[list[tuple[float, float]], Field(description="(seconds since submission, rate)")]
