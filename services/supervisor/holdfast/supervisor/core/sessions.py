"""Control sessions of agents: they begin with a Hello, and end. The reports that arrive in them: `node_reports`."""

from __future__ import annotations

from holdfast.domain.findings import DATED, ESTIMATE, Finding, FindingKind, Severity
from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import (
    Hello,
    Inject,
    OrderDone,
    Prune,
    RebootNode,
    ResetGpu,
    Stop,
    Tested,
)
from holdfast.supervisor.core import fault_requests
from holdfast.supervisor.core.fleet import breaker, nodes, resets, returns, warmth
from holdfast.supervisor.core.handling import change_failures, findings, jobs, notices, reconcile
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.lifecycle import Stopping
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import link_tests, reboots
from holdfast.supervisor.core.saves import saved
from holdfast.supervisor.protocol import JobPhase, NodeChanged, NodeGone, NodeReported
from holdfast.supervisor.timers import LostTimeout, WitnessTimeout


def hello(turn: Turn, event: NodeReported, hello: Hello) -> None:
    facts = hello.facts
    node = turn.nodes.get(facts.node)
    if node is None:
        turn.add_node(
            Node(
                facts,
                True,
                NodeState.SPARE,
                event.session,
                turn.at,
                announced=_announced(hello),
                known_since=turn.at,
                preflight=hello.preflight,
            )
        )
        turn.heard(facts.node, event.seq)
        turn.publish(NodeChanged(turn.at, facts.node, NodeState.SPARE, "", f"connected from {facts.hostname}"))
        _workers_of(turn, hello)
    elif node.facts.incarnation == facts.incarnation:
        # A later session numbers its reports from the start: numbers of an earlier session do not apply to it.
        is_repeat = event.session <= node.session and event.seq <= turn.last_seq(node)
        if is_repeat or _is_over(node, event.session) or is_earlier(node, event.session):
            return
        _reconnected(turn, node, event, hello)
        if hello.preflight is not None:
            tested(turn, node, Tested(hello.preflight))
        _workers_of(turn, hello)
        change_failures.on_node_heard(turn, node)
    elif _is_over(node, event.session) or is_earlier(node, event.session):
        return  # a late report of an earlier incarnation
    else:
        _restarted(turn, node, event, hello)
        _workers_of(turn, hello)
        change_failures.on_node_heard(turn, node)
    if facts.tests_links:
        link_tests.expect(turn)


def _workers_of(turn: Turn, hello: Hello) -> None:
    reconcile.on_workers(turn, hello.facts.node, hello.workers_version, hello.running, hello.ended, hello.template)


def _announced(hello: Hello) -> tuple[str, ...] | None:
    return hello.announced.jobs if hello.announced is not None else None


def _is_over(node: Node, session: int) -> bool:
    return bool(session) and not node.connected and session <= node.session


def is_earlier(node: Node, session: int) -> bool:
    """Whether the node has sent a Hello in a newer session since."""
    return 0 < session < node.session


def _reconnected(turn: Turn, node: Node, event: NodeReported, hello: Hello) -> None:
    """The same incarnation has a new session; its workers may still run."""
    was_lost, announced = node.lost, _announced(hello)
    held = node.inventory
    if announced is not None:
        held = {job: shards for job, shards in held.items() if job in announced}
    turn.heard(node.name, event.seq)
    turn.put_node(
        node.name,
        facts=hello.facts,
        connected=True,
        unheard=False,
        session=event.session,
        connected_at=turn.at,
        lost=False,
        inventory=held,
        inventory_from={},  # the first inventory of a session is complete
        announced=announced,
        # It may have saved without a session, and reports that next.
        stale_until=0.0 if announced == () else turn.at + turn.config.inventory_s,
        stale_session=node.session,
    )
    turn.cancel_timer(LostTimeout(node.name))
    if was_lost or not node.connected:
        findings.node_came_back(turn, node.name)
    returns.review(turn, node.name)
    nodes.refresh(turn, node.name, "its control session is back")
    _resend(turn, node.name)
    for job in turn.found(By.HELD, node.name):
        if job in turn.jobs:
            change_failures.on_node_back(turn, job, node.name)


def _restarted(turn: Turn, node: Node, event: NodeReported, hello: Hello) -> None:
    """A new incarnation: every worker and every order of the previous one ended with it."""
    facts = hello.facts
    for send in turn.orders(node=node.name):
        if not (
            isinstance(send.order, Prune | ResetGpu | RebootNode)
            or (isinstance(send.order, Stop) and (send.order.ended or send.order.forget))
        ):
            turn.forget_order(send)
            if isinstance(send.order, Inject):
                why = "its agent restarted before it answered"
                fault_requests.answered(turn, node.name, send.order, OrderDone(send.command_id, ok=False, reason=why))
    job = nodes.job_of(turn, node.name)
    ran = job is not None and job.running is not None and job.running.number in turn.generations_on(node.name, job.name)
    booted = "" not in (facts.boot_id, node.facts.boot_id) and facts.boot_id != node.facts.boot_id
    is_other = "" not in (facts.machine_id, node.facts.machine_id) and facts.machine_id != node.facts.machine_id
    turn.heard(node.name, event.seq)
    turn.put_node(
        node.name,
        facts=facts,
        connected=True,
        unheard=False,
        session=event.session,
        connected_at=turn.at,
        booted_at=turn.at if booted else node.booted_at,
        lost=False,
        inventory={},
        inventory_from={},
        announced=_announced(hello),
        stale_until=0.0,
        warmed=(),
        suspicion=None,
        preflight=hello.preflight,
        workers=(),
        workers_version=0,
        ended=(),
        template=None,
    )
    for each in turn.found(By.HELD, node.name):
        turn.end_live(each, (node.name,))
    if job is not None:
        saved.newest_at_home(turn, job.name, [(node.name, ())])
    turn.cancel_timer(LostTimeout(node.name))
    turn.cancel_timer(WitnessTimeout(node.name))
    if booted or is_other:
        resets.withdraw(turn, node.name)  # their answers would be about the previous boot
        reboots.withdraw(turn, node.name)
    if is_other:
        returns.on_other_machine(turn, node.name)
    returns.on_restart(turn, node.name, booted=booted)
    returns.review(turn, node.name)
    nodes.refresh(turn, node.name, _how_it_came(is_other=is_other, booted=booted))
    notices.on_agent_restarted(turn, node.name)
    _resend(turn, node.name)
    for other in turn.concerned(node.name):
        change_failures.on_node_restarted(turn, other.name, node.name)
        _answer_stops(turn, other.name, node.name)
    if job is not None and ran and turn.jobs[job.name].change is None and job.phase is JobPhase.RUNNING:
        finding = _restart_finding(turn, node, job.name, job.number)
        findings.record_fault(turn, finding)
        if booted and not is_other:
            returns.failed_under_ranks(turn, node.name, finding.summary)
    if not node.asked_to_end:
        breaker.count_agent_restart(turn, node.name)


def _how_it_came(*, is_other: bool, booted: bool) -> str:
    if is_other:
        return "it has another machine than before"
    return "its machine was booted again" if booted else "its agent started again"


def _restart_finding(turn: Turn, node: Node, job: str, generation: int) -> Finding:
    return Finding(
        id=f"agent-restarted:{node.name}:{node.facts.incarnation}",
        kind=FindingKind.NODE_LOST,
        severity=Severity.ERROR,
        at=turn.at,
        since=node.gone_at if not node.connected else turn.at,
        summary=f"the agent of {node.name} started again: its workers ended with the old one",
        node=node.name,
        job=job,
        generation=generation,
        evidence={DATED: ESTIMATE + ("when its new agent connected" if node.connected else "the end of its session")},
    )


def _resend(turn: Turn, node: str) -> None:
    turn.commands.extend(turn.orders(node=node))


def on_gone(turn: Turn, event: NodeGone) -> None:
    """The control session ended. That alone is not a fault: the run may be healthy."""
    node = turn.nodes.get(event.node)
    if node is None or node.facts.incarnation != event.incarnation:
        return
    if event.session and event.session < node.session:
        return  # an older session than the node's present one
    if node.connected:
        disconnect(turn, node, renewed=event.renewed)
    elif event.renewed:  # its Hello was lost, so it was connected until now
        turn.put_node(node.name, back_by=turn.at + turn.config.session_s)


def disconnect(turn: Turn, node: Node, *, renewed: bool = False) -> None:
    back_by = turn.at + turn.config.session_s if renewed else 0.0
    turn.put_node(node.name, connected=False, unheard=False, gone_at=turn.at, back_by=back_by)
    reconcile.review_node(turn, node.name)
    if node.suspicion is not None and turn.at - node.suspicion.at <= node.suspicion.ttl_s:
        if turn.at - node.suspicion.at <= turn.config.witness_s:
            findings.confirm_lost(turn, node.suspicion)
        else:  # an old suspicion: give the node time to reconnect
            turn.set_timer(WitnessTimeout(node.name), turn.at + turn.config.witness_s)
    if nodes.job_of(turn, node.name) is None:
        turn.set_timer(LostTimeout(node.name), turn.at + turn.config.lost_after_s)
    for job in turn.concerned(node.name):
        change_failures.on_node_gone(turn, job.name, node.name)
        _answer_stops(turn, job.name, node.name)
    for name in turn.found(By.CLAIM, node.name):
        jobs.on_node_gone(turn, name)
    if node.unheard:
        change_failures.on_all_heard(turn)


def _answer_stops(turn: Turn, job: str, node: str) -> None:
    """Count an operator's Stop order as answered if its node has no session."""
    doing = turn.jobs[job].doing
    for command, name in sorted(doing.stops.items() if isinstance(doing, Stopping) else ()):
        if name == node:
            jobs.on_stop_answered(turn, command, job)


def on_witness_timer(turn: Turn, name: str) -> None:
    node = turn.nodes.get(name)
    if node is None or node.suspicion is None:
        return
    if not node.connected:
        findings.confirm_lost(turn, node.suspicion)
    else:
        turn.judge(node.suspicion, "contradicted: its control session is still alive, so the node is not lost")


def on_lost_timer(turn: Turn, name: str) -> None:
    """A node without ranks has had no session for `lost_after_s`."""
    node = turn.nodes.get(name)
    if node is not None and not node.connected and nodes.job_of(turn, name) is None:
        turn.put_node(name, lost=True)
        nodes.refresh(turn, name, f"no control session for {turn.config.lost_after_s:g} s")
        for job in turn.found(By.WANTS_NODES):  # a job that cannot start without it gives this reason
            turn.touch(job)
        nodes.forget_old_lost(turn)


def on_sessions_timer(turn: Turn, epoch: int, known_before: float) -> None:
    """The time to reconnect to a new leader is over: nodes that have sent no Hello have no session."""
    for node in (turn.nodes[name] for name in turn.found(By.CONNECTED)):
        if node.connected_at < known_before:
            turn.note(node.name, f"did not reconnect to the supervisor of leader epoch {epoch}")
            disconnect(turn, node, renewed=node.back_by > turn.at)


def tested(turn: Turn, node: Node, tested: Tested) -> None:
    """A node reported its pre-flight test. While it is idle, the result decides whether it may get ranks."""
    turn.put_node(node.name, preflight=tested.preflight)
    returns.tested(turn, node.name)
    unfit = turn.nodes[node.name].unfit
    nodes.refresh(turn, node.name, f"failed its pre-flight: {unfit}" if unfit else "passed its pre-flight")
    warmth.review(turn, node.name)
