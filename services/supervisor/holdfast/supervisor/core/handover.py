"""From PREPARE to the first step of every rank: the answers to the orders of a change, and what goes wrong on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from holdfast.domain.findings import DATED, ESTIMATE, Finding, FindingKind, Severity
from holdfast.domain.generations import OBJECT_STORE
from holdfast.domain.incidents import IncidentState, NodeShare
from holdfast.domain.orders import OrderDone, Prepare, RanksStepping, Start, Stop, Warm
from holdfast.supervisor.core import nodes, pacing, progress, reconcile, reports, saved
from holdfast.supervisor.core.change import give_grace, prepare_timeout_s, replan, traceparent_of, wait_for_stop
from holdfast.supervisor.core.evolve import evolve
from holdfast.supervisor.core.index import By
from holdfast.supervisor.core.state import Change, Job, Node
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.core.views import spares_for
from holdfast.supervisor.core.wording import listed
from holdfast.supervisor.election import branch
from holdfast.supervisor.protocol import GenerationChanged, JobPhase, Send

STEPPING_TIMER = "stepping"
SHARES_MAX = 16  # nodes that are remembered of each half of a change

# ---------------------------------------------------------------- answers


def on_order_done(turn: Turn, send: Send, done: OrderDone) -> None:
    """An answer to Prepare, Stop or Start; the order has left the outbox."""
    job = turn.jobs.get(send.order.job)
    if job is None or job.change is None:
        return
    change = job.change
    if send.command_id in change.unstarted:
        if not done.ok:
            replan(turn, job.name, f"{send.node} could not start: {done.reason}", exclude=send.node, refused=True)
            return
        unstarted = {k: v for k, v in change.unstarted.items() if k != send.command_id}
        turn.put_job(job.name, change=evolve(change, unstarted=unstarted))
    elif send.command_id in change.waiting:
        if not done.ok and isinstance(send.order, Prepare):
            _not_prepared(turn, job, send.node, send.order, done)
            return
        if not done.ok:
            nodes.condemn(turn, send.node, f"could not stop its workers of {job.name}: {done.reason}")
        master = (
            done.master if isinstance(send.order, Prepare) and send.order.placement.first_rank == 0 else change.master
        )
        waiting = {k: v for k, v in change.waiting.items() if k != send.command_id}
        phases_s = _slowest(change.phases_s, done.phases_s)
        shares = change.shares
        if isinstance(send.order, Prepare):
            share = NodeShare(send.node, done.at, (), dict(done.phases_s), dict(done.restored_from))
            shares = _latest(shares, share)
        change = evolve(
            change,
            waiting=waiting,
            master=master,
            phases_s=phases_s,
            restored_from=_added(change.restored_from, done.restored_from),
            restored_bytes=_added(change.restored_bytes, done.restored_bytes),
            shares=shares,
        )
        turn.put_job(job.name, change=change)
        start_when_ready(turn, job.name)


def _not_prepared(turn: Turn, job: Job, node: str, order: Prepare, done: OrderDone) -> None:
    """Is it the node, or what it was to restore? A healthy node must not leave because a copy elsewhere has gone bad."""
    if done.unrestorable and saved.sources_changed(turn, order):
        replan(turn, job.name, f"a source of what {node} was to restore has gone: {done.reason}")
    elif done.unrestorable and saved.pass_over(turn, job, node, done.reason):
        replan(turn, job.name, f"step {order.restore_step} cannot be restored on {node}: {done.reason}")
    else:
        replan(turn, job.name, f"{node} could not prepare: {done.reason}", exclude=node, refused=True)


def _added(known: Mapping[str, int], reported: Iterable[tuple[str, int]]) -> dict[str, int]:
    return dict(Counter(known) + Counter(dict(reported)))


def _slowest(known: Mapping[str, float], reported: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The longest that anybody has taken for each phase."""
    return dict(known) | {name: max(seconds, known.get(name, 0.0)) for name, seconds in reported}


def _latest(known: tuple[NodeShare, ...], share: NodeShare) -> tuple[NodeShare, ...]:
    """The shares of those that the others waited for: the last to prepare, and the last to step."""
    alike = [each for each in known if bool(each.ranks) == bool(share.ranks)]
    others = [each for each in known if bool(each.ranks) != bool(share.ranks)]
    alike = sorted((*alike, share), key=lambda each: (each.at, each.node))[-SHARES_MAX:]
    return tuple(sorted((*alike, *others), key=lambda each: (bool(each.ranks), each.at, each.node)))


def start_when_ready(turn: Turn, name: str) -> None:
    """START, once nothing older can run."""
    job = turn.jobs[name]
    change = job.change
    if change is None or change.waiting or change.started_at is not None:
        return
    first = change.generation.placements[0].node
    if not change.master:
        replan(turn, name, f"{first} named no rendezvous endpoint", exclude=first, refused=True)
        return
    if not change.fenced and _nobody_testifies(turn, job):
        if f"fence:{name}:{job.number}" in turn.timers:
            return
        turn.note(
            name,
            f"every node of generation {job.running.number if job.running else 0} vanished at once: waiting for one",
        )
        turn.set_timer(f"fence:{name}:{job.number}", turn.at + turn.config.fence_s)
        return
    away = [node for node in change.generation.nodes if not turn.nodes[node].connected]
    for node in away:  # nothing runs yet that waiting for it, or planning around it, would interrupt
        if f"gone:{name}:{job.number}:{node}" not in turn.timers:
            give_grace(turn, name, job.number, node)
    if unheard := turn.found(By.UNHEARD):
        # Members or not: a log that went back may have forgotten what they run. `session_s` bounds this.
        noun = "node" if len(unheard) == 1 else "nodes"
        turn.set_phase(name, job.phase, f"waits for {noun} {listed(unheard)}, which this leader has not heard yet")
    if not away and not unheard:
        _start(turn, job, change)


def _nobody_testifies(turn: Turn, job: Job) -> bool:
    """Whether no node of the generation that ran has said that its workers are gone."""
    running = job.running
    if running is None:
        return False
    return all(running.number in turn.nodes[node].holds.get(job.name, ()) for node in running.nodes)


def _start(turn: Turn, job: Job, change: Change) -> None:
    generation = change.generation
    reports.settle(turn, job.name)
    if job.running is not None:
        turn.publish(
            GenerationChanged(turn.at, job.name, "ended", job.running, f"generation {generation.number} takes over")
        )
    order = Start(job.name, generation.number, change.master, traceparent_of(turn, change.incidents))
    unstarted = {turn.send(node, order): node for node in generation.nodes}
    turn.cancel_timer(f"prepare:{job.name}:{generation.number}")
    turn.put_job(
        job.name,
        change=evolve(change, started_at=turn.at, unstarted=unstarted),
        running=generation,
        running_at=turn.at,
        lineage=branch(job.lineage, generation.attempt, generation.restore, turn.config.lineage_max),
        step=generation.restore.step,
        checkpoint_step=generation.restore.step,
        saved_at=0.0,
        ever_saved=generation.restore.step > 0,
        blind=False,
        finished=(),
        **progress.started(job, generation),
    )
    saved.forget_doubts(turn, job.name)
    turn.publish(GenerationChanged(turn.at, job.name, "prepared", generation, f"rendezvous at {change.master}"))
    turn.publish(GenerationChanged(turn.at, job.name, "started", generation, generation.restore.reason))
    turn.set_phase(job.name, JobPhase.STARTING, generation.restore.reason)
    for incident in change.incidents:
        if incident in turn.incidents:
            turn.put_incident(
                evolve(
                    turn.incidents[incident],
                    state=IncidentState.STARTING,
                    t_prepared=turn.at,
                    restored_step=generation.restore.step,
                )
            )
    turn.set_timer(f"start:{job.name}:{generation.number}", turn.at + job.spec.limits.first_step_timeout_s)
    reconcile.review_generation(turn, job.name)


def on_ranks_stepping(turn: Turn, node: str, report: RanksStepping) -> None:
    job = turn.jobs.get(report.job)
    if job is None or job.change is None or job.change.started_at is None or report.generation != job.number:
        return
    placement = job.change.generation.placement_of(node)
    if placement is None or not set(report.ranks) <= set(placement.ranks):
        turn.note(node, f"its report about ranks of {job.name} that it does not run is ignored: {report.ranks}")
        return
    share = NodeShare(node, report.at, report.ranks, dict(report.phases_s))
    change = evolve(
        job.change,
        stepping=tuple(sorted({*job.change.stepping, *report.ranks})),
        stepped_at=max(job.change.stepped_at, report.at),
        stepped_to=min(job.change.stepped_to or report.step, report.step),
        phases_s=_slowest(job.change.phases_s, report.phases_s),
        shares=_latest(job.change.shares, share),
    )
    job = turn.put_job(job.name, change=change, blind=job.blind or report.step == 0)
    if len(change.stepping) == change.generation.mesh.world_size:
        _complete(turn, job, change)


def on_sign_of_step(turn: Turn, name: str, generation: int, finished: int) -> None:
    """Every rank has finished step `finished`, others say: should the ranks' own reports have been lost, that will do."""
    job = turn.jobs.get(name)
    if job is None or job.change is None or job.change.started_at is None or job.number != generation:
        return
    if finished <= job.change.generation.restore.step:
        return
    timer = f"{STEPPING_TIMER}:{name}:{job.number}"
    if timer not in turn.timers:
        turn.put_job(name, change=evolve(job.change, stepped_at=turn.at))
        turn.set_timer(timer, turn.at + turn.config.stepping_s)


def on_stepping_timer(turn: Turn, name: str, number: int) -> None:
    job = turn.jobs.get(name)
    if job is None or job.number != number or job.change is None or job.change.started_at is None:
        return
    _complete(turn, job, job.change)


def _complete(turn: Turn, job: Job, change: Change) -> None:
    """Every rank has stepped: the incidents are over."""
    generation = change.generation
    turn.cancel_timer(f"start:{job.name}:{generation.number}")
    turn.cancel_timer(f"{STEPPING_TIMER}:{job.name}:{generation.number}")
    turn.put_job(job.name, change=None)
    progress.reached(turn, job.name, change.stepped_to)
    reconcile.watch_steps(turn, job.name)
    turn.publish(GenerationChanged(turn.at, job.name, "stepping", generation, "every rank has stepped"))
    turn.set_phase(
        job.name,
        JobPhase.RUNNING,
        f"generation {generation.number} on {len(generation.nodes)} nodes, {generation.mesh}",
    )
    pacing.recovered(turn, job.name, change)
    for incident in change.incidents:
        outcome = f"generation {generation.number} steps from step {generation.restore.step} on{_resharded(change)}"
        turn.close_incident(
            incident,
            IncidentState.RESOLVED,
            outcome,
            t_first_step=change.stepped_at,
            phases_s=change.phases_s,
            restored_from=change.restored_from,
            shares=change.shares,
        )
    warm_spares(turn, turn.jobs[job.name])


def _resharded(change: Change) -> str:
    """What had to be read to deal a sharded state to another number of replicas; empty when it was not."""
    if not change.saved_dp:
        return ""
    names = {"peer": "peers", OBJECT_STORE: "the object store"}
    read = [f"{size / 1e6:.1f} MB from {names.get(source, source)}" for source, size in change.restored_bytes.items()]
    return f", re-sharded from dp {change.saved_dp} to dp {change.generation.mesh.dp}: read {', '.join(sorted(read))}"


def warm_spares(turn: Turn, job: Job) -> None:
    """So that a swap does not pay for imports."""
    for spare in spares_for(turn, job):
        node = turn.nodes[spare.node]
        if job.name not in node.warmed:
            # A spare that waits for a year sees many jobs: those that are over are not remembered.
            going_on = (name for name in node.warmed if name in turn.jobs and not turn.jobs[name].phase.finished)
            turn.put_node(spare.node, warmed=(*going_on, job.name))
            turn.send(spare.node, Warm(job.name, job.spec.launch))


# ---------------------------------------------------------------- what goes wrong on the way


def on_node_gone(turn: Turn, name: str, node: str) -> None:
    """A node's session ended while `name` changes: a leaver is not waited for, a member gets a moment to come back."""
    job = turn.jobs[name]
    change = job.change
    if change is None:
        return
    if node in change.generation.nodes:
        if change.started_at is None:
            give_grace(turn, name, job.number, node)
        elif node in change.unstarted.values():
            _watch_start(turn, job, node)
        return
    waiting = {command: other for command, other in change.waiting.items() if other != node}
    if len(waiting) < len(change.waiting):
        turn.put_job(name, change=evolve(change, waiting=waiting))
        start_when_ready(turn, name)


def on_node_back(turn: Turn, name: str, node: str) -> None:
    """A node has a session again that still holds workers of an older generation: they stop before anything starts."""
    job = turn.jobs[name]
    change = job.change
    if change is not None and node in change.generation.nodes:
        return  # it answers its Prepare or Start, which is on its way again
    stays = job.phase is JobPhase.RUNNING or (job.stopping is not None and job.stopping.at_step is not None)
    if job.running is not None and change is None and stays and node in job.running.nodes:
        return  # it never left
    stale = [send for send in turn.orders(node=node, job=name) if isinstance(send.order, Stop)]
    command = (
        stale[-1].command_id if stale else turn.send(node, Stop(name, job.number if change is None else job.number - 1))
    )
    if change is not None and change.started_at is None:
        wait_for_stop(turn, job, command, node)


def on_node_heard(turn: Turn, node: Node) -> None:
    """A node has connected, and what is left on it of other generations has been told to stop: what waited for it goes on.
    `node` is what was known of it before."""
    if node.unheard:
        on_all_heard(turn)
    if not turn.count(By.UNHEARD):
        for job in turn.in_order(turn.found(By.CONCERN, node.name)):
            start_when_ready(turn, job.name)


def on_all_heard(turn: Turn) -> None:
    """Once nobody is left that this leader has not heard, what waited for that goes on: once in a term."""
    if turn.count(By.UNHEARD):
        return
    for job in turn.in_order(name for name, job in turn.jobs.items() if job.change is not None):
        start_when_ready(turn, job.name)


def on_node_restarted(turn: Turn, name: str, node: str) -> None:
    """A new incarnation: the workers that it had prepared are gone, and so are those of a leaver."""
    change = turn.jobs[name].change
    if change is None:
        return
    if node in change.generation.nodes:
        stage = "was prepared" if change.started_at is None else "started"
        replan(turn, name, f"the agent of {node} restarted while the generation {stage}")
    else:
        on_node_gone(turn, name, node)


def _watch_start(turn: Turn, job: Job, node: str) -> None:
    """A member's session ended before it answered its Start. It may have started all the same, and one witness interrupts no
    run: it is planned around when the others see no step for as long as a hang takes."""
    patience_s = reconcile.still_patience_s(turn, job)
    turn.set_timer(f"gone:{job.name}:{job.number}:{node}", turn.at + patience_s)


def on_grace_over(turn: Turn, name: str, number: int, node: str) -> None:
    job = turn.jobs.get(name)
    if job is None or job.number != number or job.change is None or turn.nodes[node].connected:
        return
    if job.change.started_at is None:
        replan(turn, name, f"{node} vanished while the generation was prepared", exclude=node)
    elif node not in job.change.unstarted.values() or job.change.stepping or reconcile.has_stepped(job):
        return  # it has started; from here on its absence is reconcile.py's to judge
    elif reconcile.peers_report_steps(turn, job):
        away_s = turn.at - max(turn.nodes[node].gone_at, turn.led_at)
        why = (
            f"{node} vanished {away_s:.0f} s ago, before it said that its ranks had started, and no node reports a step"
        )
        replan(turn, name, why, exclude=node)
    else:
        _watch_start(turn, job, node)  # nobody can say; the time for the first step bounds this


def on_prepare_timeout(turn: Turn, name: str, number: int) -> None:
    """Members that did not answer in time are planned around; a leaver that did not is out of service."""
    job = turn.jobs.get(name)
    if job is None or job.number != number or job.change is None or job.change.started_at is not None:
        return
    change = job.change
    late = sorted(set(change.waiting.values()))
    seconds = f"{prepare_timeout_s(turn, job, change):g} s"
    for node in late:
        if node not in change.generation.nodes:
            nodes.condemn(turn, node, f"did not stop its workers of {name} within {seconds}")
    members = [node for node in late if node in change.generation.nodes]
    if members:
        turn.put_job(name, change=evolve(change, excluded=(*change.excluded, *members[:-1])))
        alive = any(turn.nodes[node].connected for node in members)
        why = f"{', '.join(members)} did not prepare within {seconds}"
        replan(turn, name, why, exclude=members[-1], refused=alive)
    else:
        turn.put_job(name, change=evolve(change, waiting={}))
        start_when_ready(turn, name)


def on_fence_over(turn: Turn, name: str, number: int) -> None:
    job = turn.jobs.get(name)
    if job is not None and job.number == number and job.change is not None:
        turn.put_job(name, change=evolve(job.change, fenced=True))
        start_when_ready(turn, name)


def ranks_missing(turn: Turn, name: str, number: int) -> Finding | None:
    """The supervisor's own finding: START was sent and not every rank has stepped in time."""
    job = turn.jobs.get(name)
    if job is None or job.number != number or job.change is None or job.change.started_at is None:
        return None
    generation, change = job.change.generation, job.change
    if job.seen_step > generation.restore.step + 1 and turn.at - job.seen_at < job.spec.limits.first_step_timeout_s:
        # A second step needed the first one of every rank: they step, and only the report of it is missing.
        turn.set_timer(f"start:{name}:{number}", turn.at + job.spec.limits.first_step_timeout_s)
        return None
    missing = sorted(set(range(generation.mesh.world_size)) - set(change.stepping))
    where = sorted({generation.node_of(rank) for rank in missing})
    return Finding(
        id=f"ranks-missing:{name}:{number}",
        kind=FindingKind.RANKS_MISSING,
        severity=Severity.ERROR,
        at=turn.at,
        since=job.running_at,
        summary=f"{len(missing)} of {generation.mesh.world_size} ranks finished no step within "
        f"{job.spec.limits.first_step_timeout_s:g} s of the start of generation {number}: "
        f"{listed(missing)} on {', '.join(where[:8])}",
        node=where[0] if len(where) == 1 else "",
        job=name,
        generation=number,
        rank=missing[0] if len(missing) == 1 else None,
        evidence={DATED: f"{ESTIMATE}the start of the generation; when they failed is not known"},
    )
