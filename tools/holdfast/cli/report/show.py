"""Reports as tables in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.cli.tables import Row, console, table
from holdfast.supervisor.report.numbers import Report
from holdfast.supervisor.report.words import compared, fleet_summary, money, percent, span, summary

Json = Mapping[str, Any]
JOBS_SHOWN = 30


def show(made: Report) -> None:
    """Print the report of one job."""
    currency, priced = made.currency, made.cost is not None
    console.print(summary(made, currency))
    parts = [("scheduling", made.scheduling), ("runtime", made.runtime), ("program (MFU)", made.mfu)]
    console.print("goodput: " + " × ".join(f"{name} {percent(share)}" for name, share in parts))
    _shares([asdict(each) for each in made.shares], currency, "time", priced=priced)
    for title, groups in (("by kind", made.by_kind), ("by node", made.by_node)):
        _groups(title, [asdict(each) for each in groups], currency, priced=priced)
    if made.comparison is not None:
        console.print(f"\n{compared(made.comparison, currency)}")
    _notes(made.notes)


def show_fleet(report: Json) -> None:
    """Print the report of all jobs, as the API returns it."""
    currency, priced = report["currency"], report["cost"] is not None
    console.print(fleet_summary(report))
    jobs: list[Row] = [_job(each) for each in report["jobs"][:JOBS_SHOWN]]
    if jobs:
        any_cost = any(each["cost"] is not None for each in report["jobs"])
        columns = ("job", "ranks", "time", "goodput", "faults", "MTBF", "MTTR", *(("cost",) if any_cost else ()))
        console.print(table(jobs, columns))
    if more := len(report["jobs"]) - len(jobs):
        console.print(f"{more} more jobs; --json has all")
    _shares(report["shares"], currency, "GPU time", priced=priced)
    _groups("by kind", report["by_kind"], currency, priced=priced)
    _groups("by node", report["by_node"][:JOBS_SHOWN], currency, priced=priced)
    _notes(report["notes"])


def _job(each: Json) -> Row:
    faults = each["all_faults"]
    return {
        "job": each["job"],
        "ranks": each["ranks"],
        "time": span(each["wall_s"]),
        "goodput": percent(each["goodput"]),
        "faults": faults["count"],
        "MTBF": "" if faults["mtbf_s"] is None else span(faults["mtbf_s"]),
        "MTTR": "" if faults["mttr_s"] is None else span(faults["mttr_s"]),
        "cost": "" if each["cost"] is None else money(each["cost"], each["currency"]),
    }


def _shares(shares: Sequence[Json], currency: str, time: str, *, priced: bool) -> None:
    rows: list[Row] = [
        {
            "class": each["name"],
            time: span(each["seconds"]),
            "share": percent(each["share"]),
            "cost": money(each["cost"] or 0, currency),
        }
        for each in shares
    ]
    if rows:
        console.print(table(rows, ("class", time, "share", *(("cost",) if priced else ()))))


def _groups(title: str, groups: Sequence[Json], currency: str, *, priced: bool) -> None:
    if groups:
        columns = ("name", "faults", "MTBF", "MTTR", "longest", "steps again", *(("cost",) if priced else ()))
        console.print(table([_group(each, currency) for each in groups], columns, title=f"\nfaults {title}"))


def _group(each: Json, currency: str) -> Row:
    return {
        "name": each["name"],
        "faults": each["count"],
        "MTBF": span(each["mtbf_s"] or 0.0),
        "MTTR": "" if each["mttr_s"] is None else span(each["mttr_s"]),
        "longest": "" if each["longest_s"] is None else span(each["longest_s"]),
        "steps again": each["rework_steps"],
        "cost": money(each["cost"] or 0.0, currency),
    }


def _notes(notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"note: {note}")
