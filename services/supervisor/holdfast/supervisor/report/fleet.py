"""The report of a fleet: the newest runs of all jobs, as far as they lie in a range of time, added up. Pure.

Jobs weigh by their ranks: goodput of the fleet is useful rank-seconds ÷ rank-seconds. MTBF is the time with nodes of all jobs
÷ faults, and `gpu_hours_per_fault` the same in hours of one rank. Amounts are added up only if all jobs with a price have the
same currency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from holdfast.supervisor.report.numbers import DOLLAR, HOUR_S, RULE_OF_THREE, Faults, Report, Share


@dataclass(frozen=True, slots=True)
class FleetReport:
    since: float
    until: float
    jobs: tuple[Report, ...]  # the costliest first: most rank-seconds
    jobs_left_out: int  # more than one answer has
    gpu_hours: Annotated[float, "hours of one rank, of the full meshes"]
    goodput: float | None  # of the jobs whose scripts report steps
    gpu_hours_per_fault: Annotated[float | None, "with nodes; null: no fault"]
    shares: tuple[Share, ...]  # `seconds`: rank-seconds
    all_faults: Faults
    by_kind: tuple[Faults, ...]
    by_node: tuple[Faults, ...]
    cost: Annotated[float | None, "null: no job states a price, or not all in one currency"]
    saved: Annotated[float | None, "against the comparisons that jobs state"]
    currency: str
    notes: tuple[str, ...]


def fleet_report(reports: Iterable[Report], since: float, until: float, left_out: int = 0) -> FleetReport:
    """`reports`: of each job, clipped to the range."""
    jobs = sorted(reports, key=lambda each: (-each.wall_s * each.ranks, each.job))
    priced = [each for each in jobs if each.cost is not None]
    currencies = {each.currency for each in priced}
    one_currency = len(currencies) == 1
    gpu_s = sum(each.wall_s * each.ranks for each in jobs)
    measured = [each for each in jobs if each.goodput is not None]
    measured_s = sum(each.wall_s * each.ranks for each in measured)
    present_s = sum((each.scheduling or 0.0) * each.wall_s for each in jobs)
    present_gpu_s = sum((each.scheduling or 0.0) * each.wall_s * each.ranks for each in jobs)
    count = sum(each.all_faults.count for each in jobs)
    saved = [
        each.comparison.saved for each in jobs if each.comparison is not None and each.comparison.saved is not None
    ]
    return FleetReport(
        since=since,
        until=until,
        jobs=tuple(jobs),
        jobs_left_out=left_out,
        gpu_hours=gpu_s / HOUR_S,
        goodput=sum((each.goodput or 0.0) * each.wall_s * each.ranks for each in measured) / measured_s
        if measured_s
        else None,
        gpu_hours_per_fault=present_gpu_s / HOUR_S / count if count else None,
        shares=_shares(jobs, gpu_s, one_currency=one_currency),
        all_faults=_together("all", [each.all_faults for each in jobs], present_s, one_currency=one_currency),
        by_kind=_grouped(jobs, lambda each: each.by_kind, present_s, one_currency=one_currency),
        by_node=_grouped(jobs, lambda each: each.by_node, present_s, one_currency=one_currency),
        cost=sum(each.cost or 0.0 for each in priced) if one_currency else None,
        saved=sum(saved) if saved and one_currency else None,
        currency=next(iter(currencies)) if one_currency else DOLLAR,
        notes=tuple(_notes(jobs, priced, currencies, measured, left_out)),
    )


def _together(name: str, some: Sequence[Faults], present_s: float, *, one_currency: bool) -> Faults:
    count, repaired = sum(each.count for each in some), sum(each.repaired for each in some)
    repair_s = sum((each.mttr_s or 0.0) * each.repaired for each in some)
    costs = [each.cost for each in some if each.cost is not None]
    return Faults(
        name=name,
        count=count,
        repaired=repaired,
        mtbf_s=present_s / count if count else None,
        mtbf_at_least_s=None if count else present_s / RULE_OF_THREE,
        mttr_s=repair_s / repaired if repaired else None,
        longest_s=max((each.longest_s for each in some if each.longest_s is not None), default=None),
        rework_steps=sum(each.rework_steps for each in some),
        cost=sum(costs) if costs and one_currency else None,
    )


def _grouped(
    jobs: Iterable[Report], groups: Callable[[Report], Iterable[Faults]], present_s: float, *, one_currency: bool
) -> tuple[Faults, ...]:
    """Most faults first."""
    found: dict[str, list[Faults]] = defaultdict(list)
    for each in jobs:
        for faults in groups(each):
            found[faults.name].append(faults)
    joined = [_together(name, some, present_s, one_currency=one_currency) for name, some in found.items()]
    return tuple(sorted(joined, key=lambda each: (-each.count, each.name)))


def _shares(jobs: Iterable[Report], gpu_s: float, *, one_currency: bool) -> tuple[Share, ...]:
    seconds: dict[str, float] = defaultdict(float)
    costs: dict[str, float] = defaultdict(float)
    for job in jobs:
        for each in job.shares:
            seconds[each.name] += each.seconds * job.ranks
            costs[each.name] += each.cost or 0.0
    return tuple(
        Share(name, value, value / gpu_s if gpu_s else 0.0, costs[name] if one_currency else None)
        for name, value in seconds.items()
    )


def _notes(
    jobs: Sequence[Report], priced: Sequence[Report], currencies: set[str], measured: Sequence[Report], left_out: int
) -> Iterable[str]:
    if left_out:
        yield f"{left_out} jobs are left out: the newest {len(jobs)} of the range are here. Choose a shorter range."
    if len(currencies) > 1:
        yield f"Prices are in {', '.join(sorted(currencies))}: amounts are not added up."
    elif priced and len(priced) < len(jobs):
        yield f"{len(jobs) - len(priced)} of {len(jobs)} jobs have no price: amounts are those of the others."
    if measured and len(measured) < len(jobs):
        yield f"{len(jobs) - len(measured)} of {len(jobs)} jobs report no steps: goodput is that of the others."
