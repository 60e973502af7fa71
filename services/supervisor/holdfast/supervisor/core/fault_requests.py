"""Faults that somebody injects to test the recovery of a job that allows it. The agent decides the same again."""

from __future__ import annotations

from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.domain.faults import FOR_S_MAX, INJECT_TIMEOUT_S, XID_MAX, FaultKind, require_allowed
from holdfast.domain.orders import Inject, OrderDone
from holdfast.supervisor.core.earlier import Tables
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.protocol import Answer, FaultRequested, JobPhase


def check(state: Tables, event: FaultRequested) -> None:
    """Raises `NotFound`, `Conflict` or `InvalidSpec`, and says why there is no fault."""
    _node_of(state, event)


def _node_of(state: Tables, event: FaultRequested) -> str:
    job = state.jobs.get(event.job)
    if job is None:
        raise NotFound(f"there is no job {event.job}")
    require_allowed(event.job, job.spec.chaos)
    if job.phase is not JobPhase.RUNNING or job.generation is None:
        raise Conflict(f"{event.job} is {job.phase}: faults are injected into a running job only")
    if not 0 < event.for_s <= FOR_S_MAX:
        raise InvalidSpec("for_s", event.for_s, f"more than 0 and at most {FOR_S_MAX:g} s")
    if event.kind is FaultKind.XID and not 1 <= event.xid <= XID_MAX:
        raise InvalidSpec("xid", event.xid, f"1 to {XID_MAX}")
    if not 0 <= event.rank < job.generation.mesh.world_size:
        raise InvalidSpec("rank", event.rank, f"a rank of {event.job}, 0 to {job.generation.mesh.world_size - 1}")
    node = job.generation.node_of(event.rank)
    if not state.nodes[node].connected:
        raise Conflict(f"{node}, which runs rank {event.rank}, is not connected")
    return node


def request(turn: Turn, event: FaultRequested) -> None:
    """Order it; `check` has been passed for this very state."""
    node = _node_of(turn, event)
    turn.send(
        node,
        Inject(
            job=event.job,
            generation=turn.jobs[event.job].number,
            kind=event.kind.value,
            rank=event.rank,
            for_s=event.for_s,
            xid=event.xid,
            not_after=turn.at + INJECT_TIMEOUT_S,
            operation=event.operation,
        ),
    )
    turn.note(event.job, f"a fault is injected: {event.kind} of rank {event.rank} on {node}")


def answered(turn: Turn, node: str, order: Inject, done: OrderDone) -> None:
    if not done.ok:
        turn.note(node, f"did not inject {order.kind} into rank {order.rank} of {order.job}: {done.reason}")
    if order.operation:
        event = FaultRequested(turn.at, order.job, FaultKind(order.kind), order.rank, order.for_s, order.xid)
        reason = done.reason or f"{order.kind} of rank {order.rank} of {order.job} on {node}"
        turn.commands.append(Answer(order.operation, done.ok, reason, event))
