"""The demo's report.json and the summary in the terminal: incidents with the duration of each phase, and goodput."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.cli.demo.course import BEREFT_JOB, FAULTY_JOB, UNEVEN_JOB, Course, Outcome
from holdfast.domain.errors import HoldfastError
from holdfast.domain.words import plural

BADPUT = ("startup", "detect", "decide", "recover", "rework", "stall", "wait", "degraded", "other")
BAR_CELLS = 30
DAY_S = 86_400.0
FARTHEST = (("object store", "store"), ("peer", "peer"), ("disk", "disk"), ("memory", "memory"))

View = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """Times are seconds since the main job was submitted. The other jobs are None in the short form."""

    faults: int
    wall_s: float
    mesh: dict[str, int]
    steps: dict[str, int]
    goodput: dict[str, float]
    useful_s: float
    badput_s: dict[str, float]
    world_sizes: list[list[float]]
    tokens_per_s: list[list[float]]
    incidents: list[dict[str, Any]]
    slow_rank: dict[str, Any] | None
    both_copies_lost: dict[str, Any] | None
    user_bug: dict[str, Any] | None
    losses: dict[str, float]
    failures: list[str]

    @classmethod
    def of(cls, course: Course, outcome: Outcome, reference: Mapping[int, float]) -> Self:
        goodput = outcome.goodput
        zero = float(goodput["started_at"])
        failures = list(outcome.failures)
        if set(outcome.losses) != set(reference):
            failures.append(
                f"losses: {len(outcome.losses)} steps were logged, {len(reference)} in the reference run; expected the same"
            )
        common = sorted(set(outcome.losses) & set(reference))
        if not common:
            raise HoldfastError(
                "the demo's job and the reference run logged no common step, so there is nothing to report; see the logs"
            )
        losses = {
            "final": outcome.losses[common[-1]],
            "reference_final": reference[common[-1]],
            "max_abs_diff": max(abs(outcome.losses[step] - reference[step]) for step in common),
        }
        return cls(
            faults=course.faults,
            wall_s=goodput["wall_s"],
            mesh=dict(outcome.job["mesh"]),
            steps={"target": outcome.target, "reached": outcome.job["step"], "rework": goodput["rework_steps"]},
            goodput={"job": goodput["goodput_job"], "paid": goodput["goodput_paid"]},
            useful_s=goodput["useful_s"],
            badput_s={name: goodput["badput_s"][name] for name in BADPUT},
            world_sizes=[list(point) for point in goodput["world_sizes"]],
            tokens_per_s=[list(point) for point in goodput["tokens_per_s"]],
            incidents=[_incident(incident, zero) for incident in outcome.incidents],
            slow_rank=_other_job(outcome, UNEVEN_JOB, zero, "step"),
            both_copies_lost=_other_job(outcome, BEREFT_JOB, zero, "step"),
            user_bug=_other_job(outcome, FAULTY_JOB, zero, "phase", "reason", "generation"),
            losses=losses,
            failures=failures,
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def _other_job(outcome: Outcome, name: str, zero: float, *what: str) -> dict[str, Any] | None:
    if name not in outcome.others:
        return None
    job, incidents = outcome.others[name]
    # The number of tries is the job's generation.
    return {{"generation": "tries"}.get(each, each): job[each] for each in what} | {
        "incidents": [_incident(incident, zero) for incident in incidents]
    }


def _incident(incident: View, zero: float) -> dict[str, Any]:
    action = incident.get("action") or {}

    def since(name: str) -> float | None:
        return None if incident.get(name) is None else round(incident[name] - zero, 4)

    return {
        "id": incident["id"],
        "kind": incident["kind"],
        "cause": incident["cause"],
        "node": incident.get("node"),
        "rank": incident.get("rank"),
        "action": action.get("kind"),
        "reason": action.get("reason"),
        "decided_by": incident.get("decided_by"),
        "generation": incident["generation"],
        "fault_at_s": since("fault_at"),
        "detected_at_s": since("detected_at"),
        "decided_at_s": since("decided_at"),
        "prepared_at_s": since("prepared_at"),
        "first_step_at_s": since("first_step_at"),
        "rework_steps": incident.get("rework_steps", 0),
        "restored_from": incident["restored_from"],
        "outcome": incident["outcome"],
        "trace_id": incident.get("trace_id"),
        "cost_share": incident.get("cost_share"),
        "walk": _walk(incident, zero),
    }


def _walk(incident: View, zero: float) -> list[dict[str, Any]]:
    """Return the rungs that were tried, in order. An action without fallbacks is the only rung of its walk."""
    action = incident.get("action")
    rungs = incident.get("walk") or []
    if not rungs and action is not None:
        over = incident.get("first_step_at")
        end = "done" if over is not None or incident.get("state") == "resolved" else None
        times = {"began_at": incident.get("decided_at"), "ended_at": over}
        rungs = [{"action": action["kind"], "end": end, "reason": action["reason"], "why": "", **times}]
    return [
        {
            "action": rung["action"],
            "began_s": None if rung["began_at"] is None else round(rung["began_at"] - zero, 4),
            "ended_s": None if rung["ended_at"] is None else round(rung["ended_at"] - zero, 4),
            "end": rung["end"],
            "reason": rung["reason"],
            "why": rung["why"],
        }
        for rung in rungs
    ]


def print_tables(console: Console, report: Report) -> None:
    console.print()
    console.print(_incidents_table(report))
    for incident in report.incidents:
        _, comma, resharded = incident["outcome"].partition(", re-sharded ")
        if comma:
            console.print(f"{incident['action']}: re-sharded {escape(resharded)}")
    console.print(f"\n[bold]Where the {report.wall_s:.1f} s of the main job went[/]")
    console.print(_goodput_table(report))


def print_summary(console: Console, report: Report, out: Path, picture: str) -> None:
    """Print the summary in five lines, after the unexpected results. `picture`: where it is, or why there is none."""
    console.print()
    for failure in report.failures:
        console.print(f"[bold red]FAILED:[/] {escape(failure)}")
    if report.failures:
        verb = "is" if len(report.failures) == 1 else "are"
        what = f"{plural(len(report.failures), 'result')} of {report.faults} faults {verb} not as expected"
        console.print(f"[bold red]{what}[/]")
    else:
        console.print(f"[bold green]all {report.faults} faults were detected, attributed and recovered as expected[/]")
    pauses = [
        each["first_step_at_s"] - each["fault_at_s"] for each in report.incidents if each["first_step_at_s"] is not None
    ]
    console.print(
        f"from a fault to the first step after it: median {median(pauses):.2f} s, longest {max(pauses):.2f} s, in the main job"
        if pauses
        else "no fault of the main job was followed by a step"
    )
    console.print(
        f"steps {report.steps['reached']}/{report.steps['target']}, {report.steps['rework']} repeated; "
        f"loss {report.losses['final']:.4f}, without faults {report.losses['reference_final']:.4f} "
        f"(largest difference at any step {report.losses['max_abs_diff']:.2g})"
    )
    console.print(f"[bold]goodput {report.goodput['job']:.1%}[/]{_explained(report)}", soft_wrap=True)
    console.print(
        f"[bold]{out / 'report.json'}[/]   [bold]{escape(picture)}[/]   logs in {out / 'stack'}", soft_wrap=True
    )


def _explained(report: Report) -> str:
    """Explain the low goodput of the demo, and compute from this run the goodput at a realistic rate of faults."""
    if not report.incidents:
        return ""
    start_s = report.badput_s["startup"]
    cost_s = (report.wall_s - report.useful_s - start_s) / len(report.incidents)
    return (
        f": of {report.wall_s:.0f} s the start took {start_s:.0f} s, and {plural(len(report.incidents), 'incident')} cost "
        f"{cost_s:.1f} s each; with one a day it would be {1 - cost_s / DAY_S:.3%}"
    )


def _incidents_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
    table.title, table.title_justify = "Incidents (seconds)", "left"
    for column in ("kind", "where", "action"):
        table.add_column(column, no_wrap=True)
    for column in ("detect", "decide", "prepare", "first step", "total", "repeated"):
        table.add_column(column, justify="right", min_width=5)
    table.add_column("from", no_wrap=True)
    others = (
        (report.slow_rank, slice(-1, None)),
        (report.both_copies_lost, slice(1)),
        (report.user_bug, slice(-1, None)),
    )
    shown = [incident for job, which in others if job is not None for incident in job["incidents"][which]]
    for incident in [*report.incidents, *shown]:
        who = f"rank {incident['rank']}" if incident["rank"] is not None else incident["node"] or "–"
        times = [incident[f"{name}_at_s"] for name in ("fault", "detected", "decided", "prepared", "first_step")]
        cells = [_difference(late, early) for early, late in pairwise(times)]
        table.add_row(
            incident["kind"],
            who,
            incident["action"] or "–",
            *cells,
            _difference(times[-1], times[0]),
            str(incident["rework_steps"]),
            next((short for source, short in FARTHEST if source in incident["restored_from"]), "–"),
        )
    return table


def _difference(late: float | None, early: float | None) -> str:
    return "–" if late is None or early is None else f"{late - early:.2f}"


def _goodput_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, seconds in (("useful", report.useful_s), *report.badput_s.items()):
        cells = round(BAR_CELLS * seconds / report.wall_s)
        table.add_row(name, f"{seconds:.2f} s", f"[{'green' if name == 'useful' else 'red'}]{'█' * cells}[/]")
    return table
