"""Compares the workers that should run with those that agents report.

Theory of operation. A finding is an event. If it is lost, late, contradicted or misdated, nothing would ever follow from it.
The workers of a node are a level: an agent reports the whole set at every Hello and whenever it has changed, and each
heartbeat contains the version of the set. So a rank of the running generation without a living worker is noticed however its
end was reported. It becomes a fault by itself if nothing else has explained it in time. A finding is quicker and identifies
the cause, but recovery does not depend on it.

    node reports its workers, connects, disconnects ──► review: does it lack a rank of the running generation?
        yes ──► the job's `absent[node]` = since, timer ──► check: still so after the grace ──► fault, the agent as witness
        no  ──► `absent` without it

A generation whose ranks all live but finish no step is diagnostics' responsibility, because it knows what they do. It becomes a
fault here only if every node could report a step, and none has for twice the longest time that diagnostics needs.

A node without a session reports nothing. It is lost only on the evidence of others. Either the job's other nodes report steps,
and these have stopped since it disconnected; or, if no such node is connected, diagnostics is working and has no step of the
job either. While steps continue, the node takes part in them, whatever its sessions do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.nodes import RunningWorker, TemplateState, WorkerEnded
from holdfast.domain.orders import OrderDone, RanksFinished, Stop
from holdfast.domain.runs import Workers, worker_runs
from holdfast.supervisor.core import progress
from holdfast.supervisor.core.changes import change, presence
from holdfast.supervisor.core.fleet import nodes, warmth
from holdfast.supervisor.core.handling import findings, jobs
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Preparing, Running
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.wording import listed
from holdfast.supervisor.timers import RanksDue, StepDue

# ---------------------------------------------------------------- reports of agents


def on_workers(
    turn: Turn,
    name: str,
    version: int,
    workers: Sequence[RunningWorker],
    ended: tuple[WorkerEnded, ...],
    template: TemplateState | None = None,
) -> None:
    """Fold the complete set of the node's workers, as reported in Hello and whenever it has changed."""
    turn.put_node(name, workers=workers, workers_version=version, ended=ended, workers_at=turn.at)
    stop_orphaned(turn, name, workers)
    _finished(turn, ended)
    review_node(turn, name)
    nodes.refresh(turn, name, "it reported its workers")
    warmth.on_template(turn, name, template)
    warmth.review(turn, name)


def _finished(turn: Turn, ended: tuple[WorkerEnded, ...]) -> None:
    """Count ranks that ended with exit code 0 as finished. They are reported separately, too, but that report may be lost."""
    well: dict[tuple[str, int], list[int]] = {}
    for each in ended:
        job = turn.jobs.get(each.job)
        if each.well and job is not None and each.rank not in job.membership.finished:
            well.setdefault((each.job, each.generation), []).append(each.rank)
    for (job_name, generation), ranks in sorted(well.items()):
        jobs.on_ranks_finished(turn, RanksFinished(job_name, generation, tuple(sorted(ranks)), turn.at))


def on_prepared(turn: Turn, job: str, generation: int, answers: Sequence[tuple[str, OrderDone]]) -> None:
    """These nodes have prepared a generation and have no workers of an older one. An answer contains the node's workers, or the
    complete set is reported a moment later."""
    at, known = turn.at, turn.nodes
    reported: list[tuple[str, Mapping[str, object]]] = []
    for name, done in answers:
        node = known[name]
        if done.workers_version > node.workers_version:
            # The version is first: it shows without a comparison that the workers differ.
            values = {
                "workers_version": done.workers_version,
                "workers": done.workers,
                "ended": (),
                "workers_at": at,
            }
            reported.append((name, values))
        elif not done.workers_version:  # else repeated after a Hello, which is newer
            others = [run for run in worker_runs(node.workers) if run.job != job]
            turn.put_node(name, workers=Workers((*others, *worker_runs(done.workers))))
    turn.put_nodes(reported)
    turn.end_live(job, [name for name, _ in answers], generation - 1)
    _review_nodes(turn, [name for name, _ in reported])


def on_withdrawn_prepared(turn: Turn, name: str, done: OrderDone) -> None:
    """Fold the workers in the answer to a withdrawn order: they exist all the same."""
    node = turn.nodes[name]
    if done.workers_version > node.workers_version:
        on_workers(turn, name, done.workers_version, done.workers, (), node.template)


def stop_orphaned(turn: Turn, name: str, workers: Iterable[RunningWorker]) -> None:
    """Stop workers that belong to no run: of a job that has ended, or of an abandoned generation."""
    newest: dict[str, int] = {}
    for run in worker_runs(workers):
        newest[run.job] = max(run.generation, newest.get(run.job, 0))
    for job, generation in sorted(newest.items()):
        known = turn.jobs.get(job)
        if known is not None and generation > max(known.number, known.numbering.seen):
            turn.put_job(job, numbering=evolve(known.numbering, seen=generation))
        held = turn.generations_on(name, job)
        if generation in held and known is not None and not known.phase.finished:
            continue
        if generation not in held:
            turn.begin_live(job, generation, (name,))
        if known is None:  # unknown is not faulty: this state may be newer than that run
            if generation not in held:
                turn.note(name, f"runs generation {generation} of {job}, which is not known here: left alone")
        elif not any(isinstance(send.order, Stop) for send in turn.orders(node=name, job=job)):
            command = turn.send(name, Stop(job, generation))
            if isinstance(known.doing, Preparing):
                change.wait_for_stop(turn, known, command, name)


# ---------------------------------------------------------------- nodes that lack a rank


def review_node(turn: Turn, name: str) -> None:
    """The node's workers or session have changed. Ranks of a generation that is still being prepared are not missing."""
    for each in turn.found(By.CLAIM, name):
        job = turn.jobs[each]
        if job.running is not None and job.running.number == job.number:
            _review(turn, job, turn.nodes[name])


def _review_nodes(turn: Turn, names: Iterable[str]) -> None:
    """`review_node` of many nodes, nearly all of which have ranks of a single job."""
    claims, jobs, last = turn.groups(By.CLAIM), turn.jobs, ""
    is_started = False  # whether the job `last` runs its newest generation
    for name in names:
        mine = claims.get(name, ())
        if len(mine) == 1:
            [each] = mine
            if each != last:
                last, running = each, jobs[each].running
                is_started = running is not None and running.number == jobs[each].number
            if not is_started:
                continue
        review_node(turn, name)


def _review(turn: Turn, job: Job, node: Node) -> None:
    since = job.membership.absent.get(node.name)
    if not presence.lacks(node, job):
        if since is not None:
            absent = {other: at for other, at in job.membership.absent.items() if other != node.name}
            job = turn.put_membership(job.name, absent=absent)
            if not job.membership.absent:
                turn.cancel_timer(RanksDue(job.name))
        return
    if since is None:
        since = turn.at
        job = turn.put_membership(job.name, absent={**job.membership.absent, node.name: since})
    jobs.on_ranks_missing(turn, job.name)
    timer = RanksDue(job.name)
    due = max(since + presence.patience_s(turn, node.name), turn.at + turn.config.look_again_s)
    if presence.applies(job) and due < turn.timers.get(timer, math.inf):
        turn.set_timer(timer, due)


# ---------------------------------------------------------------- faults


def on_timer(turn: Turn, name: str) -> None:
    """Check the nodes that lack ranks. If nothing else has explained the absence by now, record a fault."""
    job = turn.jobs.get(name)
    if job is None or not presence.applies(job) or not job.membership.absent:
        return
    if not any(not incident.planned for incident in turn.open_incidents(name)):
        gone = {node: ranks for node, ranks in presence.missing(turn, job).items() if _is_due(turn, job, node)}
        if gone:
            findings.record_fault(turn, _ranks_gone(turn, job, gone))
        elif lost := next((node for node in sorted(job.membership.absent) if _is_lost(turn, job, node)), ""):
            findings.confirm_lost(turn, _node_gone(turn, job, lost))
    if name in turn.jobs:
        presence.set_timer(turn, name)


def on_still_timer(turn: Turn, name: str) -> None:
    """All ranks live, as far as is known. Record a fault if they finish no steps."""
    job = turn.jobs.get(name)
    if job is None or not presence.applies(job) or not isinstance(job.doing, Running):
        return
    if job.progress.reports_no_steps:
        presence.watch_steps(turn, name)  # its first step may come late
        return
    assert job.running is not None
    members = [turn.nodes[node] for node in job.running.nodes if node in turn.nodes]
    if not all(node.workers_version for node in members):
        return  # some agents' heartbeats contain no steps: their silence is no evidence
    since = max(job.progress.seen_at, *(node.connected_at for node in members))
    allowance_s = presence.still_s(job)
    if turn.at - since < allowance_s:
        turn.set_timer(StepDue(name), since + allowance_s)
        return
    turn.set_timer(StepDue(name), turn.at + allowance_s)
    faults = [incident for incident in turn.open_incidents(name) if not incident.planned]
    if not faults and not job.membership.absent and not job.membership.finished:
        findings.record_fault(turn, _still(turn, job, since))


def _still(turn: Turn, job: Job, since: float) -> Finding:
    return Finding(
        id=f"still:{job.name}:{job.number}:{job.progress.seen_step}",
        kind=FindingKind.HANG,
        severity=Severity.ERROR,
        at=turn.at,
        since=since,
        summary=f"no rank of {job.name} has finished a step after {job.progress.seen_step} for {turn.at - since:.0f} s, as the "
        "agents of all of its nodes report, and no finding explains it",
        job=job.name,
        generation=job.number,
    )


def _is_due(turn: Turn, job: Job, node: str) -> bool:
    return turn.at - max(job.membership.absent[node], turn.led_at) >= turn.config.missing_s


def _is_lost(turn: Turn, job: Job, name: str) -> bool:
    """Whether a node without a session is lost, on the evidence of other nodes or of diagnostics."""
    node, config = turn.nodes.get(name), turn.config
    assert job.running is not None
    if node is None or node.connected or node.lost:
        return False
    since = max(job.membership.absent[name], turn.led_at)  # no leader received reports before
    away_s, still_s = turn.at - since, turn.at - max(job.progress.seen_at, since)
    if peers_report_steps(turn, job):
        return progress.has_stepped(job) and away_s >= config.away_s and still_s >= still_patience_s(turn, job)
    # No node of the job can report steps. Diagnostics can: it receives steps of other jobs, and none of this one.
    at_work = turn.at - turn.diagnostics_at <= config.diagnostics_s and turn.count(By.CONNECTED) > 0
    return at_work and min(away_s, still_s) >= config.alone_s


def peers_report_steps(turn: Turn, job: Job) -> bool:
    """Whether any node of the running generation has a session and an agent that reports steps in its heartbeats."""
    assert job.running is not None
    peers = (turn.nodes[other] for other in job.running.nodes if other in turn.nodes)
    return any(peer.connected and peer.workers_version for peer in peers)


def still_patience_s(turn: Turn, job: Job) -> float:
    """Time without a reported step after which a member without a session counts as lost, in seconds."""
    return max(turn.config.away_s, job.spec.hang.floor_s, job.spec.hang.factor * job.progress.step_s)


def _ranks_gone(turn: Turn, job: Job, gone: dict[str, tuple[int, ...]]) -> Finding:
    assert job.running is not None
    ranks = sorted(rank for each in gone.values() for rank in each)
    only = next(iter(gone)) if len(gone) == 1 else ""
    how = _how(turn.nodes[only], job, ranks[0]) if len(ranks) == 1 else "have no process"
    since = min(_ended_at(turn.nodes[node], job, job.membership.absent[node]) for node in gone)
    return Finding(
        id=f"ranks-gone:{job.name}:{job.number}",
        kind=FindingKind.RANKS_MISSING,
        severity=Severity.ERROR,
        at=turn.at,
        since=since,
        summary=f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} on {listed(sorted(gone))} {how}: "
        f"{only or f'{len(gone)} agents'} reported it, and no finding explained it within {turn.config.missing_s:g} s",
        node=only,
        job=job.name,
        generation=job.number,
        rank=ranks[0] if len(ranks) == 1 else None,
    )


def _how(node: Node, job: Job, rank: int) -> str:
    for each in node.ended:
        if (each.job, each.generation, each.rank) == (job.name, job.number, rank):
            return each.how
    return "has no process"


def _ended_at(node: Node, job: Job, noticed_at: float) -> float:
    """When the first of the job's ranks on the node ended, by the supervisor's clock. The node reports the age of each end."""
    ages = [
        each.ago_s for each in node.ended if (each.job, each.generation) == (job.name, job.number) and not each.well
    ]
    return min(noticed_at, node.workers_at - max(ages, default=0.0))


def _node_gone(turn: Turn, job: Job, node: str) -> Finding:
    since = job.membership.absent[node]
    return Finding(
        id=f"node-away:{node}:{turn.nodes[node].facts.incarnation}:{turn.nodes[node].session}",
        kind=FindingKind.NODE_LOST,
        severity=Severity.ERROR,
        at=turn.at,
        since=since,
        summary=f"{node} has had no control session for {turn.at - since:.0f} s, and no node of {job.name} has "
        f"finished a step for {turn.at - max(job.progress.seen_at, since):.0f} s",
        node=node,
        job=job.name,
        generation=job.number,
    )
