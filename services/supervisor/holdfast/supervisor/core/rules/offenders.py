"""Nodes that fail repeatedly: the weight of faults, the limit for an offender, and the comparison of spares. Pure.

Failures of a fleet are not evenly spread. A few nodes ("lemons") have most of them: the top 3 of 63 nodes had more than half
of the exclusions (Lablup), the top tenth of 400 nodes had 41 % of the faults (StepFun), and without its lemons a fleet's large
jobs failed in 4 % instead of 14 % of the cases (Meta). So two questions are answered from a node's own record:

* *Is it an offender?* The sum of its faults, each worth half as much after `half_life_s`, has reached `limit`.
* *Which of two spares is better?* The one with the lower rate of faults. A rate is estimated as the posterior mean of a
  Gamma hazard and Poisson counts, so a node that has been known for an hour is not called perfect, and a node with a
  single fault in a year is not called bad.

Not every fault on a node is the node's. Known errors of the script do not count. Faults that may be the script's count half,
once per job, and not at all if the job had no other node that could have failed. Faults caused from outside (SIGKILL, an
injected fault) do not count. Faults of several nodes within `together_s` (a switch, a power feed, a roll-out) count against
none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.domain.findings import Blamed, Finding, FindingKind, Severity
from holdfast.domain.incidents import Incident
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.return_rules import DAY_S


@dataclass(frozen=True, slots=True)
class Fault:
    """One incident that counts against a node."""

    at: float  # Unix seconds
    incident: str
    job: str
    weight: float  # 0 … 1
    shared: bool = False  # others failed at the same time
    agent_only: bool = False  # its agent restarted, without a reboot of the machine


def weight_when_idle(finding: Finding) -> float:
    """The weight of a finding about a node without ranks, which opens no incident."""
    return 0.0 if finding.attribution.from_outside else 1.0


def weight_of(incident: Incident, rules: OffenderRules, nodes: int = 2) -> float:
    """The weight of an incident against its node: 1 = it is the node's fault, 0 = it is not, or its cause is unknown.

    `nodes`: of the job. A fault that may be the script's does not count against the only node that could have shown it.
    """
    if not incident.node or incident.attribution.from_outside:
        return 0.0
    if incident.planned:  # a node that was swapped for being slow becomes the last choice
        return rules.maybe_weight if incident.warning else 0.0
    if incident.severity == Severity.FATAL:
        return 1.0
    match incident.kind:
        case FindingKind.NODE_LOST | FindingKind.GPU_ERROR | FindingKind.SILENT_CORRUPTION:
            return 1.0
        case FindingKind.WORKER_CRASH | FindingKind.WORKER_EXCEPTION | FindingKind.HANG if (
            nodes == 1 and incident.attribution.blame is not Blamed.HARDWARE
        ):
            return 0.0
        case FindingKind.WORKER_CRASH | FindingKind.WORKER_EXCEPTION:
            known = incident.attribution
            if known.blame is Blamed.HARDWARE:
                return 1.0
            # Without a blame it is a communication error whose root was not found. Nine of ten failures soon after the job's
            # first start are the user's, whatever they look like.
            may_be_node = known.blame is Blamed.UNKNOWN and known.error_class in ("device", "crash")
            doubt = min(1.0, max(0.0, known.prior_user))
            return rules.maybe_weight * (1.0 - doubt) if may_be_node else 0.0
        case FindingKind.HANG if incident.rank is not None:
            return rules.maybe_weight
        case _:
            return 0.0


def added(faults: Sequence[Fault], fault: Fault, rules: OffenderRules) -> tuple[Fault, ...]:
    """The faults with `fault`, which replaces an earlier one of the same incident, and without those that are too old."""
    kept = [each for each in faults if each.incident != fault.incident and fault.at - each.at <= rules.window_s]
    return (*kept, fault)[-rules.kept_max :]


def without(faults: Sequence[Fault], incident: str) -> tuple[Fault, ...]:
    return tuple(each for each in faults if each.incident != incident)


def newest_shared(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Mark the newest fault as shared with other nodes."""
    return (*faults[:-1], replace(faults[-1], shared=True)) if faults else ()


def score(faults: Sequence[Fault], now: float, rules: OffenderRules) -> float:
    """The sum of the faults, weighted by age. Faults that may be the script's count once per job, with the newest one's age."""
    certain = 0.0
    doubtful: dict[str, float] = {}
    for fault in faults:
        if fault.shared or now - fault.at > rules.window_s:
            continue
        value = fault.weight * 0.5 ** ((now - fault.at) / rules.half_life_s)
        if fault.weight >= 1.0:
            certain += value
        else:
            doubtful[fault.job] = max(doubtful.get(fault.job, 0.0), value)
    return certain + sum(doubtful.values())


def rate_per_day(faults: Sequence[Fault], known_since: float, now: float, rules: OffenderRules) -> float:
    """Expected faults a day: (prior + counted) ÷ (prior time + known time), the posterior mean of Gamma and Poisson."""
    counted = 0.0
    for fault in faults:
        if not fault.shared and now - fault.at <= rules.window_s:
            counted += fault.weight
    watched_s = min(max(0.0, now - known_since), rules.window_s)
    return (rules.prior_faults + counted) / (rules.prior_s + watched_s) * DAY_S


def offence(faults: Sequence[Fault], now: float, rules: OffenderRules) -> str:
    """Why the node is an offender, as an English clause; empty if it is not."""
    reached = score(faults, now, rules)
    if reached < rules.limit:
        return ""
    counted = [fault for fault in faults if not fault.shared and now - fault.at <= rules.window_s]
    span_days = (now - counted[0].at) / DAY_S
    names = ", ".join(fault.incident for fault in counted)
    return (
        f"{len(counted)} faults in {span_days:.1f} days ({names}) weigh {reached:.1f}, and {rules.limit:g} is the limit"
    )
