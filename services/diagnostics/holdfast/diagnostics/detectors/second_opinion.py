"""Reports failed health checks of another tool: a warning for operators, and an explanation if a fault stops the run.

A check must fail `samples` times in a row. The failure ends when the check passes. A check that could not run (`skipped`)
counts neither as failed nor as passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.lasting import Lasting
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.roster import Roster
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import HealthChecks, Verdict

_NODES_MAX = 50_000
_NETWORK = ("nic", "nic_state")


@dataclass(slots=True)
class OpinionState:
    failing: Bounded[str, dict[tuple[str, int], int]] = field(default_factory=lambda: Bounded(_NODES_MAX))
    """Node → (check, GPU) → failures in a row."""
    lasting: Lasting[tuple[str, str, str, int]] = field(default_factory=Lasting)  # by node, tool, check, GPU


@dataclass(frozen=True, slots=True)
class SecondOpinion:
    reads: ClassVar = (HealthChecks,)
    initial = OpinionState
    samples: int = 2  # NVRx counts every NVML error as a failure, also during a reload of the driver

    def observe(self, state: OpinionState, item: Observed, now: float, roster: Roster) -> tuple[OpinionState, Findings]:
        if not isinstance(item, HealthChecks):
            return state, ()
        failing = state.failing.pop(item.node, {})
        findings = list[Finding]()
        for row, key in enumerate(zip(item.check, item.gpu, strict=True)):
            full_key = (item.node, item.tool, *key)
            match item.verdict[row]:
                case Verdict.OK:
                    failing.pop(key, None)
                    findings += state.lasting.over(full_key, now)
                case Verdict.FAILED:
                    failing[key] = failing.get(key, 0) + 1
                    if failing[key] >= self.samples:
                        findings += state.lasting.seen(full_key, now, partial(_finding, item, row, now))
                case Verdict.SKIPPED:
                    pass
        if failing:
            state.failing[item.node] = failing
        return state, tuple(findings)


def _finding(item: HealthChecks, row: int, now: float) -> Finding:
    check, gpu = item.check[row], item.gpu[row]
    subject = item.node if gpu < 0 else f"GPU {gpu} of {item.node}"
    return Finding(
        id=f"second_opinion:{item.node}:{item.tool}:{check}:{gpu}:{item.at:.0f}",
        kind=FindingKind.NETWORK_FAULT if check in _NETWORK else FindingKind.GPU_ERROR,
        severity=Severity.WARNING,
        at=now,
        since=min(item.at, now),
        summary=f"{item.tool} fails its check {check} on {subject}: {item.reason[row] or 'no reason given'}",
        node=item.node,
        gpu=None if gpu < 0 else gpu,
        confidence=0.7,
        evidence={"rule": f"second_opinion {check}", "source": item.tool, "reason": item.reason[row]},
        recommended_actions=(Remedy.WATCH, Remedy.RESET_GPU) if check == "gpu" else (Remedy.WATCH,),
    )
