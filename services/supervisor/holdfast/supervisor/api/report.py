"""`/v1/jobs/{name}/report` and `/v1/report`: reports, computed from the history when somebody asks."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import Depends, Query

from holdfast.domain.errors import InvalidSpec, NotFound
from holdfast.supervisor.api.access import guarded
from holdfast.supervisor.api.backend import Serving
from holdfast.supervisor.api.report_models import FleetReport, JobReport
from holdfast.supervisor.report.json_values import fleet_values, job_values
from holdfast.supervisor.report.making import make_fleet_report
from holdfast.supervisor.report.numbers import Terms
from holdfast.supervisor.report.sources import Range, report_of_run

router = guarded("/v1", tags=["reports"])

DAY_S = 86_400.0
NotNegative = Annotated[float | None, Query(ge=0, allow_inf_nan=False)]
Positive = Annotated[float | None, Query(gt=0, allow_inf_nan=False)]


def _terms(
    price_per_gpu_hour: Annotated[
        float | None, Query(ge=0, allow_inf_nan=False, description="Instead of the job file's, as are the others.")
    ] = None,
    currency: Annotated[str | None, Query(min_length=1, max_length=8)] = None,
    flops_per_token: Positive = None,
    peak_flops: Positive = None,
    restart_s: NotNegative = None,
    checkpoint_every_s: NotNegative = None,
) -> Terms:
    return Terms(price_per_gpu_hour, flops_per_token, peak_flops, restart_s, checkpoint_every_s, currency)


Given = Annotated[Terms, Depends(_terms)]


@router.get("/jobs/{name}/report")
async def get_report(name: str, backend: Serving, given: Given) -> JobReport:
    """MTBF and MTTR by kind and node, goodput, MFU, the cost of each cause, and what the recovery saved against a comparison
    that the job file or the request states."""
    run = await backend.history.run(name)
    if run is None:
        raise NotFound(f"there is no job {name}; `holdfast jobs list` shows those there are")
    made = await to_thread.run_sync(report_of_run, run, given, backend.now())
    return JobReport(**job_values(made))


@router.get("/report")
async def get_fleet_report(
    backend: Serving,
    given: Given,
    since: Annotated[float | None, Query(ge=0, description="Unix seconds; default: seven days ago")] = None,
    until: Annotated[float | None, Query(ge=0, description="Unix seconds; default: now")] = None,
) -> FleetReport:
    """The same over the newest runs of all jobs, as far as they lie within a range of time."""
    now = backend.now()
    end = now if until is None else until
    part = Range(max(0.0, end - 7 * DAY_S) if since is None else since, end)
    if part.since >= part.until:
        raise InvalidSpec("since", part.since, f"a moment before until ({part.until:.0f})")
    async with backend.reporting:  # one at a time: a hundred long runs take a thread some seconds
        made = await make_fleet_report(backend.history, given, part, now)
    return FleetReport(**fleet_values(made))
