"""`/v1/audit`."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import Field

from holdfast.supervisor.api import models
from holdfast.supervisor.api.access import guarded
from holdfast.supervisor.api.audit_store import Line
from holdfast.supervisor.api.backend import Cursor, Limit, Serving, number_of

router = guarded("/v1", tags=["audit"])


class AuditLine(models.Model):
    """One request that changed something, or was to."""

    at: Annotated[float, Field(description="Unix seconds")]
    who: Annotated[str, Field(description="name of the token; `anybody` where none was needed")]
    role: str
    what: str
    subject: Annotated[str, Field(description="`job NAME`, `node NAME`, `invitation ID` or `breaker`")]
    asked: Annotated[dict[str, object], Field(description="what the request says, without secrets")]
    before: Annotated[dict[str, object], Field(description="what the subject was")]
    result: Annotated[str, Field(description="`accepted`, or `refused`")]
    reason: Annotated[str, Field(description="why it was refused")] = ""
    operation: Annotated[str, Field(description="says what became of an accepted request")] = ""


@router.get("/audit")
async def list_audit(
    backend: Serving,
    who: Annotated[str | None, Query(max_length=64, description="Only requests with this token.")] = None,
    subject: Annotated[str | None, Query(max_length=300, description="Only of this `job NAME` or `node NAME`.")] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> models.Page[AuditLine]:
    """Requests that this supervisor has answered and that changed something, or were to; newest first."""
    if backend.audit is None:
        return models.Page(items=[], next_cursor=None)
    lines = await backend.audit.lines(who=who, subject=subject, before=number_of(cursor), limit=limit + 1)
    items = [_line(each) for each in lines[:limit]]
    return models.Page(items=items, next_cursor=str(lines[limit - 1].number) if len(lines) > limit else None)


def _line(line: Line) -> AuditLine:
    return AuditLine.model_validate({**line.fields, "at": line.at})
