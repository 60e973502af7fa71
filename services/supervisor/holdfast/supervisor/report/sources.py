"""What a report is computed from: the run of a job as the history has it, whole or a part of its time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.domain.incidents import Incident
from holdfast.supervisor.history import goodput, time_classes
from holdfast.supervisor.history.ledger import to_history
from holdfast.supervisor.history.protocol import Run, Series
from holdfast.supervisor.history.time_classes import BADPUT, Class
from holdfast.supervisor.protocol import JobPhase
from holdfast.supervisor.report.numbers import Json, Report, Terms, joined, report


@dataclass(frozen=True, slots=True)
class Range:
    """A part of time, Unix seconds."""

    since: float
    until: float


def report_of_run(run: Run, given: Terms, now: float) -> Report:
    """The report of a whole run. Raises `InvalidSpec` for terms that do not fit together."""
    ledger = goodput.account(to_history(run, now))
    books = {
        "started_at": run.accepted.at,
        "wall_s": ledger.wall_s,
        **_seconds(ledger.seconds),
        "goodput_job": ledger.goodput_job,
        "goodput_paid": ledger.goodput_paid,
        "fault_free_tokens_per_s": ledger.fault_free_tokens_per_s,
        "fault_free_flops_per_s": ledger.fault_free_flops_per_s,
        "tokens": ledger.tokens,
        "rework_steps": ledger.rework_steps,
    }
    return report(_job(run), books, incidents_of(run.incidents), joined(given, terms_of(run)))


def report_of_part(run: Run, given: Terms, part: Range, now: float) -> Report | None:
    """The report of a run's time within `part`; None if the run has none there."""
    history = to_history(run, now)
    if history.ended_at <= part.since or history.started_at >= part.until:
        return None
    if part.since <= history.started_at and history.ended_at <= part.until:
        return report_of_run(run, given, now)
    inside = goodput.within(history, part.since, part.until)
    seconds, wall_s = inside.seconds, max(0.0, inside.until - inside.since)
    useful_s = seconds[Class.USEFUL]
    measured = useful_s > 0 or not seconds[Class.RUNNING]
    books = {
        "started_at": inside.since,
        "wall_s": wall_s,
        **_seconds(seconds),
        "goodput_job": (useful_s / wall_s if wall_s else 0.0) if measured else None,
        "goodput_paid": None,
        "fault_free_tokens_per_s": inside.fault_free_tokens_per_s,
        "fault_free_flops_per_s": inside.fault_free_flops_per_s,
        "tokens": inside.tokens,
        "rework_steps": inside.rework_steps,
    }
    incidents = [each for each in run.incidents if each.fault_at < part.until]
    made = report(_job(run), books, incidents_of(incidents), joined(given, terms_of(run)))
    if history.booked is not None and inside.since == history.booked.cursor:
        made = replace(made, notes=(*made.notes, "Older steps are kept only as sums: the report begins after them."))
    return made


def newest_moment(run: Run) -> float:
    """When the last thing happened that the history has of this run (Unix seconds)."""
    moments: list[float] = [run.accepted.at, *(each.at for each in run.changes), *(each.at for each in run.generations)]
    moments += [record.ended_at for record in run.steps]
    moments += [at for each in run.incidents for at in (each.detected_at, each.first_step_at) if at is not None]
    return max(moments)


def timeline_of(history: time_classes.History, series: Series) -> Json:
    """What the page of a report draws: steps over time, and what the job did when."""
    spans = goodput.spans(history)
    return {
        "since": history.started_at,
        "until": history.ended_at,
        "at": [min(series.since + (index + 0.5) * series.bucket_s, history.ended_at) for index in series.index],
        "step": list(series.step),
        "spans": {
            "begin": [each.begin for each in spans],
            "end": [each.end for each in spans],
            "kind": [each.kind.value for each in spans],
        },
    }


def terms_of(run: Run) -> Terms:
    """What the job file states."""
    stated = asdict(run.accepted.spec.report)
    return Terms(**stated)


def _job(run: Run) -> Json:
    newest = max((record.step for record in run.steps), default=None)
    phase = run.changes[-1].phase if run.changes else JobPhase.PENDING
    mesh = dict(run.accepted.spec.mesh.dims)
    return {"name": run.accepted.job, "phase": str(phase), "mesh": mesh, "step": newest}


def _seconds(seconds: Any) -> Json:
    return {
        "useful_s": seconds[Class.USEFUL],
        "unmeasured_s": seconds[Class.RUNNING],
        "badput_s": {name.value: seconds[name] for name in BADPUT},
    }


def incidents_of(incidents: Iterable[Incident]) -> Sequence[Json]:
    return [
        {
            "severity": str(each.severity),
            "kind": each.kind,
            "node": each.node,
            "state": str(each.state),
            "cause": each.cause,
            "action": {"kind": str(each.action.kind)} if each.action else None,
            "fault_at": each.fault_at,
            "first_step_at": each.first_step_at,
            "rework_steps": each.rework_steps,
        }
        for each in sorted(incidents, key=lambda each: each.fault_at)
    ]
