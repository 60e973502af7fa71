"""Reports checkpoints that cannot be made, copied or kept. Agents and replicators report the cause, repeatedly while it lasts.

The finding is a warning: the job is healthy, but its next fault costs more than the checkpoint interval.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from holdfast.diagnostics.detectors.lasting import Lasting
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.roster import Roster
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.replication import TroubleKind
from holdfast.domain.signals import CheckpointTrouble

REASON_CHARS_MAX = 500

_WORDS = {
    TroubleKind.SAVES_MISSED: "Saves of {place} on {node} are missed",
    TroubleKind.TIER_FAILS: "On {node} no shards are copied to {place}",
    TroubleKind.IMAGE_LOCKED: "On {node} the image {place} stays locked",
    TroubleKind.SET_ASIDE: "On {node} a damaged file was renamed, {place}",
    TroubleKind.LEFT_ALONE: "On {node} a file cannot be used, {place}",
}


@dataclass(slots=True)
class CheckpointState:
    # By node, job, kind, place and time, because an agent sends a signal again if the acknowledgement may have been lost.
    reported: Lasting[tuple[str, str, str, str, float]] = field(default_factory=Lasting)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Reports CHECKPOINT."""

    reads: ClassVar = (CheckpointTrouble,)
    initial = CheckpointState

    def observe(
        self, state: CheckpointState, item: Observed, now: float, roster: Roster
    ) -> tuple[CheckpointState, Findings]:
        if not isinstance(item, CheckpointTrouble):
            return state, ()
        key = (item.node, item.job, item.kind, item.place, item.at)
        return state, tuple(state.reported.seen(key, now, partial(_finding, item, now)))


def _finding(item: CheckpointTrouble, now: float) -> Finding:
    words = next((words for kind, words in _WORDS.items() if kind == item.kind), "On {node}: {kind}, {place}")
    trouble = words.format(node=item.node, place=item.place, kind=item.kind)
    return Finding(
        id=f"checkpoint:{item.node}:{item.job}:{item.kind}:{item.place}:{item.at:.0f}",
        kind=FindingKind.CHECKPOINT,
        severity=Severity.WARNING,
        at=now,
        since=min(item.at, now),
        summary=f"{trouble} (job {item.job}): {item.reason[:REASON_CHARS_MAX]}",
        node=item.node,
        job=item.job,
        rank=item.rank,
        evidence={"trouble": item.kind, "place": item.place, "reason": item.reason[:REASON_CHARS_MAX]},
        recommended_actions=(Remedy.WATCH,),
    )
