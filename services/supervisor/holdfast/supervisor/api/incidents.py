"""`/v1/incidents` and `/v1/actions`: from the history, newest first."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast.domain.errors import NotFound
from holdfast.domain.incidents import Incident
from holdfast.supervisor.api import models, views
from holdfast.supervisor.api.backend import Backend, Cursor, Limit, Serving, number_of

router = APIRouter(tags=["incidents"])

OfJob = Annotated[str | None, Query(max_length=200, description="Only this job's.")]


@router.get("/incidents")
async def list_incidents(
    backend: Serving, job: OfJob = None, limit: Limit = 100, cursor: Cursor = None
) -> models.Page[models.Incident]:
    rows = await backend.history.incidents(job=job, before=number_of(cursor), limit=limit + 1)
    items = [views.incident(incident) for _, incident in rows[:limit]]
    return models.Page(items=items, next_cursor=str(rows[limit - 1][0]) if len(rows) > limit else None)


@router.get("/incidents/{incident_id}")
async def get_incident(incident_id: str, backend: Serving) -> models.Incident:
    return views.incident(await _find(backend, incident_id))


@router.get("/incidents/{incident_id}/trace")
async def get_trace(incident_id: str, backend: Serving) -> models.Trace:
    """Its trace, made from the record: no collector is asked."""
    return views.trace(await _find(backend, incident_id))


async def _find(backend: Backend, incident_id: str) -> Incident:
    incident = await backend.history.incident(incident_id)
    if incident is None:
        raise NotFound(f"there is no incident {incident_id}; GET /v1/incidents lists those there are")
    return incident


@router.get("/actions")
async def list_actions(
    backend: Serving, job: OfJob = None, limit: Limit = 100, cursor: Cursor = None
) -> models.Page[models.Action]:
    """What was done, by which policy, and why."""
    rows = await backend.history.actions(job=job, before=number_of(cursor), limit=limit + 1)
    items = [views.action(done) for done in rows[:limit]]
    return models.Page(items=items, next_cursor=str(rows[limit - 1].number) if len(rows) > limit else None)
