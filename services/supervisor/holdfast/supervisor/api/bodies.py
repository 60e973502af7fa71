"""The request bodies of `/v1`."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from holdfast.domain.faults import (
    FOR_S_DEFAULT,
    FOR_S_MAX,
    LASTING,
    LOSS_PERCENT_DEFAULT,
    LOSS_PERCENT_MAX,
    LOSS_PERCENT_MIN,
    OFFSET_S_DEFAULT,
    OFFSET_S_MAX,
    XID_MAX,
    FaultKind,
)
from holdfast.supervisor.api.models import Model


class AttachBody(Model):
    token: Annotated[str, Field(min_length=1, max_length=200, description="of the launcher that submitted the job")]


Text = Annotated[str, Field(min_length=1, max_length=1000)]


class StopBody(Model):
    reason: Text = "stopped by an operator"
    save: Annotated[bool, Field(description="take a last checkpoint first, when the job can")] = True


class PolicyBody(Model):
    policy: Annotated[
        str | dict[str, Any],
        Field(description="as in a job file: plugin:NAME, or {file, params, source}; empty = the default policy"),
    ] = ""


class SavedStep(Model):
    attempt: Annotated[int, Field(ge=1, strict=True)]
    step: Annotated[int, Field(ge=1, strict=True)]


class FaultBody(Model):
    kind: FaultKind
    rank: Annotated[
        int, Field(ge=0, description="the rank, or any rank of the node; ignored for redis_kill and leader_kill")
    ]
    for_s: Annotated[
        float, Field(gt=0, le=FOR_S_MAX, description="what lasts ends after it: " + ", ".join(sorted(LASTING)))
    ] = FOR_S_DEFAULT
    xid: Annotated[int, Field(ge=0, le=XID_MAX, description="of kind xid")] = 0
    loss_percent: Annotated[
        float, Field(ge=LOSS_PERCENT_MIN, le=LOSS_PERCENT_MAX, description="of kind lossy_link, in each direction")
    ] = LOSS_PERCENT_DEFAULT
    offset_s: Annotated[
        float,
        Field(ge=-OFFSET_S_MAX, le=OFFSET_S_MAX, allow_inf_nan=False, description="of kind clock_jump; not 0"),
    ] = OFFSET_S_DEFAULT


class PruneBody(Model):
    steps: Annotated[list[SavedStep], Field(min_length=1, max_length=10_000)]


class ResumeBody(Model):
    step: Annotated[int | None, Field(ge=1, strict=True, description="null: the newest complete one")] = None


class ResizeBody(Model):
    dp: Annotated[int, Field(ge=1, strict=True, description="replicas to run with, within the job's range")]
    reason: Text = "resized by an operator"


class ReasonBody(Model):
    reason: Text = "asked for by an operator"


class NoticeBody(Model):
    """`starts_at` or `in_s`, or neither if it may be any moment."""

    event: Annotated[Text, Field(min_length=1, description="what will happen, in a few words")] = "maintenance"
    starts_at: Annotated[float | None, Field(gt=0, description="Unix seconds")] = None
    in_s: Annotated[
        float | None, Field(ge=0, le=366 * 86_400, description="seconds from now, whatever your clock says")
    ] = None

    @model_validator(mode="after")
    def _one_time(self) -> Self:
        if self.starts_at is not None and self.in_s is not None:
            raise ValueError("give starts_at or in_s, not both")
        return self


class CheckpointBody(Model):
    grace_s: Annotated[
        float | None,
        Field(
            gt=0, le=86_400, description="answer after this long, however far it came; absent = as long as copies take"
        ),
    ] = None


class EmptyBody(Model):
    """Nothing to say; an empty object or no body at all."""
