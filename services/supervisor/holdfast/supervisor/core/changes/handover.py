"""From PREPARE to the first step of every rank: answers to the orders of a change. Failures during it: `change_failures`."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from holdfast.domain.evolve import evolve
from holdfast.domain.generations import OBJECT_STORE, Generation, Placement
from holdfast.domain.incidents import IncidentState, NodeTiming, RungEnd
from holdfast.domain.nodes import Preflight
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import OrderDone, Prepare, Start, StepReached, Stop
from holdfast.domain.words import plural
from holdfast.supervisor.core import binding, progress
from holdfast.supervisor.core.changes import loans, presence
from holdfast.supervisor.core.changes.change import give_grace, replan, traceparent_of
from holdfast.supervisor.core.fleet import nodes, returns, warmth
from holdfast.supervisor.core.fleet.spares import spares_for
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import CHANGING, Cause, Change, Preparing, Running, Starting
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import suspects
from holdfast.supervisor.core.rules.election import branch
from holdfast.supervisor.core.rules.wording import listed
from holdfast.supervisor.core.saves import pacing, reports, saved
from holdfast.supervisor.protocol import GenerationChanged, GenerationStage, Send
from holdfast.supervisor.timers import (
    FenceOver,
    FirstStepsDue,
    FirstStepTimeout,
    PrepareTimeout,
    ReconnectTimeout,
    SlowStart,
)

T = TypeVar("T")

SHARES_MAX = 16  # nodes whose timings are kept, per half of a change


def on_order_done(turn: Turn, send: Send, done: OrderDone) -> None:
    """Handle the answer to one order, which has left the outbox."""
    if isinstance(send.order, Prepare) and done.tested is not None and done.tested.failures:
        _on_failed_test(turn, send.node, done.tested)
        return
    job = turn.jobs.get(send.order.job)
    if job is None or not isinstance(job.doing, CHANGING):
        return
    doing = job.doing
    match send.order:
        case Start() if not done.ok:
            replan(turn, job.name, f"{send.node} could not start: {done.reason}", exclude=send.node, refused=True)
        case Prepare() if not done.ok:
            _not_prepared(turn, job, send.node, send.order, done)
        case Prepare():
            on_prepared(turn, job.name, [(send.order.placement, done)])
        case Stop() if isinstance(doing, Preparing) and send.command_id in doing.stops:
            if not done.ok:
                why = f"could not stop its workers of {job.name}: {done.reason}"
                returns.did_not_stop(turn, send.node, why)
            stops = {k: v for k, v in doing.stops.items() if k != send.command_id}
            phases_s = _slowest(doing.change.phases_s, [done.phases_s])
            turn.update(job.name, stops=stops, change=evolve(doing.change, phases_s=phases_s))
            start_when_ready(turn, job.name)
        case _:
            pass


def on_prepared(turn: Turn, name: str, answers: Sequence[tuple[Placement, OrderDone]]) -> None:
    """More nodes are prepared. These answers are for the newest change: the orders of an abandoned one are withdrawn."""
    job = turn.jobs.get(name)
    if job is None or not isinstance(job.doing, Preparing):
        return
    preparing, change, master = job.doing, job.doing.change, job.doing.master
    restored_from, restored_bytes = Counter(change.restored_from), Counter(change.restored_bytes)
    # Nearly all of thousands of nodes report the same values: count equal ones together.
    for shards, times in Counter(done.restored_from for _, done in answers).items():
        for source, count in shards:
            restored_from[source] += count * times
    for sizes, times in Counter(done.restored_bytes for _, done in answers).items():
        for source, size in sizes:
            restored_bytes[source] += size * times
    for placement, done in answers:
        if placement.first_rank == 0:
            master = done.master
    change = evolve(
        change,
        phases_s=_slowest(change.phases_s, (done.phases_s for _, done in answers)),
        restored_from=dict(restored_from),
        restored_bytes=dict(restored_bytes),
        shares=_latest(
            change.shares,
            [
                NodeTiming(placement.node, done.at, (), dict(done.phases_s), dict(done.restored_from))
                for placement, done in _last(answers, [done.at for _, done in answers], lambda each: each[0].node)
            ],
        ),
    )
    unprepared = preparing.unprepared - Numbers(placement.slot for placement, _ in answers)
    turn.update(name, change=change, unprepared=unprepared, master=master)
    tests = [(placement.node, done.tested) for placement, done in answers if done.tested is not None]
    suspects.record(turn, change.incidents, tests)
    if not unprepared:
        start_when_ready(turn, name)


def _not_prepared(turn: Turn, job: Job, node: str, order: Prepare, done: OrderDone) -> None:
    """Handle a failed Prepare. If a source of the node's shards failed, elect again; exclude the node only if it is the cause:
    a healthy node must not leave because a copy elsewhere is damaged."""
    if done.unrestorable and saved.sources_changed(turn, order):
        replan(turn, job.name, f"a source of what {node} was to restore has gone: {done.reason}")
    elif done.unrestorable and saved.skip_checkpoint(
        turn, job, node, done.reason, replaceable=bool(spares_for(turn, job))
    ):
        replan(turn, job.name, f"step {order.restore_step} cannot be restored on {node}: {done.reason}")
    else:
        replan(turn, job.name, f"{node} could not prepare: {done.reason}", exclude=node, refused=True)


def _on_failed_test(turn: Turn, node: str, tested: Preflight) -> None:
    """A suspect failed its tests: take it out of service, and replace it in the change in flight."""
    job = nodes.job_of(turn, node)
    change = job.change if job is not None else None
    incidents = change.incidents if change is not None else ()
    suspects.record(turn, incidents, [(node, tested)])
    suspects.condemn(turn, node, tested, incidents)
    if job is not None and change is not None:
        replan(turn, job.name, f"{node} failed its tests: {tested.failures}", exclude=node)


def on_withdrawn_test(turn: Turn, node: str, done: OrderDone) -> None:
    """Handle the test result in an answer to a withdrawn order: it is valid all the same."""
    tested = done.tested
    if tested is not None and tested.failures and not suspects.is_known(turn.nodes[node], tested):
        _on_failed_test(turn, node, tested)


Phases = Iterable[tuple[str, float]]


def _slowest(known: Mapping[str, float], reported: Iterable[Phases]) -> Mapping[str, float]:
    """The longest reported time of each phase."""
    slowest = dict(known)
    for name, seconds in chain.from_iterable(reported):
        if seconds > slowest.get(name, -math.inf):
            slowest[name] = seconds
    return slowest


def _last(reports: Sequence[T], times: Sequence[float], node_of: Callable[[T], str]) -> list[T]:
    """The last ones, latest first. `times`: of each report."""
    earliest = heapq.nlargest(SHARES_MAX, times)[-1]
    # All of thousands of nodes may report the same time: select from the late ones, do not sort them.
    late = ((at, node_of(reports[place]), place) for place, at in enumerate(times) if at >= earliest)
    return [reports[place] for _, _, place in heapq.nlargest(SHARES_MAX, late)]


def _latest(known: tuple[NodeTiming, ...], shares: Iterable[NodeTiming]) -> tuple[NodeTiming, ...]:
    """The timings of the nodes that the others waited for: the last to prepare, and the last to step."""
    both = sorted((*known, *shares), key=_when)
    prepared = [each for each in both if not each.ranks]
    stepped = [each for each in both if each.ranks]
    return (*prepared[-SHARES_MAX:], *stepped[-SHARES_MAX:])


def _when(share: NodeTiming) -> tuple[float, str]:
    return share.at, share.node


def start_when_ready(turn: Turn, name: str) -> None:
    """Send START once no worker of an older generation can run."""
    job = turn.jobs[name]
    doing = job.doing
    if not isinstance(doing, Preparing) or doing.stops or doing.unprepared:
        return
    assert job.generation is not None
    first = job.generation.placements[0].node
    if not doing.master:
        replan(turn, name, f"{first} named no rendezvous endpoint", exclude=first, refused=True)
        return
    if not doing.fenced and _no_node_confirmed_stop(turn, job):
        if FenceOver(name, job.number) in turn.timers:
            return
        turn.note(
            name,
            f"every node of generation {job.running.number if job.running else 0} vanished at once: waiting for one",
        )
        turn.set_timer(FenceOver(name, job.number), turn.at + turn.config.fence_s)
        return
    away = [*turn.members(job.generation, By.AWAY), *turn.members(job.generation, By.GONE)]
    for node in away:  # nothing runs yet, so waiting for it interrupts nothing
        if ReconnectTimeout(name, job.number, node) not in turn.timers:
            give_grace(turn, name, job.number, node)
    if unheard := turn.found(By.UNHEARD):
        # Not only members: an event log that lost its tail may lack workers that others run. `session_s` bounds this.
        noun = "node" if len(unheard) == 1 else "nodes"
        turn.explain(name, f"waits for {noun} {listed(unheard)} to reconnect to this leader")
    if not away and not unheard:
        _start(turn, job, doing)


def _no_node_confirmed_stop(turn: Turn, job: Job) -> bool:
    """Whether no node of the previous generation has confirmed that its workers have ended."""
    running = job.running
    if running is None:
        return False
    live = turn.live.get(job.name, {}).get(running.number, Numbers())
    return all(turn.nodes[node].number in live for node in running.nodes)


def _start(turn: Turn, job: Job, preparing: Preparing) -> None:
    generation, change = job.generation, preparing.change
    assert generation is not None
    reports.settle(turn, job.name)
    if job.running is not None:
        turn.publish(
            GenerationChanged(
                turn.at, job.name, GenerationStage.ENDED, job.running, f"generation {generation.number} takes over"
            )
        )
    order = Start(job.name, generation.number, preparing.master, traceparent_of(turn, change.incidents))
    turn.broadcast(order, generation.placements)
    turn.cancel_timer(PrepareTimeout(job.name, generation.number))
    turn.put_job(
        job.name,
        running=generation,
        membership=evolve(job.membership, running_at=turn.at, finished=Numbers()),
        progress=progress.started(turn, job, generation),
    )
    turn.put_checkpoints(
        job.name,
        lineage=branch(job.checkpoints.lineage, generation.attempt, generation.restore, turn.config.lineage_max),
        step=generation.restore.step,
        saved_at=0.0,
        ever_saved=generation.restore.step > 0,
        at_home={},
    )
    saved.forget_doubts(turn, job.name)
    turn.publish(
        GenerationChanged(turn.at, job.name, GenerationStage.PREPARED, generation, f"rendezvous at {preparing.master}")
    )
    turn.publish(GenerationChanged(turn.at, job.name, GenerationStage.STARTED, generation, generation.restore.reason))
    turn.move(job.name, Cause.START, Starting(change, turn.at), generation.restore.reason)
    for incident in change.incidents:
        if incident in turn.incidents:
            turn.put_incident(
                evolve(
                    turn.incidents[incident],
                    state=IncidentState.STARTING,
                    prepared_at=turn.at,
                    restored_step=generation.restore.step,
                )
            )
    turn.set_timer(FirstStepTimeout(job.name, generation.number), turn.at + progress.start_patience_s(job))
    if progress.start_is_unknown(job):
        turn.set_timer(SlowStart(job.name, generation.number), turn.at + progress.LATER_START_S)
    presence.review_generation(turn, job.name)


def on_started(turn: Turn, name: str, number: int, slots: Iterable[int]) -> None:
    """The ranks of these slots were started, or step: their nodes have carried out `Start`."""
    broadcast = turn.broadcasts.get(name)
    if broadcast is None or not isinstance(broadcast.order, Start) or broadcast.order.generation != number:
        return
    if answered := Numbers(slots) & turn.unanswered[name]:
        turn.answered(name, answered)


def on_ranks_stepping(turn: Turn, name: str, reports: Sequence[binding.FirstSteps]) -> None:
    job = turn.jobs.get(name)
    if job is None or job.generation is None:
        return
    number = job.generation.number
    taken = [each for each in reports if each[1].generation == number]
    on_started(turn, name, number, [placement.slot for _, _, placement in taken if placement is not None])
    if not (taken and isinstance(job.doing, Starting)):
        return
    starting = job.doing
    stepping = Numbers(chain.from_iterable([report.ranks for _, report, _ in taken]))
    if stepping & starting.stepping:  # heartbeats repeat what is not confirmed yet
        taken = [each for each in taken if not all(rank in starting.stepping for rank in each[1].ranks)]
        if not taken:
            return
    # a node's clock may differ from ours, whatever was done about it
    times = [min(max(report.at, starting.started_at), turn.at) for _, report, _ in taken]
    steps = [report.step for _, report, _ in taken]
    change = evolve(
        starting.change,
        phases_s=_slowest(starting.change.phases_s, [report.phases_s for _, report, _ in taken]),
        shares=_latest(
            starting.change.shares,
            [
                NodeTiming(node, report.at, report.ranks, dict(report.phases_s))
                for node, report, _ in _last(taken, times, lambda each: each[0])
            ],
        ),
    )
    starting = evolve(
        starting,
        change=change,
        stepping=starting.stepping | stepping,
        stepped_at=max(starting.stepped_at, *times),
        stepped_to=min(starting.stepped_to or steps[0], *steps),
    )
    turn.put_job(name, doing=starting)
    job = progress.seen(turn, name, max(steps))
    if 0 in steps and not job.progress.reports_no_steps:
        turn.put_progress(name, reports_no_steps=True)
    _complete_if_all_step(turn, job, starting)


def on_ranks_finished(turn: Turn, job: Job) -> None:
    """More ranks of the running generation have ended with exit code 0, maybe before they counted as stepping."""
    if isinstance(job.doing, Starting):
        _complete_if_all_step(turn, job, job.doing)


def _complete_if_all_step(turn: Turn, job: Job, starting: Starting) -> None:
    assert job.generation is not None
    if starting.stepping and len(starting.stepping | job.membership.finished) == job.generation.mesh.world_size:
        _complete(turn, job, starting)


def on_step_reached(turn: Turn, node: str, reached: StepReached) -> None:
    """A node of a running generation reports a finished step: all ranks of the generation took part, connected or not."""
    job = turn.jobs.get(reached.job)
    if job is not None and binding.has_stepped_there(job, node, reached):
        progress.seen(turn, job.name, reached.step)
        # No rank is two steps ahead of another, because each step needs all ranks.
        progress.reached(turn, job.name, reached.step - 1)
        on_sign_of_step(turn, job.name, reached.generation, reached.step - 1)


def on_sign_of_step(turn: Turn, name: str, generation: int, finished: int) -> None:
    """Diagnostics reports that every rank finished step `finished`. It stands in for lost reports of the ranks' first steps."""
    job = turn.jobs.get(name)
    if job is None or not isinstance(job.doing, Starting) or job.number != generation:
        return
    if job.generation is None or finished <= job.generation.restore.step:
        return
    timer = FirstStepsDue(name, job.number)
    if timer not in turn.timers:
        turn.update(name, stepped_at=turn.at)
        turn.set_timer(timer, turn.at + turn.config.stepping_s)


def on_stepping_timer(turn: Turn, name: str, number: int) -> None:
    job = turn.jobs.get(name)
    if job is not None and job.number == number and isinstance(job.doing, Starting):
        _complete(turn, job, job.doing)


def _complete(turn: Turn, job: Job, starting: Starting) -> None:
    """Every rank has stepped: resolve the incidents."""
    generation, change = job.generation, starting.change
    assert generation is not None
    turn.cancel_timer(FirstStepTimeout(job.name, generation.number))
    turn.cancel_timer(SlowStart(job.name, generation.number))
    turn.cancel_timer(FirstStepsDue(job.name, generation.number))
    progress.reached(turn, job.name, starting.stepped_to)
    presence.watch_steps(turn, job.name)
    reports_steps = not turn.jobs[job.name].progress.reports_no_steps
    if reports_steps:
        progress.start_took(turn, job.name, turn.at - starting.started_at)
    seen = "every rank has stepped" if reports_steps else "every rank runs; the script reports no steps"
    turn.publish(GenerationChanged(turn.at, job.name, GenerationStage.STEPPING, generation, seen, reports_steps))
    reason = f"generation {generation.number} on {plural(len(generation.nodes), 'node')}, {generation.mesh}"
    turn.move(job.name, Cause.STEP, Running(), reason)
    pacing.recovered(turn, job.name, starting)
    for incident in change.incidents:
        outcome = _outcome(change, generation, reports_steps=reports_steps)
        turn.close_incident(
            incident,
            IncidentState.RESOLVED,
            outcome,
            rung_end=RungEnd.DONE,
            first_step_at=starting.stepped_at,
            phases_s=change.phases_s,
            restored_from=change.restored_from,
            shares=change.shares,
        )
    loans.settle(turn, turn.jobs[job.name])
    warmth.warm_spares(turn, turn.jobs[job.name])


def _outcome(change: Change, generation: Generation, *, reports_steps: bool) -> str:
    if not reports_steps:
        return f"all ranks of generation {generation.number} run; their script reports no steps"
    return (
        f"generation {generation.number} steps from step {generation.restore.step} on{_resharded(change, generation)}"
    )


def _resharded(change: Change, generation: Generation) -> str:
    """What was read to re-shard the state to another number of replicas; empty if it was not re-sharded."""
    if not change.saved_dp:
        return ""
    names = {"peer": "peers", OBJECT_STORE: "the object store"}
    read = [f"{size / 1e6:.1f} MB from {names.get(source, source)}" for source, size in change.restored_bytes.items()]
    return f", re-sharded from dp {change.saved_dp} to dp {generation.mesh.dp}: read {', '.join(sorted(read))}"
