"""Amounts, times and shares of a report in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.domain.words import plural
from holdfast.supervisor.report.numbers import Comparison, Report

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0

MEANING = {
    "useful": "new steps at the fault-free rate",
    "running": "all ranks run; the script reports no steps",
    "startup": "before the first step",
    "detect": "from a fault to its finding",
    "decide": "from the finding to the decision",
    "recover": "from the decision to the next step",
    "rework": "steps done again",
    "stall": "copying checkpoints",
    "wait": "no nodes to run on",
    "degraded": "fewer replicas than the full mesh",
    "other": "none of these: slow steps, evaluation, data",
}


def span(seconds: float) -> str:
    """A length of time with two or three digits: `0.42 s`, `3.5 min`, `6.1 h`, `12 d`."""
    for unit, length in (("d", DAY_S), ("h", HOUR_S), ("min", MINUTE_S)):
        if seconds >= 2 * length:
            value = seconds / length
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2f} s"


def since(seconds: float) -> str:
    """A moment after the start: `2 d 03:07:41`."""
    days, rest = divmod(max(0, round(seconds)), round(DAY_S))
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days} d {clock}" if days else clock


def percent(share: float | None) -> str:
    """More digits the nearer it is to all."""
    if share is None:
        return "not known"
    return f"{100 * share:.2f} %" if share > 0.95 else f"{100 * share:.1f} %"


def money(amount: float, currency: str) -> str:
    return f"{currency}{amount:,.0f}" if abs(amount) >= 100 else f"{currency}{amount:,.2f}"


def fleet_summary(report: Mapping[str, Any]) -> str:
    """One paragraph about a fleet. `report`: as the API returns it."""
    jobs, faults = report["jobs"], report["all_faults"]
    said = [f"{plural(len(jobs), 'job')}, {report['gpu_hours']:,.1f} GPU-hours"]
    said[0] += "." if report["cost"] is None else f", {money(report['cost'], report['currency'])}."
    if report["goodput"] is not None:
        said.append(f"{percent(report['goodput'])} of the GPU time was useful work.")
    if faults["count"]:
        each = f"{plural(faults['count'], 'fault')}, one in {report['gpu_hours_per_fault']:,.1f} GPU-hours"
        mttr_s = faults["mttr_s"]
        said.append(each + ("." if mttr_s is None else f"; training went on after {span(mttr_s)} on average."))
    elif jobs:
        said.append("No fault.")
    if report["saved"] is not None:
        more_or_less = "less" if report["saved"] >= 0 else "more"
        amount = money(abs(report["saved"]), report["currency"])
        said.append(f"Recovery cost {amount} {more_or_less} than the restarts that the jobs state to compare with.")
    return " ".join(said)


def compared(other: Comparison, currency: str) -> str:
    """The assumption and its result."""
    said = [
        f"Assumed: each of {other.faults:,} repaired faults takes a restart of {span(other.restart_s)}, and loses half of the "
        f"{span(other.checkpoint_every_s)} between checkpoints: {span(other.seconds)} of the whole job. They took "
        f"{span(other.actual_s)}, with the steps done again at their mean length"
    ]
    if other.saved is not None:
        more_or_less = "less" if other.saved >= 0 else "more"
        said[0] += f": {money(abs(other.saved), currency)} {more_or_less}"
    said[0] += "."
    if other.left_out:
        said.append(f"{other.left_out:,} that are not over, or ended the job, are left out.")
    return " ".join(said)


def summary(report: Report, currency: str) -> str:
    """One paragraph for who reads nothing else."""
    faults = report.all_faults
    said = [f"{span(report.wall_s)} on {report.ranks:,} ranks"]
    said[0] += "." if report.cost is None else f", {money(report.cost, currency)}."
    if report.goodput is not None:
        said.append(f"{percent(report.goodput)} of the time was useful work.")
    if not faults.count:
        said.append(f"No fault; MTBF is at least {span(faults.mtbf_at_least_s or 0.0)} (95 % confidence).")
    else:
        count = "One fault" if faults.count == 1 else f"{faults.count:,} faults"
        said.append(f"{count}, one in {span(faults.mtbf_s or 0.0)}")
        said[-1] += "." if faults.mttr_s is None else f"; training went on after {span(faults.mttr_s)} on average."
    return " ".join(said)
