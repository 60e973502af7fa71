"""Operators' requests about nodes and policies: cordon, uncordon, repaired, restart of an agent, change of a policy."""

from __future__ import annotations

from holdfast.domain.errors import Conflict, NotFound
from holdfast.domain.evolve import evolve
from holdfast.domain.orders import RestartAgent
from holdfast.supervisor.core.fleet import nodes, resets, returns
from holdfast.supervisor.core.handling import job_needs, notices
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.state import State
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import reboots, replacements
from holdfast.supervisor.protocol import (
    AgentRestartRequested,
    NodeCordonRequested,
    NodeRepaired,
    PolicyChanged,
    PolicyChangeRequested,
)


def change_policy(turn: Turn, event: PolicyChangeRequested) -> None:
    """The new policy applies from the next question on. If the job waits because of the old policy's decision, it is asked."""
    job = turn.jobs.get(event.job)
    if job is None or job.phase.finished:
        turn.note(event.job, f"its policy is not changed: the job is {job.phase if job else 'not there'}")
        return
    turn.put_job(job.name, spec=job.spec.with_policy(event.policy))
    turn.publish(PolicyChanged(turn.at, job.name, event.policy))
    job_needs.retry(turn, job.name)


def cordon(turn: Turn, event: NodeCordonRequested) -> None:
    node = turn.nodes.get(event.node)
    if node is None:
        turn.note(event.node, "not cordoned: no such node has ever connected")
    elif event.cordoned:
        reboots.withdraw(turn, node.name)
        replacements.withdraw(turn, node.name)
        nodes.mark_unschedulable(turn, node.name, f"cordoned by an operator: {event.reason}", by_operator=True)
    else:
        reason = f"uncordoned by an operator: {event.reason}"
        due = None if node.reset_due is None else evolve(node.reset_due, failure="")  # the reset may be tried again
        node = turn.put_node(node.name, unschedulable_reason="", quarantined=False, reset_due=due)
        node = returns.forget(turn, node.name)
        reboots.withdraw(turn, node.name)
        notices.forget(turn, node, reason)
        nodes.refresh(turn, node.name, reason)


def check_agent_restart(state: State, event: AgentRestartRequested) -> None:
    """Raises `NotFound` or `Conflict`."""
    node = state.nodes.get(event.node)
    if node is None:
        raise NotFound(f"there is no node {event.node}")
    if not node.connected or node.unheard:
        raise Conflict(f"{event.node} has no session: the order cannot be sent to its agent")
    if not node.facts.restarts:
        raise Conflict(f"the agent of {event.node} does not support this order, or is not a service of its own")
    jobs = sorted({run.job for run in node.workers} | state.live_on(node).keys())
    if jobs:
        raise Conflict(f"{event.node} has workers of {', '.join(jobs)}, which end with its agent; cordon it first")


def restart_agent(turn: Turn, event: AgentRestartRequested) -> None:
    node = turn.nodes.get(event.node)
    if node is None or not node.connected or turn.group(By.HELD, node.name) or node.workers:
        turn.note(event.node, "its agent is not restarted: the node has workers, or no session")
    elif turn.order_to(event.node, RestartAgent) is None:
        turn.send(event.node, RestartAgent(event.reason))


def repaired(turn: Turn, event: NodeRepaired) -> None:
    if event.node not in turn.nodes:
        turn.note(event.node, "not marked as repaired: no such node has ever connected")
        return
    returns.begin_anew(turn, event.node)
    resets.withdraw(turn, event.node)
    reboots.withdraw(turn, event.node)
    nodes.refresh(turn, event.node, "marked as repaired by an operator")
