"""A report as one self-contained HTML page: no script, and nothing from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from holdfast.supervisor.report.numbers import Comparison, Faults, Report
from holdfast.supervisor.report.words import MEANING, compared, money, percent, since, span, summary

WIDTH, HEIGHT, BAND, LEFT, BOTTOM = 960, 300, 14, 64, 24
STYLE = """
:root { color-scheme: light dark; --ink: #1b2733; --quiet: #5b6b7b; --line: #dde3ea; --page: #fff; --useful: #2e7d4f;
  --running: #6a8fb5; --startup: #9aa5b1; --detect: #b3261e; --decide: #d2691e; --recover: #e08e0b; --rework: #8e44ad;
  --stall: #3f6fb5; --wait: #6b7480; --degraded: #b59f3b; --other: #bcc5ce; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaf0; --quiet: #9fb0c0; --line: #33404d; --page: #12181f;
  --useful: #57b47e; --detect: #f2776f; --recover: #f0ad3c; --rework: #bf83d8; --stall: #7ba4e0; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.lead { font-size: 1.15rem; } .quiet, figcaption { color: var(--quiet); font-size: .875rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .35rem .6rem .35rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } .n { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; } td:first-child { white-space: nowrap; }
.scroll { overflow-x: auto; margin-bottom: 1.25rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--quiet); }
figure { margin: 0; } .key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 1rem; margin: 1rem 0; }
dt { color: var(--quiet); font-size: .875rem; } dd { margin: 0; font-size: 1.35rem; }
"""


def page(report: Report, timeline: Mapping[str, Any], incidents: Sequence[Mapping[str, Any]], currency: str) -> str:
    """`timeline`, `incidents`: in the form of the API. `currency`: symbol before an amount."""
    parts = [
        f"<h1>{escape(report.job)}</h1>",
        f'<p class="lead">{escape(summary(report, currency))}</p>',
        _facts(report, currency),
        _curve(timeline),
        "<h2>Where the time went</h2>",
        _shares(report, currency),
        "<h2>Faults</h2>",
        _faults("Kind", report.by_kind, report.all_faults, currency),
        _faults("Node", report.by_node, report.all_faults, currency) if report.by_node else "",
        _comparison(report.comparison, currency) if report.comparison else "",
        "<h2>Each fault</h2>" + _each(incidents, report.started_at) if report.all_faults.count else "",
        _method(report),
    ]
    return document(f"{report.job}: report", parts)


def document(title: str, parts: Iterable[str]) -> str:
    """`parts` as one page. `title` is escaped here, `parts` are HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"{''.join(parts)}</main></body></html>\n"
    )


def _facts(report: Report, currency: str) -> str:
    known = [
        ("Goodput", percent(report.goodput)),
        ("Scheduling", percent(report.scheduling)),
        ("Runtime", percent(report.runtime)),
        ("Program (MFU)", percent(report.mfu)),
        ("Of paid node time", percent(report.goodput_paid)),
        ("Step", "not known" if report.step is None else f"{report.step:,}"),
        ("Tokens", f"{report.tokens:,}" if report.tokens else "not reported"),
        ("Cost", "no price given" if report.cost is None else money(report.cost, currency)),
    ]
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in known) + "</dl>"


def _curve(timeline: Mapping[str, Any]) -> str:
    """Draw the step number over time, which falls where steps are repeated, and below it the activity of the job."""
    begin, end = float(timeline["since"]), float(timeline["until"])
    length = max(end - begin, 1e-9)
    steps = timeline["step"]
    top = max(steps, default=0) or 1
    low = min(steps, default=0)
    inner = WIDTH - LEFT - 8

    def x(at: float) -> float:
        return LEFT + inner * (min(max(at, begin), end) - begin) / length

    def y(step: float) -> float:
        return 10 + (HEIGHT - 20) * (1 - (step - low) / max(top - low, 1))

    spans = timeline["spans"]
    band = "".join(
        f'<rect x="{x(b):.1f}" y="{HEIGHT + 6}" width="{max(x(e) - x(b), 0.5):.1f}" height="{BAND}" fill="var(--{k})"/>'
        for b, e, k in zip(spans["begin"], spans["end"], spans["kind"], strict=True)
        if k in MEANING
    )
    line = " ".join(f"{x(at):.1f},{y(step):.1f}" for at, step in zip(timeline["at"], steps, strict=True))
    drawn = (
        f'<polyline points="{line}" fill="none" stroke="var(--useful)" stroke-width="2"/>'
        if steps
        else f'<text x="{LEFT + 12}" y="{HEIGHT / 2}">No step was reported.</text>'
    )
    axis = "".join(
        f'<text x="{LEFT - 8}" y="{y(step) + 4:.0f}" text-anchor="end">{step:,}</text>'
        for step in ([low, top] if steps else [])
    )
    ends = f'<text x="{LEFT}" y="{HEIGHT + BAND + BOTTOM}">0</text>'
    ends += f'<text x="{WIDTH - 8}" y="{HEIGHT + BAND + BOTTOM}" text-anchor="end">{escape(span(end - begin))}</text>'
    keys = " ".join(
        f'<span style="white-space:nowrap"><span class="key" style="background:var(--{kind})"></span>{kind}</span> '
        for kind in MEANING
        if kind in set(spans["kind"])
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT + BAND + BOTTOM + 6}" role="img" '
        f'aria-label="Finished steps over time, and what the job did when">{drawn}{axis}{band}{ends}</svg>'
        f"<figcaption>Finished steps over time. The curve falls where steps are done again. {keys}</figcaption></figure>"
    )


def _shares(report: Report, currency: str) -> str:
    priced = report.cost is not None
    rows = [
        [
            f'<span class="key" style="background:var(--{each.name})"></span>{each.name}',
            escape(MEANING.get(each.name, "")),
            span(each.seconds),
            percent(each.share),
            *([escape(money(each.cost or 0.0, currency))] if priced else []),
        ]
        for each in report.shares
    ]
    return rows_of_table(["Class", "Meaning", "#Time", "#Share", *(["#Cost"] if priced else [])], rows)


def _faults(first: str, groups: Sequence[Faults], everything: Faults, currency: str) -> str:
    if not everything.count:
        bound = span(everything.mtbf_at_least_s or 0.0)
        return f"<p>No fault. MTBF is at least {escape(bound)}, at 95 % confidence.</p>"
    priced = everything.cost is not None
    rows = []
    for each in (*groups, everything):
        rows.append([
            escape(each.name.replace("_", " ") if first == "Kind" else each.name),
            f"{each.count:,}",
            span(each.mtbf_s or 0.0),
            "not known" if each.mttr_s is None else span(each.mttr_s),
            "not known" if each.longest_s is None else span(each.longest_s),
            f"{each.rework_steps:,}",
            *([escape(money(each.cost or 0.0, currency))] if priced else []),
        ])  # fmt: skip
    return rows_of_table(
        [first, "#Faults", "#MTBF", "#MTTR", "#Longest", "#Steps again", *(["#Cost"] if priced else [])], rows
    )


def _comparison(comparison: Comparison, currency: str) -> str:
    return f"<h2>Compared with a restart from the last checkpoint</h2><p>{escape(compared(comparison, currency))}</p>"


def _each(incidents: Iterable[Mapping[str, Any]], started_at: float) -> str:
    rows = []
    for each in incidents:
        done = each["first_step_at"]
        action = each["action"]["kind"].replace("_", " ") if each["action"] else "none"
        rows.append([
            since(each["fault_at"] - started_at),
            escape(each["cause"]),
            escape(action),
            "not over" if done is None else span(max(0.0, done - each["fault_at"])),
            f"{each['rework_steps']:,}",
        ])  # fmt: skip
    return rows_of_table(["At", "Fault", "Action", "#To the next step", "#Steps again"], rows)


def _method(report: Report) -> str:
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.started_at))
    return (
        f'<h2>How it was computed</h2>{notes}<p class="quiet">The run was submitted on {at}. Goodput is scheduling × runtime: '
        "the share of time with nodes, and the share of that in useful steps at the fault-free rate. MTBF is the time with "
        "nodes ÷ faults; without a fault, a third of it is the lower bound at 95 % confidence. MTTR is from the fault to the "
        "first step that every rank has finished. A fault is an incident of severity error or fatal. Costs are those of all "
        "ranks of the full mesh.</p>"
    )


def rows_of_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML. `#` begins the title of a column of numbers."""
    numbers = [name.startswith("#") for name in head]
    titles = "".join(
        f'<th scope="col"{" class=n" if number else ""}>{name.removeprefix("#")}</th>'
        for name, number in zip(head, numbers, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=n' if number else ''}>{cell}</td>" for cell, number in zip(row, numbers, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'
    )
