"""Begins the two-phase change from one generation to the next. handover.py continues it from PREPARE to the first step.

    begin ──plan, elect──► PREPARING ──every Prepare and Stop answered──► STARTING ──every rank stepped──► RUNNING
      │                       │  a node fails or is lost: plan around it     │  not in time: a ranks_missing incident
      └──no plan──► wait      └───────────────► begin ◄──────────────────────┘

**No two generations run at the same time.** `Start` is sent only after every connected node that may have workers of an older
generation has confirmed that they have ended: members by answering `Prepare`, leaving nodes by answering `Stop`. A lost node
cannot confirm, and need not. A step needs every rank. If one rank of a generation is known to have stopped, the generation can
never finish a step again, wherever its other workers hang. What they might still save is on a branch that no election
considers. Only if *all* nodes of a generation were lost at once is there no confirmation. Then the change waits `fence_s` for
one of them to reconnect, and afterwards relies on the branch alone (docs/adr/0007).
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.domain import spans
from holdfast.domain.construct import constructor_of
from holdfast.domain.evolve import evolve
from holdfast.domain.generations import Generation, ShardSource, joined
from holdfast.domain.incidents import Action, Incident, IncidentState
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Inject, Prepare, PrepareTemplate, RebootNode, ResetGpu, RestartAgent, Stop
from holdfast.policy import ACTIONS
from holdfast.supervisor.core import progress
from holdfast.supervisor.core.fleet import breaker, nodes, resets
from holdfast.supervisor.core.incidents import recipes
from holdfast.supervisor.core.incidents.views import options, plan_for, reachable
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.indexing import nodes_in_use
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import (
    AwaitedNodes,
    Cause,
    Change,
    Deferred,
    Pending,
    Preparing,
    Replanning,
    Resetting,
    Waiting,
)
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import suspects
from holdfast.supervisor.core.rules.election import Election, Origin
from holdfast.supervisor.core.rules.planner import Plan, Unplannable, peers
from holdfast.supervisor.core.saves import pacing, saved
from holdfast.supervisor.protocol import GenerationChanged, GenerationStage
from holdfast.supervisor.timers import (
    DeferralOver,
    FenceOver,
    FirstStepsDue,
    FirstStepTimeout,
    PrepareTimeout,
    ReconnectTimeout,
    ResetTimeout,
    RetryDue,
    SlowStart,
)

REPLANS_MAX = 8  # of one change; after these, the breaker counts another change
FEWER_TRIES_MAX = 3  # after this many failed restores of a step, fewer replicas are not tried instead of step 0
RETRY_S = 10.0  # a job that could not be prepared on the present nodes is retried after this time
RETRY_RUN_S = 2.0  # likewise a job that has run, at first; a restarted replicator answers by then
# Later at growing intervals: retries of one job must not open the breaker, which leaves all other jobs without recovery.
RETRY_SHARE = 0.5  # of the time for which it has been down
RETRY_RUN_S_MAX = 60.0

_shard_source = constructor_of(ShardSource)


# ---------------------------------------------------------------- begin


def begin(turn: Turn, name: str, action: Action, incident: Incident) -> None:
    """Carry out a decided action, or wait for the condition that prevents it."""
    job = turn.jobs[name]
    if ACTIONS[action.kind].resets and (targets := resets.targets(turn, job, action, incident)):
        _reset_first(turn, job, targets, action, incident)
    else:
        carry_out(turn, job, plan_for(turn, job, action, incident), action.reason)


def _reset_first(turn: Turn, job: Job, targets: tuple[str, ...], action: Action, incident: Incident) -> None:
    """Stop the workers. When they have ended, the GPUs are reset (resets.py), and resetting.py continues from there."""
    withdraw(turn, job)
    stop_removed_nodes(turn, job.name, job.number)
    turn.move(job.name, Cause.RESET, Resetting(incident.id, targets), action.reason)
    turn.set_timer(ResetTimeout(job.name, job.number), turn.at + turn.config.reset_s)


def replan(turn: Turn, name: str, why: str, exclude: str = "", *, refused: bool = False) -> None:
    """Replace the change in flight, which cannot succeed, by the best one that the present nodes allow, without `exclude`.
    `refused`: that node has a session and could not prepare. A node that was only lost says nothing about the job."""
    job = turn.jobs[name]
    change = job.change
    assert change is not None
    turn.note(name, f"generation {job.number} is planned again: {why}")
    if exclude:
        excluded = (*change.excluded, exclude)
        turn.update(name, change=evolve(change, excluded=excluded, refused=change.refused or refused))
    match recipes.plan_again(turn, turn.jobs[name], why, exclude):
        case None:
            resume(turn, name, why, planned_before=True)
        case Unplannable():
            pass  # the next rung follows
        case plan:
            carry_out(turn, turn.jobs[name], plan, why, planned_before=True)


def resume(turn: Turn, name: str, why: str, *, planned_before: bool = False) -> None:
    """Begin the best change that the present nodes allow, after another one was abandoned."""
    job = turn.jobs[name]
    best = reachable(turn, job, max(job.target_dp, job.spec.min_dp), job.spec.min_dp)
    carry_out(turn, job, best, why, planned_before=planned_before)


def first_start(turn: Turn, name: str, *, degraded: bool) -> bool:
    """Start a job that has never run, if there are nodes for it. `degraded`: also with fewer replicas than `target_dp`."""
    job = turn.jobs[name]
    outcome = reachable(turn, job, job.target_dp, job.spec.min_dp if degraded else job.target_dp)
    if isinstance(outcome, Unplannable):
        turn.explain(name, outcome.reason)
        return False
    election = saved.elect_for(turn, job, outcome.mesh, outcome.placements)
    if waits_for := saved.start_missing(turn, job, election):
        turn.explain(name, waits_for)
        return False
    _launch(turn, job, outcome, election)
    return True


def carry_out(turn: Turn, job: Job, outcome: Plan | Unplannable, why: str, *, planned_before: bool = False) -> None:
    """Launch the plan, or let the job wait for what prevents it. `planned_before`: the newest generation was planned for the
    same decision and is replaced."""
    if isinstance(outcome, Unplannable):
        hold(turn, job.name, f"{outcome.reason} ({why})", retry=bool(job.change and job.change.excluded))
        return
    election = saved.elect_for(turn, job, outcome.mesh, outcome.placements)
    if obstacle := _obstacle(turn, job, election):
        _defer(turn, job, *obstacle, planned_before=planned_before)
        return
    if election.restore.step == 0 and saved.large_rework_expected(job):
        if (fewer := _restorable_with_fewer(turn, job, outcome)) is not None:
            _launch(turn, job, *fewer)
            return
        turn.note(
            job.name, f"starts again from step 0 after waiting {turn.config.scratch_s:.0f} s: {election.restore.reason}"
        )
    _launch(turn, job, outcome, election)


def _restorable_with_fewer(turn: Turn, job: Job, chosen: Plan) -> tuple[Plan, Election] | None:
    """The largest plan with fewer replicas than `chosen` that can restore a saved step, if `chosen` would start from step 0.
    Another number of replicas may need other shards. The remaining replicas are added when the smaller mesh has saved."""
    for dp in range(chosen.mesh.dp - 1, job.spec.min_dp - 1, -1):
        plan = reachable(turn, job, dp, dp)
        if isinstance(plan, Unplannable):
            continue
        election = saved.elect_for(turn, job, plan.mesh, plan.placements)
        step = (election.restore.attempt, election.restore.step)
        tries = max((each.tries for each in job.checkpoints.skipped if (each.attempt, each.step) == step), default=0)
        if election.restore.step > 0 and tries < FEWER_TRIES_MAX:
            reason = f"{plan.reason}: {chosen.mesh.dp} replicas can restore no saved step"
            return evolve(plan, reason=reason), election
    return None


def not_yet(turn: Turn, job: Job, plan: Plan) -> tuple[str, float] | None:
    """Why a change to `plan` would leave the job waiting now, and until when; None if it can begin."""
    return _obstacle(turn, job, saved.elect_for(turn, job, plan.mesh, plan.placements))


def _obstacle(turn: Turn, job: Job, election: Election) -> tuple[str, float] | None:
    """What `election` lacks to select a saved step, and until when to wait for it; None if nothing."""
    if stale := saved.stale(turn, job):
        reason = f"this leader does not know yet which shards {', '.join(stale)} holds"
        return reason, max(turn.nodes[node].stale_until for node in stale)
    if late := saved.inventories_due(turn, job, election):
        reason = f"{', '.join(late)} just connected, and may hold newer steps than {election.restore.step}"
        return reason, max(late.values())
    if waits_for := saved.start_missing(turn, job, election):
        return waits_for, saved.next_try(turn, job) or turn.at + turn.config.scratch_s
    if election.restore.step > 0:
        return saved.newer_with_nodes_away(turn, job, election)
    if not saved.large_rework_expected(job):
        return None
    if again := saved.next_try(turn, job):
        return f"saved steps exist, and cannot be restored now ({election.restore.reason})", again
    since = turn.at if job.held_since is None else job.held_since
    if turn.at >= since + turn.config.scratch_s:
        return None
    held = job.checkpoints.stored or any(holder.shards for holder in saved.holders(turn, job))
    detail = election.restore.reason if held else "every node that holds one is disconnected"
    return f"saved steps exist, but none is complete on the nodes at hand ({detail})", since + turn.config.scratch_s


def _launch(turn: Turn, job: Job, chosen: Plan, election: Election) -> None:
    """Store the new generation. Send Prepare to its nodes and Stop to the nodes that leave."""
    previous = job.generation
    claimed, before = nodes_in_use(job), previous.nodes if previous else ()
    excluded, refused = (job.change.excluded, job.change.refused) if job.change else ((), False)
    replans = job.change.replans + 1 if job.change else 0
    before_s = job.doing.phases_s if isinstance(job.doing, Resetting) else {}
    withdraw(turn, job)
    # An event log that lost its last second lacks generations that nodes have seen: do not use their numbers again.
    number = max(job.number, job.numbering.seen, newest_held(turn, job.name)) + 1
    generation = Generation(
        number, job.numbering.attempt_base + number, chosen.mesh, chosen.placements, election.restore
    )
    incidents = tuple(incident.id for incident in turn.open_incidents(job.name) if incident.action is not None)
    traceparent = traceparent_of(turn, incidents)
    self_test = any(saved.is_unexplained_corruption(turn.incidents[incident]) for incident in incidents)
    checkpoint = pacing.resolved(turn, job.name)
    members = {node: turn.nodes[node] for node in generation.nodes}
    copies = peers(chosen.placements, {name: node.zone for name, node in members.items()})
    shared = evolve(
        _prepare(job, generation, election), checkpoint=checkpoint, traceparent=traceparent, self_test=self_test
    )
    # A node with a `self_test` runs longer tests anyway: no suspect test in addition.
    suspected = Numbers() if self_test else suspects.suspected(turn, incidents, generation)
    if suspected:
        shared = evolve(shared, suspect_test_s=suspects.budget_s(job.spec.limits))
    sources = {name: _shard_source(name, node.facts.replicator_endpoint, "") for name, node in members.items()}
    peers_of = tuple([tuple([sources[other] for other in copies[node] if sources[other].endpoint]) for node in members])
    turn.broadcast(shared, chosen.placements, joined(election.runs, job.spec.nproc_per_node), peers_of, suspected)
    stay = members.keys() & claimed  # their published states do not change
    turn.begin_live(job.name, number, members)
    for name, member in members.items():
        if not member.ranks_at or name not in stay:  # the others were never idle since: they have no newer network test
            turn.put_node(name, ranks_at=turn.at)
    waiting = stop_removed_nodes(turn, job.name, number - 1, stay=members)
    saved_dp = election.mesh.dp if election.mesh is not None and election.in_parts else 0
    change = Change(incidents, turn.at, excluded, refused, replans, election.origin, saved_dp, before_s)
    preparing = Preparing(change, waiting, Numbers.below(len(chosen.placements)))
    turn.move(job.name, Cause.PLAN, preparing, chosen.reason, generation=generation)
    turn.publish(
        GenerationChanged(
            turn.at, job.name, GenerationStage.PLANNED, generation, f"{chosen.reason}; {election.restore.reason}"
        )
    )
    for incident in incidents:
        turn.put_incident(evolve(turn.incidents[incident], state=IncidentState.PREPARING, new_generation=number))
    recipes.follow(turn, job.name, previous)
    turn.set_timer(PrepareTimeout(job.name, number), turn.at + prepare_timeout_s(turn, job, change))
    for node in sorted({*before, *members} - stay):
        nodes.refresh(turn, node, chosen.reason)
    for node in sorted(turn.members(generation, By.AWAY)):
        give_grace(turn, job.name, number, node)
    if replans % REPLANS_MAX == 0:
        breaker.count_change(turn)


def prepare_timeout_s(turn: Turn, job: Job, change: Change) -> float:
    """The job's own limit, longer for a restore from the object store: replacing a node that waits for it gains nothing."""
    from_store = change.origin is Origin.STORE
    return job.spec.limits.prepare_timeout_s * (turn.config.store_patience if from_store else 1.0)


def wait_for_stop(turn: Turn, job: Job, command: str, node: str) -> None:
    """`node` connected while the next generation is prepared, and has workers of another one: wait until they have ended. The
    node gets the same time as the others, whenever it connects; a node that reconnects repeatedly gets it once."""
    doing = job.doing
    assert isinstance(doing, Preparing)
    turn.update(job.name, stops={**doing.stops, command: node})
    timer, known = PrepareTimeout(job.name, job.number), doing.change.came_back
    due = turn.timers.get(timer, turn.at)
    if node not in known:
        turn.update(job.name, change=evolve(doing.change, came_back=(*known, node)))
        due = max(due, turn.at + prepare_timeout_s(turn, job, doing.change))
    turn.set_timer(timer, due)


def _prepare(job: Job, generation: Generation, election: Election) -> Prepare:
    """The part that the orders of all slots share, with the placement of the first slot."""
    return Prepare(
        job=job.name,
        generation=generation.number,
        attempt=generation.attempt,
        mesh=generation.mesh,
        placement=generation.placements[0],
        nnodes=len(generation.placements),
        launch=job.spec.launch,
        checkpoint=job.spec.checkpoint,
        hang=job.spec.hang,
        token=job.token,
        restore_step=election.restore.step,
        restore_mesh=election.mesh,
        checks=job.spec.checks,
        first_attempt=job.numbering.first_attempt,
        chaos=job.spec.chaos,
        warning_settles_s=job.spec.warnings.settles_s,
        first_message_s=progress.first_message_s(job),
    )


def traceparent_of(turn: Turn, incidents: tuple[str, ...]) -> str:
    """The traceparent of a change's orders: its own span, below the first incident that it resolves."""
    return spans.change_below(turn.incidents[incidents[0]]) if incidents else ""


def newest_held(turn: Turn, job: str) -> int:
    """The newest generation that any node may have workers of; 0 = none."""
    return max(turn.live.get(job, {}), default=0)


def stop_removed_nodes(
    turn: Turn, name: str, generation: int, *, stay: Iterable[str] = (), grace_s: float = 0.0, ended: bool = False
) -> dict[str, str]:
    """Order every node that may have workers of the job, except `stay`, to stop them.

    `ended`: the job is over, so nodes that only hold shards of it get the order, too. Returns the orders to wait for
    (command id → node): those of connected nodes. The others get theirs when they reconnect.
    """
    waiting = {}
    concerned = {*turn.group(By.HOLDS, name), *(turn.group(By.KEEPS, name) if ended else ())}
    for node in sorted(concerned.difference(stay)):
        command = turn.send(node, Stop(name, generation, grace_s, ended=ended))
        if turn.nodes[node].connected:
            waiting[command] = node
    return waiting


def withdraw(turn: Turn, job: Job) -> None:
    """Abandon the change in flight, if there is one: withdraw its orders and cancel its timers."""
    name = job.name
    turn.withdraw_broadcast(name)
    for send in turn.orders(job=name):
        # This includes Stop orders: a caller that abandons a change sends newer ones to all nodes that need them.
        # A reset concerns the node: it is needed whatever happens to the job. An injected fault is for one generation, and its
        # agent answers it.
        if not isinstance(send.order, PrepareTemplate | ResetGpu | RebootNode | RestartAgent | Inject):
            turn.forget_order(send)
    for kind in (PrepareTimeout, FirstStepTimeout, SlowStart, FenceOver, FirstStepsDue, ResetTimeout):
        turn.cancel_timer(kind(name, job.number))
    turn.cancel_timer(DeferralOver(name))


def give_up(turn: Turn, name: str, why: str) -> None:
    """A fault occurred during the change in flight: abandon the change while the policy is asked again."""
    job = turn.jobs[name]
    withdraw(turn, job)
    turn.move(
        name, Cause.GIVE_UP, Replanning(), f"generation {job.number} is abandoned, and the policy is asked: {why}"
    )


def hold(turn: Turn, name: str, reason: str, *, retry: bool = False, retry_s: float = 0.0) -> None:
    """The job cannot run now. Stop its workers, which only wait for lost peers. The job waits for nodes, or for
    `retry_s`."""
    job = turn.jobs[name]
    withdraw(turn, job)
    stop_removed_nodes(turn, name, job.number)
    since = turn.at if job.held_since is None else job.held_since
    refused = job.change is not None and job.change.refused
    if retry and refused and job.running is None:
        turn.put_progress(name, restarts_without_progress=job.progress.restarts_without_progress + 1)
    awaited = AwaitedNodes(since, options(turn, job), for_time=retry or retry_s > 0)
    if job.running is None:
        turn.move(name, Cause.CANNOT_START, Pending(awaited), reason)
    else:
        turn.move(name, Cause.CANNOT_RUN, Waiting(awaited), reason)
    if retry or retry_s > 0:
        turn.set_timer(RetryDue(name), turn.at + (retry_s or _retry_s(turn, job)))


def _retry_s(turn: Turn, job: Job) -> float:
    if job.running is None:
        return RETRY_S
    detected_at = [incident.detected_at for incident in turn.open_incidents(job.name)[:1]]
    down_since = max(job.progress.seen_at, *detected_at, 0.0)
    return min(max(RETRY_RUN_S, RETRY_SHARE * (turn.at - down_since)), RETRY_RUN_S_MAX)


def _defer(turn: Turn, job: Job, reason: str, until: float, *, planned_before: bool) -> None:
    """A change is decided, but too little is known of the saved steps. Decide again when enough is known, or at `until`."""
    withdraw(turn, job)
    stop_removed_nodes(turn, job.name, job.number)
    since = turn.at if job.held_since is None else job.held_since
    known = saved.known_now(turn, job) if saved.inventories_complete(turn, job, saved.stale(turn, job)) else ""
    turn.move(job.name, Cause.DEFER, Deferred(since, until, known, planned_before), reason)
    turn.set_timer(DeferralOver(job.name), until)


def give_grace(turn: Turn, name: str, number: int, node: str) -> None:
    """Give a member without a session a moment to reconnect before the change is planned around it."""
    turn.set_timer(ReconnectTimeout(name, number, node), turn.at + turn.config.change_grace_s)
