"""Reports of a job and of the fleet, as the API tells them: the values of `report`, and sentences."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.supervisor.api.models import Model, fields_of
from holdfast.supervisor.report import fleet, numbers


@fields_of(numbers.Faults)
class FaultGroup(Model):
    """Faults of one kind, of one node, or all. Times in seconds."""


@fields_of(numbers.Share)
class TimeShare(Model):
    """A class of goodput or badput."""


@fields_of(numbers.Comparison)
class Comparison(Model):
    """The repaired faults, each with a restart and half of a checkpoint interval of lost work instead."""

    text: Annotated[str, Field(description="the assumption and its result in words")]


@fields_of(numbers.Report)
class JobReport(Model):
    """How often a job's newest run was interrupted, for how long, where its time went, and what that cost."""

    shares: list[TimeShare]
    all_faults: FaultGroup
    by_kind: list[FaultGroup]
    by_node: list[FaultGroup]
    comparison: Annotated[Comparison | None, Field(description="null: nothing to compare with is stated")]
    notes: list[str]
    summary: Annotated[str, Field(description="for who reads nothing else")]


@fields_of(fleet.FleetReport)
class FleetReport(Model):
    """The newest runs of all jobs within a range of time, added up; jobs weigh by their ranks."""

    jobs: Annotated[list[JobReport], Field(description="each within the range only; most rank-seconds first")]
    shares: Annotated[list[TimeShare], Field(description="`seconds` are those of one rank")]
    all_faults: FaultGroup
    by_kind: list[FaultGroup]
    by_node: list[FaultGroup]
    notes: list[str]
