"""Reports of a job and of the fleet, as the API tells them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.supervisor.api.models import Model


class FaultGroup(Model):
    """Faults of one kind, of one node, or all. Times in seconds."""

    name: str
    count: int
    repaired: Annotated[int, Field(description="of them: those after which every rank has finished a step")]
    mtbf_s: Annotated[float | None, Field(description="time with nodes ÷ faults; null: no fault")]
    mtbf_at_least_s: Annotated[float | None, Field(description="lower bound at 95 % confidence, without a fault")]
    mttr_s: Annotated[float | None, Field(description="mean time from a fault to the next step of every rank")]
    longest_s: float | None
    rework_steps: int
    cost: Annotated[float | None, Field(description="of the time to repair and of the steps done again")]


class TimeShare(Model):
    """A class of goodput or badput."""

    name: str
    seconds: float
    share: float
    cost: float | None


class Comparison(Model):
    """The repaired faults, each with a restart and half of a checkpoint interval of lost work instead."""

    faults: int
    left_out: Annotated[int, Field(description="faults that are not over, or that ended the job")]
    restart_s: float
    checkpoint_every_s: float
    seconds: Annotated[float, Field(description="that they would take")]
    actual_s: Annotated[float, Field(description="that they took, with the steps done again")]
    saved: Annotated[float | None, Field(description="cost; null: no price is stated")]
    text: Annotated[str, Field(description="the assumption and its result in words")]


class JobReport(Model):
    """How often a job's newest run was interrupted, for how long, where its time went, and what that cost."""

    job: str
    phase: str
    started_at: float
    wall_s: float
    ranks: Annotated[int, Field(description="of the full mesh")]
    step: int | None
    tokens: int
    scheduling: Annotated[float | None, Field(description="share of time with nodes")]
    runtime: Annotated[float | None, Field(description="share of that in useful steps; null = not known")]
    mfu: Annotated[float | None, Field(description="null: FLOPs or the peak are not stated, or not reported")]
    goodput: Annotated[float | None, Field(description="scheduling × runtime")]
    goodput_paid: float | None
    cost: Annotated[float | None, Field(description="of all ranks of the full mesh; null: no price is stated")]
    currency: str
    shares: list[TimeShare]
    all_faults: FaultGroup
    by_kind: list[FaultGroup]
    by_node: list[FaultGroup]
    comparison: Annotated[Comparison | None, Field(description="null: nothing to compare with is stated")]
    notes: list[str]
    summary: Annotated[str, Field(description="for who reads nothing else")]


class FleetReport(Model):
    """The newest runs of all jobs within a range of time, added up; jobs weigh by their ranks."""

    since: float
    until: float
    jobs: Annotated[list[JobReport], Field(description="each within the range only; most rank-seconds first")]
    jobs_left_out: int
    gpu_hours: Annotated[float, Field(description="hours of one rank, of the full meshes")]
    goodput: float | None
    gpu_hours_per_fault: Annotated[float | None, Field(description="with nodes; null: no fault")]
    shares: Annotated[list[TimeShare], Field(description="`seconds` are those of one rank")]
    all_faults: FaultGroup
    by_kind: list[FaultGroup]
    by_node: list[FaultGroup]
    cost: Annotated[float | None, Field(description="null: no job states a price, or not all in one currency")]
    saved: Annotated[float | None, Field(description="against the comparisons that jobs state")]
    currency: str
    notes: list[str]
