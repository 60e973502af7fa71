"""Failures during a change: nodes that leave, restart or do not answer, and ranks that do not step."""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import DATED, ESTIMATE, Finding, FindingKind, Severity
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Start, Stop
from holdfast.supervisor.core import progress
from holdfast.supervisor.core.changes import handover
from holdfast.supervisor.core.changes.change import give_grace, prepare_timeout_s, replan, wait_for_stop
from holdfast.supervisor.core.fleet import returns
from holdfast.supervisor.core.handling import reconcile
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import CHANGING, Preparing, Running, Saving, Starting
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.wording import listed
from holdfast.supervisor.timers import FirstStepTimeout, ReconnectTimeout


def on_node_gone(turn: Turn, name: str, node: str) -> None:
    """A node's session ended while `name` changes. Do not wait for a leaving node; give a member time to reconnect."""
    job = turn.jobs[name]
    doing = job.doing
    if not isinstance(doing, CHANGING):
        return
    if _is_member(job, node):
        if isinstance(doing, Preparing):
            give_grace(turn, name, job.number, node)
        elif _has_unanswered_start(turn, job, node):
            _watch_start(turn, job, node)
        return
    if isinstance(doing, Preparing):
        stops = {command: other for command, other in doing.stops.items() if other != node}
        if len(stops) < len(doing.stops):
            turn.update(name, stops=stops)
            handover.start_when_ready(turn, name)


def on_node_back(turn: Turn, name: str, node: str) -> None:
    """A node that may have workers of an older generation has a session again: stop them before anything starts."""
    job = turn.jobs[name]
    change = job.change
    if change is not None and _is_member(job, node):
        return  # its Prepare or Start is sent again, and it answers that
    stays = isinstance(job.doing, Running | Saving)
    if job.running is not None and stays and job.running.slot_of(node) is not None:
        return  # it never left
    stale = [send for send in turn.orders(node=node, job=name) if isinstance(send.order, Stop)]
    command = (
        stale[-1].command_id if stale else turn.send(node, Stop(name, job.number if change is None else job.number - 1))
    )
    if isinstance(job.doing, Preparing):
        wait_for_stop(turn, job, command, node)


def on_node_heard(turn: Turn, node: Node) -> None:
    """A node has connected, and its workers of other generations have been ordered to stop. Continue the changes that waited
    for it. `node` is its state before."""
    if node.unheard:
        on_all_heard(turn)
    if not turn.count(By.UNHEARD):
        for job in turn.concerned(node.name):
            handover.start_when_ready(turn, job.name)


def on_all_heard(turn: Turn) -> None:
    """Continue the changes that waited until every node had connected to this leader. Happens once in a term."""
    if turn.count(By.UNHEARD):
        return
    for job in turn.in_order(name for name, job in turn.jobs.items() if job.change is not None):
        handover.start_when_ready(turn, job.name)


def on_node_restarted(turn: Turn, name: str, node: str) -> None:
    """A new incarnation: its prepared workers have ended, and so have those of a leaving node."""
    job = turn.jobs[name]
    if job.change is None:
        return
    if _is_member(job, node):
        stage = "was prepared" if isinstance(job.doing, Preparing) else "started"
        replan(turn, name, f"the agent of {node} restarted while the generation {stage}")
    else:
        on_node_gone(turn, name, node)


def _is_member(job: Job, node: str) -> bool:
    return job.generation is not None and job.generation.slot_of(node) is not None


def _has_unanswered_start(turn: Turn, job: Job, node: str) -> bool:
    return any(isinstance(send.order, Start) for send in turn.orders(node=node, job=job.name))


def _watch_start(turn: Turn, job: Job, node: str) -> None:
    """A member's session ended before it answered its Start. It may have started, and one witness interrupts no run. The change
    is planned around it only if no other node reports a step for as long as a hang takes."""
    patience_s = reconcile.still_patience_s(turn, job)
    turn.set_timer(ReconnectTimeout(job.name, job.number, node), turn.at + patience_s)


def on_grace_over(turn: Turn, name: str, number: int, node: str) -> None:
    job = turn.jobs.get(name)
    if job is None or job.number != number or not isinstance(job.doing, CHANGING) or turn.nodes[node].connected:
        return
    if isinstance(job.doing, Preparing):
        replan(turn, name, f"{node} vanished while the generation was prepared", exclude=node)
    elif not _has_unanswered_start(turn, job, node) or job.doing.stepping or progress.has_stepped(job):
        return  # it has started; reconcile.py handles its absence from here on
    elif reconcile.peers_report_steps(turn, job):
        away_s = turn.at - max(turn.nodes[node].gone_at, turn.led_at)
        why = f"{node} was lost {away_s:.0f} s ago, before it reported that its ranks had started, and no node reports a step"
        replan(turn, name, why, exclude=node)
    else:
        _watch_start(turn, job, node)  # unknown; the time limit of the first step bounds this


def on_prepare_timeout(turn: Turn, name: str, number: int) -> None:
    """Plan around members that did not answer in time. Take leaving nodes that did not answer out of service."""
    job = turn.jobs.get(name)
    if job is None or job.number != number or not isinstance(job.doing, Preparing):
        return
    preparing, change, generation = job.doing, job.doing.change, job.generation
    assert generation is not None
    unprepared = {generation.placements[slot].node for slot in preparing.unprepared}
    late = sorted(unprepared.union(preparing.stops.values()))
    seconds = f"{prepare_timeout_s(turn, job, change):g} s"
    for node in late:
        if generation.slot_of(node) is None:
            returns.did_not_stop(turn, node, f"did not stop its workers of {name} within {seconds}")
    members = [node for node in late if generation.slot_of(node) is not None]
    if members:
        turn.update(name, change=evolve(change, excluded=(*change.excluded, *members[:-1])))
        # If some have prepared, the script is not the cause: the others are retried without limit.
        all_late = len(members) == len(generation.placements) and any(turn.nodes[node].connected for node in members)
        why = f"{', '.join(members)} did not prepare within {seconds}"
        replan(turn, name, why, exclude=members[-1], refused=all_late)
    else:
        turn.update(name, stops={})
        handover.start_when_ready(turn, name)


def on_fence_over(turn: Turn, name: str, number: int) -> None:
    job = turn.jobs.get(name)
    if job is not None and job.number == number and isinstance(job.doing, Preparing):
        turn.update(name, fenced=True)
        handover.start_when_ready(turn, name)


def ranks_missing(turn: Turn, name: str, number: int) -> Finding | None:
    """The supervisor's own finding: START was sent, and not every rank has stepped in time."""
    job = turn.jobs.get(name)
    if job is None or job.number != number or not isinstance(job.doing, Starting):
        return None
    generation = job.generation
    assert generation is not None
    patience_s = progress.start_patience_s(job)
    if job.progress.seen_step > generation.restore.step + 1 and turn.at - job.progress.seen_at < patience_s:
        # A second step needs every rank's first one. So all ranks step, and only a report is missing.
        turn.set_timer(FirstStepTimeout(name, number), turn.at + patience_s)
        return None
    return _without_a_step(turn, job, job.doing, patience_s)


def on_slow_start(turn: Turn, name: str, number: int) -> None:
    """Publish that a job that has never stepped takes long to start. It may index its data or compile, so it goes on."""
    job = turn.jobs.get(name)
    if job is not None and job.number == number and isinstance(job.doing, Starting):
        found = _without_a_step(turn, job, job.doing, progress.LATER_START_S)
        limit_s = progress.start_patience_s(job)
        turn.judge(
            evolve(found, id=f"slow-start:{name}:{number}", severity=Severity.WARNING),
            f"recorded: the job has never stepped, so nobody knows how long its start takes; it has {limit_s:g} s",
        )


def _without_a_step(turn: Turn, job: Job, starting: Starting, within_s: float) -> Finding:
    generation = job.generation
    assert generation is not None
    missing = list(Numbers.below(generation.mesh.world_size) - starting.stepping - job.membership.finished)
    where = sorted({generation.node_of(rank) for rank in missing})
    return Finding(
        id=f"ranks-missing:{job.name}:{generation.number}",
        kind=FindingKind.RANKS_MISSING,
        severity=Severity.ERROR,
        at=turn.at,
        since=job.membership.running_at,
        summary=f"{len(missing)} of {generation.mesh.world_size} ranks finished no step within {within_s:g} s of the start of "
        f"generation {generation.number}: {listed(missing)} on {', '.join(where[:8])}",
        node=where[0] if len(where) == 1 else "",
        job=job.name,
        generation=generation.number,
        rank=missing[0] if len(missing) == 1 else None,
        evidence={DATED: f"{ESTIMATE}the start of the generation; when they failed is not known"},
    )
