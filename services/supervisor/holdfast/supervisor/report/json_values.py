"""Reports as JSON values, as the API returns them, with their sentences. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from holdfast.supervisor.report.fleet import FleetReport
from holdfast.supervisor.report.numbers import Report
from holdfast.supervisor.report.words import compared, summary


def job_values(made: Report) -> dict[str, Any]:
    values = asdict(made)
    if made.comparison is not None:
        values["comparison"]["text"] = compared(made.comparison, made.currency)
    return values | {"summary": summary(made, made.currency)}


def fleet_values(made: FleetReport) -> dict[str, Any]:
    return asdict(made) | {"jobs": [job_values(each) for each in made.jobs]}
