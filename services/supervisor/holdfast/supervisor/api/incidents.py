"""`/v1/incidents`, `/v1/findings` and `/v1/actions`: from the history, newest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Annotated, TypeVar

from fastapi import Depends, Query, Response

from holdfast.domain.errors import NotFound
from holdfast.domain.incidents import Incident
from holdfast.supervisor.api import incident_models, incident_views, models
from holdfast.supervisor.api.access import guarded
from holdfast.supervisor.api.backend import Backend, Cursor, Limit, Serving, number_of

BEHIND = "Holdfast-History-Behind"  # of an answer from the history: why it lacks what has happened since

router = guarded("/v1", tags=["incidents"])

OfJob = Annotated[str | None, Query(max_length=200, description="Only this job's.")]
OfNode = Annotated[str | None, Query(max_length=200, description="Only this node's.")]
SUGGESTED_FROM = 500  # the newest findings, among which a mistyped id is looked for
SUGGESTED_MAX = 3


def _say_if_behind(backend: Serving, response: Response) -> None:
    if why := backend.behind():
        response.headers[BEHIND] = why.encode("ascii", "replace").decode().replace("\n", " ")


router.dependencies.append(Depends(_say_if_behind))

R = TypeVar("R")
V = TypeVar("V", bound=models.Model)


def _page(rows: Sequence[tuple[int, R]], limit: int, view: Callable[[R], V]) -> models.Page[V]:
    """Of `limit` + 1 numbered rows that were asked for; the one too many says that there is more."""
    items = [view(value) for _, value in rows[:limit]]
    return models.Page(items=items, next_cursor=str(rows[limit - 1][0]) if len(rows) > limit else None)


@router.get("/incidents")
async def list_incidents(
    backend: Serving, job: OfJob = None, node: OfNode = None, limit: Limit = 100, cursor: Cursor = None
) -> models.Page[incident_models.Incident]:
    rows = await backend.history.incidents(job=job, node=node, before=number_of(cursor), limit=limit + 1)
    return _page(rows, limit, incident_views.incident)


@router.get("/incidents/{incident_id}")
async def get_incident(incident_id: str, backend: Serving) -> incident_models.Incident:
    return incident_views.incident(await _find(backend, incident_id))


@router.get("/incidents/{incident_id}/trace")
async def get_trace(incident_id: str, backend: Serving) -> incident_models.Trace:
    """Its trace, made from the record: no collector is asked."""
    return incident_views.trace(await _find(backend, incident_id))


async def _find(backend: Backend, incident_id: str) -> Incident:
    incident = await backend.history.incident(incident_id)
    if incident is None:
        raise NotFound(f"there is no incident {incident_id}; `holdfast incidents list` shows those there are")
    return incident


@router.get("/findings")
async def list_findings(
    backend: Serving, job: OfJob = None, node: OfNode = None, limit: Limit = 100, cursor: Cursor = None
) -> models.Page[incident_models.Finding]:
    """What was concluded, warnings included, and what became of it."""
    rows = await backend.history.findings(job=job, node=node, before=number_of(cursor), limit=limit + 1)
    return _page(rows, limit, incident_views.finding)


@router.get("/findings/{finding_id:path}")
async def get_finding(finding_id: str, backend: Serving) -> incident_models.Finding:
    """One finding with its evidence and the rule that fired. 404 names findings whose ids look alike."""
    judged = await backend.history.finding(finding_id)
    if judged is None:
        raise NotFound(f"there is no finding {finding_id}{await _suggestion(backend, finding_id)}")
    return incident_views.finding(judged)


async def _suggestion(backend: Backend, finding_id: str) -> str:
    newest = [judged.finding.id for _, judged in await backend.history.findings(limit=SUGGESTED_FROM)]
    if alike := get_close_matches(finding_id, newest, n=SUGGESTED_MAX):
        return f"; did you mean {' or '.join(alike)}?"
    if newest:
        return f"; the latest are {', '.join(newest[:SUGGESTED_MAX])}"
    return "; nothing has been found yet"


@router.get("/actions")
async def list_actions(
    backend: Serving, job: OfJob = None, limit: Limit = 100, cursor: Cursor = None
) -> models.Page[incident_models.Action]:
    """What was done, by which policy, and why."""
    rows = await backend.history.actions(job=job, before=number_of(cursor), limit=limit + 1)
    return _page([(done.number, done) for done in rows], limit, incident_views.action)
