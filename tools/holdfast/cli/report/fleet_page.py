"""The report of a fleet as one self-contained HTML page: no script, and nothing from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from holdfast.cli.report.page import document, rows_of_table
from holdfast.supervisor.report.words import MEANING, fleet_summary, money, percent, span

Json = Mapping[str, Any]


def fleet_page(report: Json) -> str:
    """`report`: as the API returns it."""
    priced = report["cost"] is not None
    parts = [
        "<h1>Fleet</h1>",
        f'<p class="lead">{escape(fleet_summary(report))}</p>',
        f'<p class="quiet">{_moment(report["since"])} to {_moment(report["until"])}</p>',
        "<h2>Jobs</h2>",
        _jobs(report["jobs"]),
        "<h2>Where the time went</h2>",
        _shares(report["shares"], report["currency"], priced=priced),
        "<h2>Faults</h2>",
        _groups("Kind", report["by_kind"], report["currency"], priced=priced),
        _groups("Node", report["by_node"], report["currency"], priced=priced),
        "".join(f"<p>{escape(note)}</p>" for note in report["notes"]),
        '<p class="quiet">Jobs weigh by the ranks of their full mesh. MTBF is the time with nodes of all jobs ÷ faults, MTTR '
        "the mean time from a fault to the first step that every rank has finished after it.</p>",
    ]
    return document("Fleet: report", parts)


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _jobs(jobs: Sequence[Json]) -> str:
    rows = [
        [
            escape(each["job"]),
            f"{each['ranks']:,}",
            span(each["wall_s"]),
            percent(each["goodput"]),
            f"{each['all_faults']['count']:,}",
            "none" if each["all_faults"]["mttr_s"] is None else span(each["all_faults"]["mttr_s"]),
            "not stated" if each["cost"] is None else escape(money(each["cost"], each["currency"])),
        ]
        for each in jobs
    ]
    head = ["Job", "#Ranks", "#Time", "#Goodput", "#Faults", "#MTTR", "#Cost"]
    return rows_of_table(head, rows) if rows else "<p>No job ran in this time.</p>"


def _shares(shares: Sequence[Json], currency: str, *, priced: bool) -> str:
    rows = [
        [
            f'<span class="key" style="background:var(--{escape(each["name"])})"></span>{escape(each["name"])}',
            escape(MEANING.get(each["name"], "")),
            span(each["seconds"]),
            percent(each["share"]),
            *([escape(money(each["cost"] or 0.0, currency))] if priced else []),
        ]
        for each in shares
    ]
    return rows_of_table(["Class", "Meaning", "#GPU time", "#Share", *(["#Cost"] if priced else [])], rows)


def _groups(first: str, groups: Sequence[Json], currency: str, *, priced: bool) -> str:
    if not groups:
        return "<p>No fault.</p>" if first == "Kind" else ""
    rows = [
        [
            escape(each["name"].replace("_", " ") if first == "Kind" else each["name"]),
            f"{each['count']:,}",
            span(each["mtbf_s"] or 0.0),
            "not known" if each["mttr_s"] is None else span(each["mttr_s"]),
            "not known" if each["longest_s"] is None else span(each["longest_s"]),
            *([escape(money(each["cost"] or 0.0, currency))] if priced else []),
        ]
        for each in groups
    ]
    return rows_of_table([first, "#Faults", "#MTBF", "#MTTR", "#Longest", *(["#Cost"] if priced else [])], rows)
