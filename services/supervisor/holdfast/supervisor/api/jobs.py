"""`/v1/jobs`."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Body

from holdfast.domain.errors import NotFound
from holdfast.supervisor import ledger
from holdfast.supervisor.api import models, views
from holdfast.supervisor.api.backend import Backend, Commands, Cursor, Limit, Serving
from holdfast.supervisor.core import holders, saved_steps
from holdfast.supervisor.core.state import Job
from holdfast.supervisor.picture import Picture
from holdfast.supervisor.protocol import CheckpointRequested, JobStopRequested, JobSubmitted, ResizeRequested
from holdfast.supervisor.resume import resolve
from holdfast.wire.jobfile import parse_job

router = APIRouter(prefix="/jobs", tags=["jobs"])

TOKEN_BYTES = 32
_JOB_BODY = {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobFile"}}}}}


@router.post("", status_code=202, openapi_extra=_JOB_BODY)
async def submit(body: Annotated[dict[str, Any], Body()], backend: Serving, commands: Commands) -> models.Operation:
    """Submit a job. Paths are the nodes' paths and must be absolute. 409 when a job of this name has not finished."""
    spec = parse_job(body)
    await backend.check_policy(spec)
    resumed = await to_thread.run_sync(resolve, spec)
    return await commands.command(JobSubmitted(time.time(), spec, secrets.token_hex(TOKEN_BYTES), resumed))


@router.get("")
async def list_jobs(backend: Serving, limit: Limit = 100, cursor: Cursor = None) -> models.Page[models.JobSummary]:
    """Every job that has not been forgotten, by name."""
    picture = await backend.picture()
    names = sorted(name for name in picture.state.jobs if cursor is None or name > cursor)
    items = [views.job_summary(picture, backend.progress, picture.state.jobs[name]) for name in names[:limit]]
    return models.Page(items=items, next_cursor=names[limit - 1] if len(names) > limit else None)


@router.get("/{name}")
async def get_job(name: str, backend: Serving) -> models.Job:
    """One job as it is now: its mesh rank by rank, its step and loss, and the incident that is open."""
    picture, job = await _find(backend, name)
    return views.job(picture, backend.progress, job)


@router.post("/{name}/stop", status_code=202)
async def stop(name: str, commands: Commands, body: models.StopBody | None = None) -> models.Operation:
    """Stop a job; it saves a last checkpoint first when it can."""
    body = body or models.StopBody()
    return await commands.command(JobStopRequested(time.time(), name, body.reason, body.save))


@router.delete("/{name}", status_code=202)
async def delete(name: str, commands: Commands) -> models.Operation:
    """Stop a job at once, without a last checkpoint."""
    return await commands.command(JobStopRequested(time.time(), name, "deleted by an operator", save=False))


@router.post("/{name}/checkpoint", status_code=202)
async def checkpoint(name: str, commands: Commands, body: models.CheckpointBody | None = None) -> models.Operation:
    """Save within the next few steps, to the farthest tier that the job has. The operation ends when every copy is made, or
    when the grace time is over, and says how far the checkpoint came."""
    grace_s = (body.grace_s if body else None) or 0.0
    return await commands.command(CheckpointRequested(time.time(), name, grace_s=grace_s))


@router.post("/{name}/resize", status_code=202)
async def resize(name: str, body: models.ResizeBody, commands: Commands) -> models.Operation:
    """Run with another number of data-parallel replicas, within the job's range."""
    return await commands.command(ResizeRequested(time.time(), name, body.dp, body.reason))


@router.get("/{name}/checkpoints")
async def checkpoints(name: str, backend: Serving) -> models.Page[models.Checkpoint]:
    """Every saved step that connected nodes or the object store hold, newest first."""
    picture, job = await _find(backend, name)
    return models.Page(items=[views.checkpoint(step) for step in saved_steps(picture.state, job.name)])


@router.get("/{name}/checkpoints/{attempt}/{step}")
async def checkpoint_holders(name: str, attempt: int, step: int, backend: Serving) -> models.CheckpointHolders:
    """Which connected nodes hold the shards of one saved step."""
    picture, job = await _find(backend, name)
    ranks = {rank: list(nodes) for rank, nodes in holders(picture.state, job.name, attempt, step).items()}
    return models.CheckpointHolders(attempt=attempt, step=step, ranks=ranks)


@router.get("/{name}/goodput")
async def goodput(name: str, backend: Serving) -> models.Goodput:
    """Where the wall time of the job's newest run went: every second in exactly one class."""
    run = await backend.history.run(name)
    if run is None:
        raise NotFound(f"there is no job {name}")
    account = await ledger.account_in_thread(run, now=time.time())
    return views.goodput(name, run.accepted.at, account)


async def _find(backend: Backend, name: str) -> tuple[Picture, Job]:
    picture = await backend.picture()
    if name not in picture.state.jobs:
        raise NotFound(f"there is no job {name}; GET /v1/jobs lists those there are")
    return picture, picture.state.jobs[name]
