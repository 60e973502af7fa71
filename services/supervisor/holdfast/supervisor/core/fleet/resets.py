"""Resets of GPUs that must be reset before any rank uses them again, node by node.

    finding ──demand──► due ──no workers left: ResetGpu──► reset, tests passed: in use again
                         ▲                        └──────► failed: out of service until an operator acts

Theory of operation. The demand is part of the node's row. A node with one is unusable: no plan gives it ranks, whatever happens
to the job, the incident or the leader. So no rank can start on a GPU whose demanded reset is not done, without any transition
that enforces it. After every event, `review` ensures that each node with a demand, a session and no workers has an unanswered
`ResetGpu`. It does not matter why its workers have ended: the job waits for the reset (resetting.py), was swapped to another
node, or has ended.

A finding that arrives while an order is unanswered needs another order: the answer may be about a reset before the finding.

A failed reset is not repeated automatically. An operator's `uncordon` tries again; `repair` declares the GPUs good.
"""

from __future__ import annotations

from holdfast.domain import spans
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding, Remedy, Severity
from holdfast.domain.incidents import Action, Incident
from holdfast.domain.orders import OrderDone, ResetGpu
from holdfast.supervisor.core.fleet import nodes, returns
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.state import Node, ResetDue
from holdfast.supervisor.core.model.turn import Turn


def is_demanded_by(finding: Finding) -> bool:
    """Whether the mildest remedy that the finding recommends is a reset: the run has ended, or will end, and a restart on the
    same GPU is no remedy."""
    resets = finding.recommended_actions[:1] == (Remedy.RESET_GPU,)
    return resets and bool(finding.node) and finding.severity is Severity.ERROR


def is_wanted_by(finding: Finding) -> bool:
    """Whether the finding recommends a reset at the job's next checkpoint: until then the run can use the GPU."""
    later = Remedy.RESET_GPU in finding.recommended_actions and finding.severity is Severity.WARNING
    return later and bool(finding.node)


def is_history(node: Node, finding: Finding) -> bool:
    """Whether the GPUs of the node were reset or repaired since the fault."""
    return finding.since < max(node.repaired_at, node.reset_at)


def demand(turn: Turn, node: Node, gpu: int | None, cause: str) -> None:
    """Give the node no ranks until this GPU (None = every GPU of the node) has been reset."""
    due = node.reset_due
    if due is None:
        due = ResetDue(_with(None, gpu), cause)
    else:
        more = _with(due.more, gpu) if turn.order_to(node.name, ResetGpu) is not None else None
        due = evolve(due, gpus=_with(due.gpus, gpu), cause=cause, more=more)
    turn.put_node(node.name, reset_due=due)
    nodes.refresh(turn, node.name, f"a GPU must be reset: {cause}")


def _with(gpus: tuple[int, ...] | None, gpu: int | None) -> tuple[int, ...]:
    """These GPUs (None = none, empty = all of the node) and one more."""
    every = gpu is None or gpus == ()
    return () if every or gpu is None else tuple(sorted({*(gpus or ()), gpu}))


def obstacle(node: Node) -> str:
    """Why the GPUs of the node cannot be reset now, one clause; empty if they can."""
    if node.lost:
        return "the node is lost"
    if node.reset_due is not None and node.reset_due.failure:
        return f"the reset failed: {node.reset_due.failure}"
    if node.unschedulable_reason:
        return f"the node is out of service: {node.unschedulable_reason}"
    return "" if node.facts.resets_gpus else "its agent has no command that resets GPUs"


def is_possible(node: Node) -> bool:
    """Whether its GPUs could be reset if the node were in service."""
    failed = node.reset_due is not None and bool(node.reset_due.failure)
    return not node.lost and not failed and node.facts.resets_gpus


def targets(turn: Turn, job: Job, action: Action, incident: Incident) -> tuple[str, ...]:
    """The job's nodes whose GPUs are reset before its next generation. Nodes that the action names become due now."""
    generation = job.generation
    assert generation is not None
    own = (incident.node,) if incident.node and not turn.members(generation, By.RESET_DUE) else ()
    for name in action.nodes or own:
        node = turn.nodes.get(name)
        is_member = generation.slot_of(name) is not None
        if node is not None and is_member and node.reset_due is None and incident.fault_at >= node.reset_at:
            demand(turn, node, incident.gpu if name == incident.node else None, action.reason)
    return tuple(turn.members(generation, By.RESET_DUE))


def review(turn: Turn) -> None:
    """Send the reset orders that are possible now."""
    for name in turn.found(By.RESET_DUE):
        node = turn.nodes[name]
        due = node.reset_due
        busy = turn.group(By.HELD, name) or node.workers
        if due is None or busy or not node.connected or node.unheard or obstacle(node):
            continue
        if turn.order_to(name, ResetGpu) is None:
            turn.put_node(name, reset_due=evolve(due, more=None))
            concerned = [turn.incidents[each] for each in turn.found(By.STRUCK, name)]
            decided = [incident for incident in concerned if incident.action is not None]
            job, traceparent = (decided[0].job, spans.change_below(decided[0])) if decided else ("", "")
            turn.send(name, ResetGpu(job, due.gpus, turn.config.reset_command_s, traceparent))


def on_answer(turn: Turn, name: str, done: OrderDone) -> None:
    due = turn.nodes[name].reset_due
    if due is None:
        return  # an operator has declared the GPUs good
    if not done.ok:
        fail(turn, name, done.reason)
        return
    if due.more is not None:
        turn.put_node(name, reset_due=evolve(due, gpus=due.more, more=None))
        return
    turn.put_node(name, reset_due=None, reset_at=turn.at)
    turn.note(name, f"its GPUs were reset, and it passed its tests: {done.reason or due.cause}")
    if nodes.job_of(turn, name) is None:  # otherwise its job waits for the reset
        returns.was_reset(turn, name, due.cause)
    nodes.refresh(turn, name, "its GPUs were reset, and it passed its tests")


def fail(turn: Turn, name: str, reason: str) -> None:
    """The reset failed: take the node out of service."""
    due = turn.nodes[name].reset_due
    assert due is not None
    turn.put_node(name, reset_due=evolve(due, failure=reason))
    returns.must_reboot(turn, name, f"GPU reset failed: {reason}")


def withdraw(turn: Turn, name: str) -> None:
    """Withdraw the unanswered reset order, if there is one."""
    if (send := turn.order_to(name, ResetGpu)) is not None:
        turn.forget_order(send)
