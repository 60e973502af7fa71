"""Requests to inject faults, which test the recovery of a job that allows it.

The agent of the node checks the request again. A fault of the control plane is not an order: the leader's shell examines the
request before it is folded (`refusal`), and causes the fault after the commit that answers the request.
"""

from __future__ import annotations

from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.domain.faults import CONTROL_PLANE, INJECT_TIMEOUT_S, FaultKind, require_allowed, require_valid
from holdfast.domain.orders import Inject, OrderDone
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.saves.earlier import Tables
from holdfast.supervisor.protocol import Answer, CauseFault, FaultRequested, JobPhase


def check(state: Tables, event: FaultRequested) -> None:
    """Raises `NotFound`, `Conflict` or `InvalidSpec` with the reason if the fault must not be injected."""
    job = _job_of(state, event)
    if event.kind not in CONTROL_PLANE:
        _node_of(state, job, event)
    elif event.refusal:
        raise Conflict(event.refusal)


def _job_of(state: Tables, event: FaultRequested) -> Job:
    job = state.jobs.get(event.job)
    if job is None:
        raise NotFound(f"there is no job {event.job}")
    require_allowed(event.job, job.spec.chaos)
    if job.phase is not JobPhase.RUNNING or job.generation is None:
        raise Conflict(f"{event.job} is {job.phase}: faults are injected into a running job only")
    require_valid(
        event.kind, for_s=event.for_s, xid=event.xid, loss_percent=event.loss_percent, offset_s=event.offset_s
    )
    return job


def _node_of(state: Tables, job: Job, event: FaultRequested) -> str:
    assert job.generation is not None, "a running job has a generation"
    if not 0 <= event.rank < job.generation.mesh.world_size:
        raise InvalidSpec("rank", event.rank, f"a rank of {event.job}, 0 to {job.generation.mesh.world_size - 1}")
    node = job.generation.node_of(event.rank)
    if not state.nodes[node].connected:
        raise Conflict(f"{node}, which runs rank {event.rank}, is not connected")
    return node


def request(turn: Turn, event: FaultRequested) -> None:
    """Order the fault. `check` has succeeded for this state."""
    if event.kind in CONTROL_PLANE:
        _request_own(turn, event)
        return
    node = _node_of(turn, _job_of(turn, event), event)
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
            loss_percent=event.loss_percent,
            offset_s=event.offset_s,
        ),
    )
    turn.note(event.job, f"a fault is injected: {event.kind} of rank {event.rank} on {node}")


def _request_own(turn: Turn, event: FaultRequested) -> None:
    """Answer before the fault happens: a service that it ends could not answer any more."""
    _job_of(turn, event)
    if event.refusal is None:
        raise Conflict(f"this supervisor cannot inject {event.kind}: nothing has examined whether it may")
    if event.refusal:
        raise Conflict(event.refusal)
    turn.note(event.job, f"a fault is injected: {event.kind}")
    turn.commands.append(Answer(event.operation, True, f"{event.kind}, asked for {event.job}, follows at once", event))
    turn.commands.append(CauseFault(event.job, event.kind))


def answered(turn: Turn, node: str, order: Inject, done: OrderDone) -> None:
    if not done.ok:
        turn.note(node, f"did not inject {order.kind} into rank {order.rank} of {order.job}: {done.reason}")
    if order.operation:
        event = FaultRequested(
            turn.at,
            order.job,
            FaultKind(order.kind),
            order.rank,
            order.for_s,
            order.xid,
            loss_percent=order.loss_percent,
            offset_s=order.offset_s,
        )
        reason = done.reason or f"{order.kind} of rank {order.rank} of {order.job} on {node}"
        turn.commands.append(Answer(order.operation, done.ok, reason, event))
