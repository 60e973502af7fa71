"""The two-phase change from one generation to the next.

    begin ──plan, elect──► PREPARING ──every Prepare and Stop answered──► STARTING ──every rank stepped──► RUNNING
      │                       │  a node fails or vanishes: plan around it    │  not in time: a ranks_missing incident
      └──no plan──► hold      └───────────────► begin ◄──────────────────────┘

**Nothing runs two generations.** `Start` goes out only after every connected node that may have workers of an older generation
has answered that they are gone: members by `Prepare`, leavers by `Stop`. A lost node cannot be asked. It need not be: a step
needs every rank, so a generation of which one rank is known to have stopped can never finish a step again, wherever its other
workers hang; and what they might still save is on a branch that no election considers. Only when *all* nodes of a generation
vanished at once nobody can testify. Then the change waits `fence_s` for one of them to come back, and after that relies on the
branch alone (docs/adr/0007).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.generations import Generation, Placement, RestorePoint, ShardSource
from holdfast.domain.incidents import Action, Incident, IncidentState
from holdfast.domain.orders import OrderDone, Prepare, RanksStepping, Start, Stop, Warm
from holdfast.supervisor.core import breaker, nodes
from holdfast.supervisor.core.state import Blocked, Change, Job
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.core.views import options, plan_for, reachable, spares_for
from holdfast.supervisor.election import Election, Holder, branch, elect
from holdfast.supervisor.planner import Plan, Unplannable, peers
from holdfast.supervisor.protocol import GenerationChanged, JobPhase, Send

RETRY_S = 10.0  # a job that could not be prepared on the nodes there are is tried again after this long


# ---------------------------------------------------------------- begin


def begin(turn: Turn, name: str, action: Action, incident: Incident) -> None:
    """Carry out a decided action, or say what stands in the way."""
    job = turn.jobs[name]
    _go(turn, job, plan_for(turn, job, action, incident), action.reason)


def replan(turn: Turn, name: str, why: str, exclude: str = "") -> None:
    """The change in flight cannot succeed as it is: the best that today's nodes allow, without `exclude`."""
    job = turn.jobs[name]
    assert job.change is not None
    turn.note(name, f"generation {job.number} is planned again: {why}")
    if exclude:
        job = turn.put_job(name, change=replace(job.change, excluded=(*job.change.excluded, exclude)))
    resume(turn, name, why)


def resume(turn: Turn, name: str, why: str) -> None:
    """A change was given up: begin the best one that today's nodes allow."""
    job = turn.jobs[name]
    _go(turn, job, reachable(turn, job, max(job.target_dp, job.spec.min_dp), job.spec.min_dp), why)


def first_start(turn: Turn, name: str, *, degraded: bool) -> bool:
    """Start a job that has never run, when there are nodes for it. `degraded`: with fewer replicas than it wants, too."""
    job = turn.jobs[name]
    outcome = reachable(turn, job, job.target_dp, job.spec.min_dp if degraded else job.target_dp)
    if isinstance(outcome, Unplannable):
        turn.set_phase(name, JobPhase.PENDING, outcome.reason)
        return False
    _launch(turn, job, outcome, Election(RestorePoint()))
    return True


def _go(turn: Turn, job: Job, outcome: Plan | Unplannable, why: str) -> None:
    if isinstance(outcome, Unplannable):
        hold(turn, job.name, f"{outcome.reason} ({why})", retry=bool(job.change and job.change.excluded))
        return
    if late := _inventories_due(turn, job):
        reason = f"{', '.join(late)} just connected: what they have saved is not known yet"
        _defer(turn, job, reason, turn.at + turn.config.inventory_s)
        return
    election = elect(job.lineage, _holders(turn, job), outcome.mesh, outcome.placements)
    if election.restore.step == 0 and _much_to_lose(job):
        since = job.blocked.since if job.blocked else turn.at
        if turn.at < since + turn.config.scratch_s:
            reason = f"saved steps exist, but none is complete on the nodes at hand ({election.restore.reason})"
            _defer(turn, job, reason, since + turn.config.scratch_s)
            return
        turn.note(
            job.name, f"starts again from step 0 after waiting {turn.config.scratch_s:.0f} s: {election.restore.reason}"
        )
    _launch(turn, job, outcome, election)


def _much_to_lose(job: Job) -> bool:
    """Whether a start from step 0 would cost more than an ordinary loss: then it is worth waiting for lost holders."""
    return job.ever_saved and job.best_step > 2 * job.spec.checkpoint.interval_steps


def _inventories_due(turn: Turn, job: Job) -> list[str]:
    """Nodes that may hold shards and have not said so, while it is worth waiting for them."""
    if not job.ever_saved:
        return []
    return sorted(
        node.name
        for node in turn.nodes.values()
        if node.connected
        and node.facts.replicator_endpoint
        and not node.inventoried
        and turn.at < node.connected_at + turn.config.inventory_s
    )


def knows_enough(turn: Turn, job: Job) -> bool:
    """Whether a job that waits for news of saved shards has them."""
    if _inventories_due(turn, job):
        return False
    running = job.running
    return running is None or elect(job.lineage, _holders(turn, job), running.mesh, running.placements).restore.step > 0


def _holders(turn: Turn, job: Job) -> list[Holder]:
    return [
        Holder(node.name, node.facts.replicator_endpoint, node.facts.zone, node.inventory.get(job.name, ()))
        for node in turn.nodes.values()
        if node.connected and node.facts.replicator_endpoint
    ]


def _launch(turn: Turn, job: Job, chosen: Plan, election: Election) -> None:
    """Write the new generation down and send Prepare to its nodes and Stop to those that leave."""
    before = job.generation.nodes if job.generation else ()
    excluded = job.change.excluded if job.change else ()
    abandon(turn, job.name)
    number = job.number + 1
    generation = Generation(number, job.attempt_base + number, chosen.mesh, chosen.placements, election.restore)
    incidents = tuple(incident.id for incident in turn.open_incidents(job.name) if incident.action is not None)
    traceparent = _traceparent(turn, incidents)
    copies = peers(chosen.placements, {node: turn.nodes[node].facts.zone for node in chosen.nodes})
    waiting = {}
    for placement in chosen.placements:
        prepare = _prepare(turn, job, generation, placement, election, copies[placement.node], traceparent)
        waiting[turn.send(placement.node, prepare)] = placement.node
        held = turn.nodes[placement.node].holds
        turn.put_node(placement.node, holds={**held, job.name: (*held.get(job.name, ()), number)})
    waiting |= stop_leavers(turn, job.name, number - 1, stay=chosen.nodes)
    change = Change(generation, incidents, turn.at, waiting, excluded=excluded)
    turn.put_job(job.name, generation=generation, change=change, planned=None, blocked=None)
    turn.set_phase(job.name, JobPhase.PREPARING, chosen.reason)
    turn.publish(
        GenerationChanged(turn.at, job.name, "planned", generation, f"{chosen.reason}; {election.restore.reason}")
    )
    for incident in incidents:
        turn.put_incident(replace(turn.incidents[incident], state=IncidentState.PREPARING, new_generation=number))
    turn.set_timer(f"prepare:{job.name}:{number}", turn.at + job.spec.limits.prepare_timeout_s)
    for node in sorted({*before, *chosen.nodes}):
        nodes.refresh(turn, node, chosen.reason)
        if node in chosen.nodes and not turn.nodes[node].connected:
            _grace(turn, job.name, number, node)
    breaker.count_change(turn)


def _prepare(
    turn: Turn,
    job: Job,
    generation: Generation,
    placement: Placement,
    election: Election,
    copies: Iterable[str],
    traceparent: str,
) -> Prepare:
    sources = ((node, turn.nodes[node].facts.replicator_endpoint) for node in copies)
    return Prepare(
        job=job.name,
        generation=generation.number,
        attempt=generation.attempt,
        mesh=generation.mesh,
        placement=placement,
        nnodes=len(generation.placements),
        launch=job.spec.launch,
        checkpoint=job.spec.checkpoint,
        hang=job.spec.hang,
        token=job.token,
        restore_step=election.restore.step,
        restore_mesh=election.mesh,
        restore=tuple(rank for rank in election.ranks if rank.rank in placement.ranks),
        peers=tuple(ShardSource(node, endpoint) for node, endpoint in sources if endpoint),
        traceparent=traceparent,
    )


def _traceparent(turn: Turn, incidents: tuple[str, ...]) -> str:
    if not incidents:
        return ""
    return turn.incidents[incidents[0]].evidence.get("traceparent", "") or turn.trace(incidents[0])[1]


def stop_leavers(
    turn: Turn, name: str, generation: int, *, stay: Iterable[str] = (), grace_s: float = 0.0, forget: bool = False
) -> dict[str, str]:
    """Order every node that may have workers of the job, except `stay`, to stop them.

    Returns the orders to wait for (command id → node): those of connected nodes. The others get theirs when they come back.
    """
    waiting = {}
    for node in sorted(turn.nodes):
        has_files = forget and name in turn.nodes[node].inventory
        if node in stay or not (has_files or name in turn.nodes[node].holds):
            continue
        command = turn.send(node, Stop(name, generation, grace_s, forget))
        if turn.nodes[node].connected:
            waiting[command] = node
    return waiting


def abandon(turn: Turn, name: str) -> None:
    """Give up the change in flight, if there is one: its orders are withdrawn, its timers with them."""
    job = turn.jobs[name]
    for send in turn.orders(job=name):
        if not isinstance(
            send.order, Warm
        ):  # Stop orders, too: whoever abandons sends newer ones to all that need them
            turn.forget_order(send.command_id)
    for phase in ("prepare", "start", "fence"):
        turn.cancel_timer(f"{phase}:{name}:{job.number}")
    turn.cancel_timer(f"defer:{name}")
    if job.change is not None:
        turn.put_job(name, change=None)


def suspend(turn: Turn, name: str, why: str) -> None:
    """A fault struck the change in flight: give it up while the policy is asked again."""
    abandon(turn, name)
    turn.set_phase(name, JobPhase.PREPARING, f"the change is planned again: {why}")


def hold(turn: Turn, name: str, reason: str, *, retry: bool = False) -> None:
    """The job cannot run now: its workers stop (they only wait for peers that are gone) and it waits for nodes."""
    job = turn.jobs[name]
    abandon(turn, name)
    stop_leavers(turn, name, job.number)
    since = job.blocked.since if job.blocked else turn.at
    fruitless = job.fruitless + 1 if retry and job.running is None else job.fruitless
    turn.put_job(name, planned=None, blocked=Blocked(since, options(turn, job)), fruitless=fruitless)
    turn.set_phase(name, JobPhase.WAITING if job.running else JobPhase.PENDING, reason)
    if retry:
        turn.set_timer(f"retry:{name}", turn.at + RETRY_S)


def _defer(turn: Turn, job: Job, reason: str, until: float) -> None:
    """Decided, but too little is known of what was saved: decided again when it is, or at `until`."""
    abandon(turn, job.name)
    stop_leavers(turn, job.name, job.number)
    since = job.blocked.since if job.blocked else turn.at
    turn.put_job(job.name, planned=None, blocked=Blocked(since, options(turn, job), until))
    turn.set_phase(job.name, JobPhase.WAITING, reason)
    turn.set_timer(f"defer:{job.name}", until)


# ---------------------------------------------------------------- answers


def on_order_done(turn: Turn, send: Send, done: OrderDone) -> None:
    """An answer to Prepare, Stop or Start; the order has left the outbox."""
    job = turn.jobs.get(send.order.job)
    if job is None or job.change is None:
        return
    change = job.change
    if send.command_id in change.unstarted:
        if not done.ok:
            replan(turn, job.name, f"{send.node} could not start: {done.reason}", exclude=send.node)
            return
        unstarted = {k: v for k, v in change.unstarted.items() if k != send.command_id}
        turn.put_job(job.name, change=replace(change, unstarted=unstarted))
    elif send.command_id in change.waiting:
        if not done.ok and isinstance(send.order, Prepare):
            replan(turn, job.name, f"{send.node} could not prepare: {done.reason}", exclude=send.node)
            return
        if not done.ok:
            nodes.condemn(turn, send.node, f"could not stop its workers of {job.name}: {done.reason}")
        master = (
            done.master if isinstance(send.order, Prepare) and send.order.placement.first_rank == 0 else change.master
        )
        waiting = {k: v for k, v in change.waiting.items() if k != send.command_id}
        turn.put_job(job.name, change=replace(change, waiting=waiting, master=master))
        start_when_ready(turn, job.name)


def start_when_ready(turn: Turn, name: str) -> None:
    """START, once nothing older can run."""
    job = turn.jobs[name]
    change = job.change
    if change is None or change.waiting or change.started_at is not None:
        return
    first = change.generation.placements[0].node
    if not change.master:
        replan(turn, name, f"{first} named no rendezvous endpoint", exclude=first)
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
    _start(turn, job, change)


def _nobody_testifies(turn: Turn, job: Job) -> bool:
    """Whether no node of the generation that ran has said that its workers are gone."""
    running = job.running
    if running is None:
        return False
    return all(running.number in turn.nodes[node].holds.get(job.name, ()) for node in running.nodes)


def _start(turn: Turn, job: Job, change: Change) -> None:
    generation = change.generation
    if job.running is not None:
        turn.publish(
            GenerationChanged(turn.at, job.name, "ended", job.running, f"generation {generation.number} takes over")
        )
    order = Start(job.name, generation.number, change.master, _traceparent(turn, change.incidents))
    unstarted = {turn.send(node, order): node for node in generation.nodes}
    turn.cancel_timer(f"prepare:{job.name}:{generation.number}")
    turn.put_job(
        job.name,
        change=replace(change, started_at=turn.at, unstarted=unstarted),
        running=generation,
        running_at=turn.at,
        lineage=branch(job.lineage, generation.attempt, generation.restore, turn.config.lineage_max),
        step=generation.restore.step,
        checkpoint_step=generation.restore.step,
        ever_saved=generation.restore.step > 0,
        progressed=False,
        blind=False,
        finished=(),
    )
    turn.publish(GenerationChanged(turn.at, job.name, "prepared", generation, f"rendezvous at {change.master}"))
    turn.publish(GenerationChanged(turn.at, job.name, "started", generation, generation.restore.reason))
    turn.set_phase(job.name, JobPhase.STARTING, generation.restore.reason)
    for incident in change.incidents:
        if incident in turn.incidents:
            turn.put_incident(
                replace(
                    turn.incidents[incident],
                    state=IncidentState.STARTING,
                    t_prepared=turn.at,
                    restored_step=generation.restore.step,
                )
            )
    turn.set_timer(f"start:{job.name}:{generation.number}", turn.at + job.spec.limits.first_step_timeout_s)
    for node in generation.nodes:
        if not turn.nodes[node].connected:
            _grace(turn, job.name, generation.number, node)


def on_ranks_stepping(turn: Turn, report: RanksStepping) -> None:
    job = turn.jobs.get(report.job)
    if job is None or job.change is None or job.change.started_at is None or report.generation != job.number:
        return
    change = replace(job.change, stepping=tuple(sorted({*job.change.stepping, *report.ranks})))
    job = turn.put_job(job.name, change=change, blind=job.blind or report.step == 0)
    if len(change.stepping) == change.generation.mesh.world_size:
        _complete(turn, job, change, report.at)


def _complete(turn: Turn, job: Job, change: Change, stepped_at: float) -> None:
    """Every rank has stepped: the incidents are over."""
    generation = change.generation
    turn.cancel_timer(f"start:{job.name}:{generation.number}")
    turn.put_job(job.name, change=None)
    turn.publish(GenerationChanged(turn.at, job.name, "stepping", generation, "every rank has stepped"))
    turn.set_phase(
        job.name,
        JobPhase.RUNNING,
        f"generation {generation.number} on {len(generation.nodes)} nodes, {generation.mesh}",
    )
    for incident in change.incidents:
        outcome = f"generation {generation.number} steps from step {generation.restore.step} on"
        turn.close_incident(incident, IncidentState.RESOLVED, outcome, t_first_step=stepped_at)
    warm_spares(turn, turn.jobs[job.name])


def warm_spares(turn: Turn, job: Job) -> None:
    """So that a swap does not pay for imports."""
    for spare in spares_for(turn, job):
        node = turn.nodes[spare.node]
        if job.name not in node.warmed:
            turn.put_node(spare.node, warmed=(*node.warmed, job.name))
            turn.send(spare.node, Warm(job.name, job.spec.launch))


# ---------------------------------------------------------------- what goes wrong on the way


def on_node_gone(turn: Turn, name: str, node: str) -> None:
    """A node's session ended while `name` changes: a leaver is not waited for, a member gets a moment to come back."""
    job = turn.jobs[name]
    change = job.change
    if change is None:
        return
    if node in change.generation.nodes:
        if _owes_answer(change, node):
            _grace(turn, name, job.number, node)
        return
    waiting = {command: other for command, other in change.waiting.items() if other != node}
    if len(waiting) < len(change.waiting):
        turn.put_job(name, change=replace(change, waiting=waiting))
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
        turn.put_job(name, change=replace(change, waiting={**change.waiting, command: node}))


def on_node_restarted(turn: Turn, name: str, node: str) -> None:
    """A new incarnation: the workers that it had prepared are gone, and so are those of a leaver."""
    change = turn.jobs[name].change
    if change is None:
        return
    if node in change.generation.nodes:
        replan(turn, name, f"the agent of {node} restarted while the generation was prepared")
    else:
        on_node_gone(turn, name, node)


def _owes_answer(change: Change, node: str) -> bool:
    return node in (change.waiting if change.started_at is None else change.unstarted).values()


def _grace(turn: Turn, name: str, number: int, node: str) -> None:
    turn.set_timer(f"gone:{name}:{number}:{node}", turn.at + turn.config.change_grace_s)


def on_grace_over(turn: Turn, name: str, number: int, node: str) -> None:
    job = turn.jobs.get(name)
    if job is None or job.number != number or job.change is None or turn.nodes[node].connected:
        return
    if _owes_answer(job.change, node):
        replan(turn, name, f"{node} vanished while the generation was prepared", exclude=node)


def on_prepare_timeout(turn: Turn, name: str, number: int) -> None:
    """Members that did not answer in time are planned around; a leaver that did not is out of service."""
    job = turn.jobs.get(name)
    if job is None or job.number != number or job.change is None or job.change.started_at is not None:
        return
    change = job.change
    late = sorted(set(change.waiting.values()))
    seconds = f"{job.spec.limits.prepare_timeout_s:g} s"
    for node in late:
        if node not in change.generation.nodes:
            nodes.condemn(turn, node, f"did not stop its workers of {name} within {seconds}")
    members = [node for node in late if node in change.generation.nodes]
    if members:
        turn.put_job(name, change=replace(change, excluded=(*change.excluded, *members[:-1])))
        replan(turn, name, f"{', '.join(members)} did not prepare within {seconds}", exclude=members[-1])
    else:
        turn.put_job(name, change=replace(change, waiting={}))
        start_when_ready(turn, name)


def on_fence_over(turn: Turn, name: str, number: int) -> None:
    job = turn.jobs.get(name)
    if job is not None and job.number == number and job.change is not None:
        turn.put_job(name, change=replace(job.change, fenced=True))
        start_when_ready(turn, name)


def ranks_missing(turn: Turn, name: str, number: int) -> Finding | None:
    """The supervisor's own finding: START was sent and not every rank has stepped in time."""
    job = turn.jobs.get(name)
    if job is None or job.number != number or job.change is None or job.change.started_at is None:
        return None
    generation, change = job.change.generation, job.change
    missing = sorted(set(range(generation.mesh.world_size)) - set(change.stepping))
    where = sorted({generation.node_of(rank) for rank in missing})
    shown = ", ".join(str(rank) for rank in missing[:8]) + (" …" if len(missing) > 8 else "")
    return Finding(
        id=f"ranks-missing:{name}:{number}",
        kind=FindingKind.RANKS_MISSING,
        severity=Severity.ERROR,
        at=turn.at,
        since=job.running_at,
        summary=f"{len(missing)} of {generation.mesh.world_size} ranks finished no step within "
        f"{job.spec.limits.first_step_timeout_s:g} s of the start of generation {number}: {shown} on {', '.join(where[:8])}",
        node=where[0] if len(where) == 1 else "",
        job=name,
        generation=number,
        rank=missing[0] if len(missing) == 1 else None,
    )
