"""Computes the report of a fleet from a history, job after job."""

from __future__ import annotations

from functools import partial

from anyio import to_thread

from holdfast.supervisor.history.protocol import History
from holdfast.supervisor.report.fleet import FleetReport, fleet_report
from holdfast.supervisor.report.numbers import Report, Terms
from holdfast.supervisor.report.sources import Range, report_of_part

JOBS_MAX = 200  # of one report, those that were submitted last


async def make_fleet_report(
    history: History, given: Terms, part: Range, now: float, *, jobs_max: int = JOBS_MAX
) -> FleetReport:
    """Raises `InvalidSpec` for terms that do not fit together. `now`: the end of runs that are not over (Unix seconds)."""
    made: list[Report] = []
    left_out = 0
    for name in await history.jobs(before=part.until):
        if len(made) >= jobs_max:
            left_out += 1
        elif (run := await history.run(name)) is not None:
            found = await to_thread.run_sync(partial(report_of_part, run, given, part, now))
            made += [found] if found is not None else []
    return fleet_report(made, part.since, part.until, left_out)
