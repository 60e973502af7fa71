"""Reports of agents: each is bound to its sender (`binding`), and folded once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from holdfast.domain import inventories
from holdfast.domain.orders import (
    CheckLink,
    CheckpointNow,
    FirstStepsRecorded,
    Hello,
    Inject,
    Inventory,
    OrderDone,
    Prepare,
    PrepareTemplate,
    Prune,
    RanksFinished,
    RanksStepping,
    RebootNode,
    Report,
    ResetGpu,
    RestartAgent,
    SaveStage,
    SetInterval,
    Stop,
    Tested,
    WorkersChanged,
)
from holdfast.supervisor.core import binding, fault_requests, progress, sessions
from holdfast.supervisor.core.changes import final_upload, handover, planned, suspension
from holdfast.supervisor.core.fleet import resets
from holdfast.supervisor.core.handling import jobs, reconcile, resetting
from holdfast.supervisor.core.model.present import Unanswered
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import link_tests, reboots
from holdfast.supervisor.core.saves import ordered_saves, reports, retention, saved
from holdfast.supervisor.protocol import NodeReported, RenewSession, SendNotification

R = TypeVar("R", bound=Report)
Received = tuple[str, R, NodeReported]  # node, report, the whole event


def on_reports(turn: Turn, events: Sequence[NodeReported]) -> None:
    """Fold reports that arrived at the same time, in any order of the nodes. The reports of one node are folded in their order.
    Reports of one kind from several nodes are folded together, so that their job is copied only once. First steps in heartbeats
    are confirmed, whatever follows from them."""
    in_beats: dict[tuple[str, int], list[str]] = defaultdict(list)  # (job, generation) → nodes
    for wave in _waves(events):
        by_kind: dict[type[Report], list[Any]] = defaultdict(list)
        stepping: list[NodeReported] = []
        asked: Unanswered | None = None  # of the last answer: nearly all answers are to the same broadcast
        for event in wave:
            report: Report | None = event.report
            if isinstance(report, Hello):
                if isinstance(hello := binding.admit(turn, event), Hello):
                    sessions.hello(turn, event, hello)
                asked = None  # it may have changed the broadcast
            elif not _is_new(turn, event):
                continue
            elif isinstance(report, RanksStepping):
                stepping.append(event)
                if not event.seq:
                    in_beats[report.job, report.generation].append(event.node)
            elif isinstance(report, OrderDone):
                node, command_id = event.node, report.command_id
                slot = None if asked is None else asked.slot_of(node, command_id)
                if slot is None and (found := turn.slot_asked(node, command_id)) is not None:
                    asked, slot = found
                elif slot is None:
                    report = binding.admit(turn, event)
                if report is not None:
                    by_kind[OrderDone].append((node, report, asked, slot))
            elif (report := binding.admit(turn, event)) is not None:
                by_kind[type(report)].append((event.node, report, event))
        if stepping:
            by_kind[RanksStepping] = binding.admit_first_steps(turn, stepping)
        for kind, same in by_kind.items():
            _FOLDED_BY[kind](turn, same)
    for of, nodes_of in sorted(in_beats.items()):
        turn.commands.append(SendNotification(tuple(nodes_of), FirstStepsRecorded(*of)))


def _waves(events: Sequence[NodeReported]) -> list[Sequence[NodeReported]]:
    """Groups of reports: the first of each node, then the second of each node that has one, and so on."""
    if len({event.node for event in events}) == len(events):
        return [events]
    return list(_several_waves(events))


def _several_waves(events: Iterable[NodeReported]) -> list[list[NodeReported]]:
    waves: list[list[NodeReported]] = []
    counts: dict[str, int] = {}
    for event in events:
        place = counts.get(event.node, 0)
        counts[event.node] = place + 1
        if place == len(waves):
            waves.append([])
        waves[place].append(event)
    return waves


def _is_new(turn: Turn, event: NodeReported) -> bool:
    """Whether the report has not been folded yet. Numbers are per session. Reports of an ended incarnation or of an earlier
    session are dropped: the latter were folded before the present session began, or are repeated in it. First steps in a
    heartbeat have no number: they may have been folded."""
    node = turn.nodes.get(event.node)
    if node is None or node.facts.incarnation != event.incarnation:
        return False
    session = event.session
    if session != node.session and sessions.is_earlier(node, session):
        return False
    if not event.seq:
        return isinstance(event.report, RanksStepping)
    if not turn.heard(event.node, event.seq, again=False):
        return False
    if session > node.session and not node.lost:
        # Its Hello was lost. The shell ends such a session within seconds. Until the next one, the node counts as alive.
        turn.put_node(node.name, back_by=turn.at + turn.config.session_s)
    return True


def _orders_done(turn: Turn, answers: Sequence[tuple[str, OrderDone, Unanswered | None, int | None]]) -> None:
    """Fold answers to orders: successful answers to a broadcast together, all others one by one."""
    of_slots: dict[str, dict[int, OrderDone]] = defaultdict(dict)
    others = []
    last, job = None, ""
    is_valid = False  # whether `last` is still true: reports of another kind may have been folded since
    for node, done, asked, slot in answers:
        if asked is not None and asked is not last:
            last, job = asked, asked.broadcast.order.job
            is_valid = turn.broadcasts.get(job) is asked.broadcast and turn.unanswered[job] == asked.left
        if slot is None or not done.ok or not is_valid:
            others.append((node, done))
        else:
            of_slots[job][slot] = done
    for job, of_job in of_slots.items():
        broadcast = turn.broadcasts[job]
        turn.answered(job, of_job)
        if isinstance(broadcast.order, Prepare):
            placed = [(broadcast.placements[slot], done) for slot, done in of_job.items()]
            of_nodes = [(place.node, done) for place, done in placed]
            reconcile.on_prepared(turn, job, broadcast.order.generation, of_nodes)
            handover.on_prepared(turn, job, placed)
    for node, done in others:
        _order_done(turn, node, done)


def _order_done(turn: Turn, node: str, done: OrderDone) -> None:
    send = turn.asked(node, done.command_id)
    if send is None:  # answered before, or withdrawn
        reconcile.on_withdrawn_prepared(turn, node, done)
        handover.on_withdrawn_test(turn, node, done)
        return
    turn.forget_order(send)
    match send.order:
        case Prepare() if done.ok:  # sent by an earlier version, which stored each order of a broadcast
            reconcile.on_prepared(turn, send.order.job, send.order.generation, [(node, done)])
        case Stop() if done.ok:
            turn.end_live(send.order.job, (node,), send.order.generation)
        case RebootNode():
            reboots.on_answer(turn, node, done)
        case RestartAgent():
            turn.note(node, f"its agent {'restarts' if done.ok else f'is not restarted: {done.reason}'}")
        case CheckLink():
            link_tests.on_answer(turn, node, send.order, done)
        case ResetGpu():
            resets.on_answer(turn, node, done)
            resetting.on_answer(turn, node, done)
        case Prune() if not done.ok:
            turn.note(node, f"did not delete saved steps of {send.order.job}: {done.reason}")
        case Inject():
            fault_requests.answered(turn, node, send.order, done)
        case PrepareTemplate() if not done.ok:
            turn.note(node, f"could not prepare a worker template for {send.order.job}: {done.reason}")
        case CheckpointNow(stage=SaveStage.PROPOSED.value):
            ordered_saves.on_answer(turn, send, done)
        case SetInterval():
            ordered_saves.on_interval(turn, send)
        case CheckpointNow() if not done.ok:
            turn.note(
                node, f"could not ask for the save of step {send.order.at_step} of {send.order.job}: {done.reason}"
            )
        case _:
            pass
    handover.on_order_done(turn, send, done)
    jobs.on_stop_answered(turn, done.command_id, send.order.job)


def _workers_changed(turn: Turn, reports_of: Sequence[Received[WorkersChanged]]) -> None:
    for node, report, _ in reports_of:
        reconcile.on_workers(turn, node, report.version, report.workers, report.ended, report.template)


def _ranks_stepping(turn: Turn, all_reports: Sequence[binding.FirstSteps]) -> None:
    by_job: dict[str, list[binding.FirstSteps]] = defaultdict(list)
    for each in all_reports:
        by_job[each[1].job].append(each)
    for job, reports_of in by_job.items():
        handover.on_ranks_stepping(turn, job, reports_of)


def _ranks_finished(turn: Turn, reports_of: Sequence[Received[RanksFinished]]) -> None:
    for _, report, _ in reports_of:
        jobs.on_ranks_finished(turn, report)


def _all_tested(turn: Turn, reports_of: Sequence[Received[Tested]]) -> None:
    for node, report, _ in reports_of:
        sessions.tested(turn, turn.nodes[node], report)


def _inventories(turn: Turn, reports_of: Sequence[Received[Inventory]]) -> None:
    by_job: dict[str, list[tuple[str, Inventory]]] = defaultdict(list)
    known, changed = turn.nodes, []
    for node, report, event in reports_of:
        if (found := _inventory(turn, known[node], event, report)) is not None:
            inventory, values = found
            changed.append((node, values))
            by_job[inventory.job].append((node, inventory))
    turn.put_nodes(changed)
    for name, inventories_of in by_job.items():
        job = turn.jobs.get(name)
        if job is None or job.running is None:
            continue
        step = saved.newest_at_home(turn, name, [(node, each.shards) for node, each in inventories_of])
        if step > job.checkpoints.step:
            newer = {each: slots for each, slots in turn.jobs[name].checkpoints.at_home.items() if each > step}
            turn.put_checkpoints(name, step=step, ever_saved=True, saved_at=turn.at, at_home=newer)
            progress.reached(turn, name, step)
            saved.learn_sharding(turn, name, job.running, step)
            retention.expect(turn, name)
        for _, inventory in inventories_of:
            if inventory.stored:
                saved.learn(turn, name, inventory)
        suspension.learn(turn, name)
        if step > job.checkpoints.step:
            planned.on_saved(turn, name)
            jobs.on_saved(turn, name)
        reports.review(turn, name)
        final_upload.review(turn, name)


def _inventory(
    turn: Turn, node: Node, event: NodeReported, inventory: Inventory
) -> tuple[Inventory, Mapping[str, object]] | None:
    """Return the node's complete inventory, and the fields of the node that change with it. None if the report changes an
    inventory that did not arrive."""
    name = inventory.job
    if inventory.base:
        if node.inventory_from.get(name) != inventory.base:
            reason = f"an inventory of {node.name} changes one that did not arrive; a new session sends all of it"
            turn.commands.append(RenewSession(node.name, event.session, reason))
            return None
        inventory = inventories.changed(node.inventory.get(name, ()), inventory)
    held, of = {**node.inventory, name: inventory.shards}, {**node.inventory_from, name: event.seq}
    if not inventory.shards:
        del held[name], of[name]
    # Reported to the previous leader, but left for this one to fold.
    late = bool(event.session) and event.session == node.stale_session
    due = node.announced or ()
    if name in due and not late:
        due = tuple(job for job in due if job != name)
    stale_until = node.stale_until if late or due else 0.0
    # The number is first: it shows without a comparison that the inventories differ.
    return inventory, {"inventory_from": of, "inventory": held, "announced": due, "stale_until": stale_until}


_FOLDED_BY: Mapping[type[Report], Callable[[Turn, Sequence[Any]], None]] = {
    OrderDone: _orders_done,
    WorkersChanged: _workers_changed,
    RanksStepping: _ranks_stepping,
    RanksFinished: _ranks_finished,
    Inventory: _inventories,
    Tested: _all_tested,
}
if missing := {*get_args(Report)} - {Hello, *_FOLDED_BY}:
    raise TypeError(f"reports that nothing folds: {missing}")
