"""`/v1/fleet`, its checkpoints and nodes, and of one job `ranks` and `timeline`: one answer for a whole page."""

from __future__ import annotations

from anyio import to_thread

from holdfast.domain.errors import NotFound
from holdfast.supervisor.api import fleet_models as models
from holdfast.supervisor.api import fleet_views as views
from holdfast.supervisor.api.access import guarded
from holdfast.supervisor.api.backend import Serving
from holdfast.supervisor.history.accounts import Wanted
from holdfast.supervisor.history.ledger import to_history

router = guarded("/v1", tags=["fleet"])

POINTS_MAX = 800  # of a time line: a screen has hardly more


@router.get("/fleet")
async def get_fleet(backend: Serving) -> models.Fleet:
    """All jobs with their goodput of the last 24 hours, nodes by state, open incidents and the breaker."""
    picture = await backend.picture()
    shown = views.in_order(picture.state.jobs.values())[: views.JOBS_MAX]
    wanted = [Wanted(job.name, job.submitted_at, job.phase.finished) for job in shown]
    accounts = {each.job: account for each, account in (await backend.accounts.of(wanted)).items()}
    return views.fleet(picture, backend.progress, shown, accounts, backend.now())


@router.get("/fleet/checkpoints")
async def get_fleet_checkpoints(backend: Serving) -> models.FleetCheckpoints:
    """What is saved of each job: the newest complete step and where it is, and how often the job saves."""
    picture = await backend.picture()
    shown = views.in_order(picture.state.jobs.values())[: views.JOBS_MAX]
    return await to_thread.run_sync(views.fleet_checkpoints, picture, shown, backend.now())


@router.get("/fleet/nodes")
async def get_fleet_nodes(backend: Serving) -> models.FleetNodes:
    """Every node in columns: 12,500 nodes are less than a megabyte."""
    picture = await backend.picture()
    return await to_thread.run_sync(views.fleet_nodes, picture, backend.now())


@router.get("/jobs/{name}/ranks")
async def get_ranks(name: str, backend: Serving) -> models.RankColumns:
    """Every rank of a job in columns: 100,000 ranks are less than 2 MB."""
    picture = await backend.picture()
    if name not in picture.state.jobs:
        raise NotFound(f"there is no job {name}; GET /v1/jobs lists those there are")
    return await to_thread.run_sync(views.rank_columns, picture, picture.state.jobs[name], backend.now())


@router.get("/jobs/{name}/timeline")
async def get_timeline(name: str, backend: Serving) -> models.Timeline:
    """Steps, loss, rate, ranks, classes of goodput and incidents of the job's newest run over time."""
    run = await backend.history.run(name)
    if run is None:
        raise NotFound(f"there is no job {name}")
    history = to_history(run, backend.now())
    series = await backend.history.series(name, since=history.started_at, until=history.ended_at, points_max=POINTS_MAX)
    return await to_thread.run_sync(views.timeline, name, history, run, series)
