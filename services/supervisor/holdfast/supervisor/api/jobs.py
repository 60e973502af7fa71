"""`/v1/jobs`."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import replace
from typing import Annotated, Any

from anyio import move_on_after, to_thread
from fastapi import Body, Header, Query, Request

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.domain.faults import CONTROL_PLANE
from holdfast.domain.job import JobSpec
from holdfast.supervisor.api import bodies, job_models, job_views, models
from holdfast.supervisor.api.access import Asking, guarded, require_own
from holdfast.supervisor.api.backend import Backend, Commands, Cursor, Limit, Serving, number_of
from holdfast.supervisor.core import holders, saved_steps
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.history import ledger
from holdfast.supervisor.picture import Picture
from holdfast.supervisor.protocol import (
    CheckpointRequested,
    FaultRequested,
    JobStopRequested,
    JobSubmitted,
    PolicyChangeRequested,
    PruneRequested,
    ResizeRequested,
    StartFrom,
)
from holdfast.supervisor.resume import own_checkpoint, resolve
from holdfast.wire.jobfile import parse_job, parse_policy

router = guarded("/v1/jobs", tags=["jobs"])

TOKEN_BYTES = 32
STORE_LOOK_S = 5.0  # for what a name has in its object store: what the nodes hold is known without
LauncherToken = Annotated[
    str,
    Header(
        alias="Holdfast-Launcher-Token", max_length=200, description="With it a restarted launcher finds the job again."
    ),
]
_JOB_BODY = {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobFile"}}}}}


@router.post("", status_code=202, openapi_extra=_JOB_BODY)
async def submit(
    body: Annotated[dict[str, Any], Body()],
    request: Request,
    asking: Asking,
    backend: Serving,
    commands: Commands,
    resume: Annotated[bool, Query(description="go on from the newest complete checkpoint of this name")] = False,
    fresh: Annotated[bool, Query(description="start at step 0 and keep the checkpoints of this name")] = False,
    step: Annotated[int | None, Query(ge=1, description="with resume: go on from this step")] = None,
    launcher: LauncherToken = "",
) -> models.Operation:
    """Submit a job. Paths are the nodes' paths and must be absolute. 409 when a job of this name has not finished, and when the
    name has checkpoints and neither `resume` nor `fresh` says what is to become of them: nothing deletes them."""
    if resume and fresh:
        raise InvalidSpec("fresh", True, "no fresh together with resume: one goes on, the other starts at step 0")
    if step is not None and not resume:
        raise InvalidSpec("step", step, "no step without resume")
    start = StartFrom.CHECKPOINT if resume else StartFrom.SCRATCH if fresh else StartFrom.NOTHING
    spec = parse_job(body)
    await require_own(backend, asking, spec.name, request)
    spec = spec.with_policy(await backend.usable(spec.policy_spec))
    return await _submit(commands, spec, start, step, _digest(launcher), asking.name)


async def _submit(
    commands: Commands, spec: JobSpec, start: StartFrom, step: int | None, launcher: str, owner: str
) -> models.Operation:
    if start is StartFrom.CHECKPOINT:
        spec = replace(spec, resume=None)  # its own checkpoints are newer than what it may have started from once
    resumed = await to_thread.run_sync(resolve, spec)
    found = None
    if start is not StartFrom.SCRATCH and spec.resume is None:
        with move_on_after(STORE_LOOK_S):
            found = await to_thread.run_sync(own_checkpoint, spec, step, abandon_on_cancel=True)
    token = secrets.token_hex(TOKEN_BYTES)
    return await commands.command(JobSubmitted(time.time(), spec, token, resumed, start, step, found, launcher, owner))


@router.get("")
async def list_jobs(backend: Serving, limit: Limit = 100, cursor: Cursor = None) -> models.Page[job_models.JobSummary]:
    """Every job that has not been forgotten, by name."""
    picture = await backend.picture()
    names = sorted(name for name in picture.state.jobs if cursor is None or name > cursor)
    items = [job_views.job_summary(picture, backend.progress, picture.state.jobs[name]) for name in names[:limit]]
    return models.Page(items=items, next_cursor=names[limit - 1] if len(names) > limit else None)


@router.get("/{name}")
async def get_job(
    name: str,
    backend: Serving,
    ranks: Annotated[bool, Query(description="false: without `ranks`, which /ranks has in columns")] = True,
) -> job_models.Job:
    """One job as it is now: its mesh rank by rank, its step and loss, and the incident that is open."""
    picture, job = await _find(backend, name)
    return job_views.job(picture, backend.progress, job, ranks=ranks)


@router.post("/{name}/stop", status_code=202)
async def stop(name: str, commands: Commands, body: bodies.StopBody | None = None) -> models.Operation:
    """Stop a job; it saves a last checkpoint first when it can."""
    body = body or bodies.StopBody()
    return await commands.command(JobStopRequested(time.time(), name, body.reason, body.save))


@router.post("/{name}/resume", status_code=202)
async def resume(
    name: str, backend: Serving, commands: Commands, body: bodies.ResumeBody | None = None
) -> models.Operation:
    """Submit a job that is over again, as it was submitted last, to go on from its newest complete checkpoint, or from the
    step that is named."""
    _, job = await _find(backend, name)
    return await _submit(commands, job.spec, StartFrom.CHECKPOINT, body.step if body else None, job.launcher, job.owner)


@router.post("/{name}/attach")
async def attach(name: str, body: bodies.AttachBody, backend: Serving) -> job_models.Job:
    """The job, for a launcher that was restarted: it was submitted with this token in `Holdfast-Launcher-Token`. 409 for
    another launcher's that is not over; one that is over stands in nobody's way, and is not found."""
    picture, job = await _find(backend, name)
    if not secrets.compare_digest(job.launcher.encode(), _digest(body.token).encode()):
        if job.phase.finished:
            raise NotFound(f"there is no job {name} of this launcher")
        raise Conflict(
            f"a job named {name} is {job.phase}, and another launcher submitted it: its token is not this one. Choose another "
            "name, or give the token with which it was submitted"
        )
    return job_views.job(picture, backend.progress, job)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


@router.delete("/{name}", status_code=202)
async def delete(name: str, commands: Commands) -> models.Operation:
    """Stop a job at once, without a last checkpoint."""
    return await commands.command(JobStopRequested(time.time(), name, "deleted by an operator", save=False))


@router.post("/{name}/checkpoint", status_code=202)
async def checkpoint(name: str, commands: Commands, body: bodies.CheckpointBody | None = None) -> models.Operation:
    """Save within the next few steps, to the farthest tier that the job has. The operation ends when every copy is made, or
    when the grace time is over, and says how far the checkpoint came."""
    grace_s = (body.grace_s if body else None) or 0.0
    return await commands.command(CheckpointRequested(time.time(), name, grace_s=grace_s))


@router.post("/{name}/resize", status_code=202)
async def resize(name: str, body: bodies.ResizeBody, commands: Commands) -> models.Operation:
    """Run with another number of data-parallel replicas, within the job's range."""
    return await commands.command(ResizeRequested(time.time(), name, body.dp, body.reason))


@router.get("/{name}/checkpoints")
async def checkpoints(name: str, backend: Serving) -> models.Page[job_models.Checkpoint]:
    """Every saved step that connected nodes or the object store hold, newest first."""
    picture, job = await _find(backend, name)
    return models.Page(items=[job_views.checkpoint(step) for step in saved_steps(picture.state, job.name)])


@router.get("/{name}/checkpoints/{attempt}/{step}")
async def checkpoint_holders(name: str, attempt: int, step: int, backend: Serving) -> job_models.CheckpointHolders:
    """Which connected nodes hold the shards of one saved step."""
    picture, job = await _find(backend, name)
    ranks = {rank: list(nodes) for rank, nodes in holders(picture.state, job.name, attempt, step).items()}
    return job_models.CheckpointHolders(attempt=attempt, step=step, ranks=ranks)


@router.get("/{name}/checkpoints/{attempt}/{step}/sources")
async def checkpoint_sources(name: str, attempt: int, step: int, backend: Serving) -> job_models.ShardSources:
    """Where the shards of one saved step can be fetched from its nodes, with the job's secret for their data plane. Who may
    call this can read the job's checkpoints: set HOLDFAST_API_TOKEN where not everybody should."""
    picture, job = await _find(backend, name)
    for each in saved_steps(picture.state, job.name):
        if (each.attempt, each.step) == (attempt, step):
            return job_views.shard_sources(picture.state, job, each)
    raise NotFound(f"no node has step {step} (attempt {attempt}) of {name}")


@router.post("/{name}/checkpoints/prune", status_code=202)
async def prune(name: str, body: bodies.PruneBody, commands: Commands) -> models.Operation:
    """Delete saved steps from the nodes. 409 for one that a job which is not over may go back to."""
    steps = tuple(CheckpointId(each.attempt, each.step) for each in body.steps)
    return await commands.command(PruneRequested(time.time(), name, steps))


@router.get("/{name}/policy")
async def policy(name: str, backend: Serving) -> job_models.Policy:
    """What decides about the job's incidents, with the text of a script, and what did before in the newest run."""
    _, job = await _find(backend, name)
    return job_views.policy(job, await backend.history.policies(name))


@router.post("/{name}/policy", status_code=202)
async def change_policy(name: str, body: bodies.PolicyBody, backend: Serving, commands: Commands) -> models.Operation:
    """Let another policy decide, from the next question on. 422 for a script that does not load or does not answer."""
    given = await backend.usable(parse_policy(body.policy))
    return await commands.command(PolicyChangeRequested(time.time(), name, given))


@router.get("/{name}/policy/questions")
async def policy_questions(
    name: str,
    backend: Serving,
    since: Annotated[float, Query(ge=0, description="Unix seconds; 0 = from the beginning.")] = 0.0,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> models.Page[job_models.PolicyQuestion]:
    """What the job's policies were asked, with all that they were shown, and what they answered; newest first. Also of runs
    that the job had before, and of a job that is over."""
    rows = await backend.history.asked(name, since=since, before=number_of(cursor), limit=limit + 1)
    items = [job_views.policy_question(asked) for _, asked in rows[:limit]]
    return models.Page(items=items, next_cursor=str(rows[limit - 1][0]) if len(rows) > limit else None)


@router.post("/{name}/faults", status_code=202)
async def inject(name: str, body: bodies.FaultBody, commands: Commands) -> models.Operation:
    """Cause a fault, to test the recovery. 409 unless the job file says `chaos: true`. The operation ends when the agent of the
    rank's node has caused it, or refused; for `redis_kill` and `leader_kill`, a moment before the leader causes it."""
    return await commands.command(
        FaultRequested(
            time.time(),
            name,
            body.kind,
            0 if body.kind in CONTROL_PLANE else body.rank,
            body.for_s,
            body.xid,
            loss_percent=body.loss_percent,
            offset_s=body.offset_s,
        )
    )


@router.get("/{name}/goodput")
async def goodput(name: str, backend: Serving) -> job_models.Goodput:
    """Where the wall time of the job's newest run went: every second in exactly one class."""
    run = await backend.history.run(name)
    if run is None:
        raise NotFound(f"there is no job {name}")
    account = await ledger.account_in_thread(run, now=backend.now())
    return job_views.goodput(name, run.accepted.at, account)


async def _find(backend: Backend, name: str) -> tuple[Picture, Job]:
    picture = await backend.picture()
    if name not in picture.state.jobs:
        raise NotFound(f"there is no job {name}; `holdfast jobs list` shows those there are")
    return picture, picture.state.jobs[name]
