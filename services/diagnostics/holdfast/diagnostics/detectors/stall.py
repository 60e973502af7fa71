"""Draws conclusions from a stall: views of its ranks, the wait-for graph, and the finding with its evidence. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress

from holdfast.diagnostics.detectors.error_class import ErrorClass
from holdfast.diagnostics.detectors.localise import GONE, IDLE, WAITS_FOR_A_THREAD, Diagnosis, RankView, localise
from holdfast.diagnostics.detectors.proof import never_ends, signalled
from holdfast.diagnostics.detectors.waiting import Waiting, find_blocking_ranks
from holdfast.diagnostics.roster import Generation
from holdfast.domain.collectives import CollectiveRows, StallSnapshot
from holdfast.domain.findings import DATED, ESTIMATE, Attribution, Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import RankProgress

_RANKS_IN_EVIDENCE_MAX = 32


@dataclass(frozen=True, slots=True)
class Stall:
    """Facts at the beginning of a stall; a change of any of them ends the stall."""

    began: float
    baseline_at: float
    baseline: dict[str, RankProgress]
    only_stepping: bool
    announced: bool  # a rank is in a phase that the script has announced, and that may be long
    done: bool  # every rank has reported phase `done`


@dataclass(frozen=True, slots=True)
class Evidence:
    """The known facts about a generation's ranks, by node. `ended`: ranks that ended with exit code 0."""

    stall: Stall
    still_since: float  # diagnostics' clock
    reports_progress: bool  # False: the script does not use `holdfast.train`, so its steps are not known
    latest: Mapping[str, RankProgress]
    standing: Mapping[str, StallSnapshot]
    ended: frozenset[int]
    running: int  # number of ranks that have not ended, with those of which nothing is known
    is_starting: bool  # the script uses `holdfast.train`, and no step has finished in this generation


def _views(evidence: Evidence, now: float) -> list[RankView]:
    window_s = now - evidence.stall.baseline_at
    views = []
    for node, item in evidence.latest.items():
        base = evidence.stall.baseline.get(node, item)
        before = dict(zip(base.rank, zip(base.cpu_s, base.process_state, strict=True), strict=True))
        seen = _processes(evidence.standing.get(node))
        for i, rank in enumerate(item.rank):
            if rank in evidence.ended:
                continue
            cpu_before, state_before = before.get(rank, (item.cpu_s[i], item.process_state[i]))
            views.append(
                RankView(
                    rank=rank,
                    node=node,
                    step=item.step[i],
                    phase=item.phase[i],
                    state=item.process_state[i],
                    state_before=state_before,
                    cpu=max(0.0, item.cpu_s[i] - cpu_before) / window_s if window_s > 0 else 0.0,
                    window_s=window_s,
                    collectives=item.collective_seq[i],
                    **seen.get(rank, {}),
                )
            )
    return sorted(views, key=lambda view: view.rank)


def _processes(standing: StallSnapshot | None) -> dict[int, dict[str, str]]:
    if standing is None:
        return {}
    columns = zip(standing.rank, standing.interpreter, standing.kernel, standing.stack, strict=True)
    return {rank: {"interpreter": held, "kernel": where, "stack": stack} for rank, held, where, stack in columns}


def _waiting(evidence: Evidence) -> Waiting | None:
    """Evaluate the wait-for graph over the flight recorders of all nodes."""
    if not any(standing.rows.rank for standing in evidence.standing.values()):
        return None
    unreachable = dict.fromkeys(sorted(evidence.ended), "it has ended")
    for node, item in evidence.latest.items():
        standing = evidence.standing.get(node)
        answered = set() if standing is None else set(compress(standing.rank, standing.answered))
        silent = (rank for rank in item.rank if rank not in answered and rank not in evidence.ended)
        unreachable |= dict.fromkeys(silent, "its flight recorder does not answer")
    messaging = [rank for standing in evidence.standing.values() for rank in _messaging(standing, evidence.latest)]
    rows = [standing.rows for _, standing in sorted(evidence.standing.items())]
    reporting = {rank for item in evidence.latest.values() for rank in item.rank} | evidence.ended
    return find_blocking_ranks(CollectiveRows.of(rows), unreachable, messaging, heard=reporting)


def _messaging(standing: StallSnapshot, latest: Mapping[str, RankProgress]) -> Iterator[int]:
    """Yield ranks that may be waiting for a message that their recorder does not show. They sleep in a kernel function in which
    blocked threads sleep, or in an unknown one, and do not hold the interpreter's lock."""
    progress = latest.get(standing.node)
    states = {} if progress is None else dict(zip(progress.rank, progress.process_state, strict=True))
    columns = zip(standing.rank, standing.messages, standing.interpreter, standing.kernel, strict=True)
    for rank, shown, interpreter, kernel in columns:
        asleep = states.get(rank) == "S" and interpreter != "held"
        if asleep and not shown and (not kernel or kernel.startswith(WAITS_FOR_A_THREAD)):
            yield rank


@dataclass(frozen=True, slots=True)
class Look:
    """The result of the wait-for graph, computed once per stall because the graph may have a million rows."""

    waiting: Waiting | None

    def proof(self, evidence: Evidence, now: float) -> str:
        """Why the stall cannot end by itself; empty if it may end."""
        views = _views(evidence, now)
        if signalled(views):
            return "a process is stopped or has ended"
        return "the others wait for a rank that cannot go on" if never_ends(views, self.waiting, evidence.ended) else ""


@dataclass(frozen=True, slots=True)
class Rule:
    """The allowance that a stall has exceeded."""

    words: str
    still_s: float
    allowance_s: float
    severity: Severity = Severity.ERROR  # WARNING: the stall may end by itself
    look: Look | None = None  # basis of the proof; None: not proven


def look(evidence: Evidence) -> Look:
    """Evaluate the collectives of all ranks."""
    return Look(_waiting(evidence))


def may_compute(evidence: Evidence, now: float) -> bool:
    """Whether this may be an evaluation by all ranks: no rank stands out, no recorder shows a rank that waits, and most ranks
    use CPU time."""
    views, waiting = _views(evidence, now), _waiting(evidence)
    busy = sum(view.cpu > IDLE for view in views)
    return waiting is None and 2 * busy > len(views) and localise(views, evidence.running).rank is None


def report(generation: Generation, evidence: Evidence, rule: Rule, now: float) -> Finding | None:
    """The finding about `generation`; None if none of its ranks is known to run."""
    job, number = generation.job, generation.number
    views = _views(evidence, now)
    if not views:
        return None
    looked = look(evidence) if rule.look is None else rule.look
    diagnosis = localise(views, evidence.running, looked.waiting)
    # Two nodes may report the same rank, if the log has lost an earlier run whose generation had the same number.
    named = [view for view in views if view.rank == diagnosis.rank]
    culprit = min(named, key=lambda view: view.state not in GONE, default=None)
    step = max(view.step for view in views)
    warning = rule.severity is Severity.WARNING
    # A named rank without a report: diagnostics has lost its node, and the supervisor has not, or the generation would be over.
    # Only a proven hang shows that the node does not take part either.
    away = "" if culprit or diagnosis.rank is None or warning else generation.node_of.get(diagnosis.rank, "")
    node = culprit.node if culprit else away
    who = f"rank {diagnosis.rank} on {node}: {diagnosis.reason}" if node else diagnosis.reason
    if evidence.reports_progress:
        what = f"makes no progress for {rule.still_s:.1f} s after step {step}"
        dated = f"{ESTIMATE}the last sign of progress of any rank"
    else:
        what = f"is held up for {rule.still_s:.1f} s (its steps are not known)"
        dated = f"{ESTIMATE}the first report of its process's state"
    may_end = " The hang is not proven: it may be a pause that the script did not announce." if warning else ""
    return Finding(
        id=f"hang:{job}:{number}:{step}" + (":warning" if warning else ""),
        kind=FindingKind.HANG,
        severity=rule.severity,
        at=now,
        since=evidence.still_since,
        summary=f"{job} {what}; {who}.{may_end}",
        node=node,
        job=job,
        generation=number,
        rank=diagnosis.rank,
        confidence=diagnosis.confidence,
        evidence={
            "reason": diagnosis.reason,
            "still_s": f"{rule.still_s:.2f}",
            "allowance_s": f"{rule.allowance_s:.2f}",
            "rule": rule.words,
            **({"step": str(step)} if evidence.reports_progress else {}),
            DATED: dated,
            "ranks": _table(views, diagnosis),
            **({"stack": culprit.stack} if culprit is not None and culprit.stack else {}),
        },
        attribution=Attribution(
            from_outside=diagnosis.stopped,
            error_class=ErrorClass.LEARNED_START if generation.learned_start and evidence.is_starting else "",
        ),
        recommended_actions=_remedies(away=bool(away), warning=warning),
    )


def _remedies(*, away: bool, warning: bool) -> tuple[Remedy, ...]:
    """`away`: the node of the named rank sends nothing, neither to diagnostics nor to the ranks that wait for it."""
    if warning:
        return (Remedy.WATCH,)
    return (Remedy.REPLACE_NODE,) if away else (Remedy.RESTART_PROCESS, Remedy.REPLACE_NODE)


def _table(views: list[RankView], diagnosis: Diagnosis) -> str:
    """The data behind the diagnosis, one rank per line, suspected ranks first."""
    named = {diagnosis.rank, *diagnosis.suspects}
    ordered = sorted(views, key=lambda view: (view.rank not in named, view.rank))
    lines = [
        f"rank {view.rank} {view.node} step {view.step} {view.phase.value} state {view.state or 'gone'}"
        f" cpu {view.cpu:.0%} collectives {view.collectives if view.collectives >= 0 else '?'}"
        for view in ordered[:_RANKS_IN_EVIDENCE_MAX]
    ]
    if len(ordered) > _RANKS_IN_EVIDENCE_MAX:
        lines.append(f"… {len(ordered) - _RANKS_IN_EVIDENCE_MAX} more ranks")
    return "\n".join(lines)
