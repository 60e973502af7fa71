"""Views of the state for its readers: the policy, the planner, the API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from holdfast.domain.errors import Conflict, NotFound
from holdfast.domain.evolve import evolve
from holdfast.domain.generations import Generation
from holdfast.domain.incidents import Action, Incident
from holdfast.domain.job import JobSpec
from holdfast.domain.nodes import Notice
from holdfast.policy import ACTIONS, JobView, PendingReset, after_steps
from holdfast.supervisor.core.fleet import resets
from holdfast.supervisor.core.fleet.spares import faults_per_day, reserved_for, roomiest, spares_for
from holdfast.supervisor.core.model.index import EMPTY, By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Deferred, Suspended, Waiting
from holdfast.supervisor.core.model.state import Node, State
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.planner import Plan, Request, Spare, Unplannable, plan
from holdfast.supervisor.core.rules.wording import listed
from holdfast.supervisor.protocol import JobPhase

T = TypeVar("T")

RECENT_MAX = 20


def check_submission(state: State, spec: JobSpec) -> None:
    """Raises `Conflict` if a job of this name has not finished."""
    job = state.jobs.get(spec.name)
    if job is not None and not job.phase.finished:
        if job.phase is JobPhase.SUSPENDED:
            how = "it continues when there are nodes for it; `holdfast run --attach` follows it"
            raise Conflict(f"a job named {spec.name} is suspended: {how}. Or stop it first, or choose another name")
        raise Conflict(f"a job named {spec.name} is {job.phase}: stop it first, or choose another name")
    if job is None and (alive := sorted(name for name, node in state.nodes.items() if _runs(node, spec.name))):
        raise Conflict(
            f"workers of an earlier run of {spec.name} are alive on {listed(alive)}, and this supervisor does not know that "
            f"run (its state was lost): they keep training. `holdfast jobs stop {spec.name}` ends them; or choose another name"
        )


def _runs(node: Node, job: str) -> bool:
    return any(worker.job == job for worker in node.workers)


def view(state: State, job_name: str, at: float) -> JobView:
    """The view of a job that its policy gets. Raises `NotFound`."""
    if job_name not in state.jobs:
        raise NotFound(f"there is no job {job_name}")
    return job_view(Turn(state, at), state.jobs[job_name])


def options(turn: Turn, job: Job) -> tuple[str, ...]:
    """The nodes that `job` could have ranks on now. If they change, a decision to wait is made again."""
    members = job.generation.nodes if job.generation else ()
    able = {n for n in members if n in turn.nodes and turn.nodes[n].connected and _may_stay(turn, turn.nodes[n], job)}
    return tuple(sorted(able | {spare.node for spare in spares_for(turn, job)}))


def reserved_nodes(state: State, job: Job) -> tuple[str, ...]:
    """Free nodes that are reserved as spares of `job` now."""
    return reserved_for(Turn(state, state.folded_at), job) if job.spec.spares else ()


def _may_stay(turn: Turn, node: Node, job: Job, *, after_resets: bool = False) -> bool:
    """Whether a member of the job may keep its ranks. A failed pre-flight test excludes it unless it has workers of the job."""
    if node.asked_to_end and isinstance(job.doing, Waiting | Suspended | Deferred):
        return False  # workers that run there may continue, but none are started any more
    return (node.in_service if after_resets else node.usable) and (
        node.preflight is None or not node.unfit or node.name in turn.group(By.HOLDS, job.name)
    )


def unusable_members(turn: Turn, job: Job, *, after_resets: bool = False) -> tuple[str, ...]:
    """The job's nodes that cannot have ranks: lost, unschedulable, or failed to prepare in the present change; also nodes with
    GPUs that must be reset, unless `after_resets`."""
    if job.generation is None:
        return ()
    excluded, nodes, members = job.change.excluded if job.change else (), turn.nodes, job.generation.nodes
    # Other nodes may stay: they have a session and are usable, and neither a test nor a notice speaks against them.
    available, unfit, announced = (turn.group(what) for what in (By.AVAILABLE, By.UNFIT, By.ANNOUNCED))
    out = (
        node
        for node in members
        if node not in available or node in unfit or node in announced or node in excluded
        if node not in nodes or node in excluded or not _may_stay(turn, nodes[node], job, after_resets=after_resets)
    )
    return turn.pooled(("unusable", job.name, after_resets), lambda: tuple(out), job)


def reachable(
    turn: Turn,
    job: Job,
    dp: int,
    dp_min: int,
    out: frozenset[str] = frozenset(),
    *,
    after_resets: bool = False,
    more: tuple[Spare, ...] = (),
) -> Plan | Unplannable:
    """The plan for `dp` replicas, or for fewer, down to `dp_min`, if the present nodes cannot run that many. `more`: nodes that
    are not free but might become so."""
    key = ("reachable", job.name, dp, dp_min, out, after_resets, more)
    return turn.pooled(key, lambda: _reachable(turn, job, dp, dp_min, out, after_resets, more), job)


def _reachable(
    turn: Turn, job: Job, dp: int, dp_min: int, out: frozenset[str], after_resets: bool, more: tuple[Spare, ...]
) -> Plan | Unplannable:
    generation = job.generation
    claimed = turn.pooled(("claimed", job.name), lambda: _claimed(turn, job), job)
    if more and generation is not None:  # a waiting job may have had such a node before another job got it
        claimed -= {spare.node for spare in more}
        more = tuple(spare for spare in more if generation.slot_of(spare.node) is None)
    request = Request(
        spec=job.spec,
        dp=dp,
        dp_min=dp_min,
        placements=generation.placements if generation else (),
        out=out | frozenset(unusable_members(turn, job, after_resets=after_resets)) | claimed,
        spares=(*spares_for(turn, job), *more),
        zones=_OfMembers(turn, generation, lambda node: node.zone),
        rates=_OfMembers(turn, generation, lambda node: faults_per_day(turn, node)),
        on_probation=frozenset(turn.members(generation, By.ON_PROBATION)) if generation else frozenset(),
    )
    outcome = plan(request)
    if isinstance(outcome, Unplannable) and outcome.nodes_missing:
        small = roomiest(turn, job.spec.pool, job.spec.nproc_per_node)
        if small:
            return evolve(outcome, reason=f"{outcome.reason}; the largest of the other free nodes has room for {small}")
    return outcome


class _OfMembers(Mapping[str, T]):
    """A value per node of a generation, computed when it is read: a plan reads few of thousands."""

    def __init__(self, turn: Turn, generation: Generation | None, value_of: Callable[[Node], T]) -> None:
        self._nodes, self._generation, self._value_of = turn.nodes, generation, value_of

    def __getitem__(self, name: str) -> T:
        if self._generation is None or self._generation.slot_of(name) is None:
            raise KeyError(name)
        return self._value_of(self._nodes[name])

    def __iter__(self) -> Iterator[str]:
        members = self._generation.nodes if self._generation is not None else ()
        return (name for name in members if name in self._nodes)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _claimed(turn: Turn, job: Job) -> frozenset[str]:
    """Nodes of the job that other jobs claim as well."""
    claims = turn.groups(By.CLAIM)
    members = job.generation.nodes if job.generation else ()
    return frozenset([name for name in members if len(jobs := claims.get(name, EMPTY)) > (job.name in jobs)])


def plan_for(turn: Turn, job: Job, action: Action, incident: Incident) -> Plan | Unplannable:
    """The plan that carries out `action`."""
    spec, known = ACTIONS[action.kind], job_view(turn, job)
    if action.before:
        known = after_steps(action, known)
    if spec.aim is None:
        return Unplannable(f"{action.kind} changes no generation")
    aim = spec.aim(action, incident, known)
    out = aim.out | {node for step in action.before if ACTIONS[step.kind].condemns for node in step.nodes}
    dp = known.dp - _replicas_on(job, out) if aim.dp is None else aim.dp
    return reachable(turn, job, dp, aim.dp_min, out, after_resets=spec.resets)


def _replicas_on(job: Job, nodes: frozenset[str]) -> int:
    if job.generation is None:
        return 0
    mesh = job.generation.mesh
    return len({mesh.replica_of(rank) for p in job.generation.placements if p.node in nodes for rank in p.ranks})


def _notices(turn: Turn, job: Job) -> dict[str, Notice]:
    members = turn.members(job.generation, By.ANNOUNCED) if job.generation else ()
    known = {name: turn.nodes[name].notice for name in members}
    return {name: notice for name, notice in known.items() if notice is not None}


def _resets(turn: Turn, job: Job) -> dict[str, PendingReset]:
    members = turn.members(job.generation, By.RESET_DUE) if job.generation else ()
    known = {name: turn.nodes[name] for name in members}
    return {
        name: PendingReset(node.reset_due.gpus, resets.obstacle(node))
        for name, node in known.items()
        if node.reset_due is not None
    }


def job_view(turn: Turn, job: Job) -> JobView:
    view = turn.pooled(("view", job.name), lambda: _job_view(turn, job), job, turn.closed)
    open_now = turn.open_incidents(job.name)
    standing = tuple(incident for incident in open_now if not incident.planned)
    waiting = [incident.node for incident in open_now if incident.wants_reset_later]
    if not (standing or waiting or view.resets):
        return view
    faulty = {*view.resets, *waiting, *(incident.node for incident in standing)}
    resettable = tuple(node for node in sorted(faulty) if node in turn.nodes and not resets.obstacle(turn.nodes[node]))
    return evolve(view, standing=standing, resettable=resettable)


def _job_view(turn: Turn, job: Job) -> JobView:
    mesh = job.generation.mesh if job.generation else job.spec.mesh
    best = reachable(turn, job, max(job.target_dp, job.spec.min_dp), job.spec.min_dp)
    measured = job.checkpoints.measured
    return JobView(
        at=turn.at,
        name=job.name,
        mesh=mesh,
        target_dp=job.target_dp,
        min_dp=job.spec.min_dp,
        max_dp=job.spec.max_dp,
        generation=job.number,
        nodes=job.generation.nodes if job.generation else (),
        unusable=unusable_members(turn, job),
        notices=_notices(turn, job),
        resets=_resets(turn, job),
        spares=tuple(sorted(spare.node for spare in spares_for(turn, job))),
        reachable_dp=best.mesh.dp if isinstance(best, Plan) else 0,
        step=job.progress.finished_step,
        checkpoint_step=job.checkpoints.step,
        checkpoint_interval_steps=job.interval_steps,
        restarts_without_progress=job.progress.restarts_without_progress,
        restarts_without_advance=job.progress.restarts_without_advance,
        outages=job.progress.outages,
        furthest_step=job.progress.furthest_step,
        remaining_s=_remaining_s(turn, job),
        change_s=measured.change_s or measured.recovery_s or turn.config.change_unmeasured_s,
        restarts_without_progress_max=job.spec.limits.restarts_without_progress_max,
        params=job.spec.policy_params,
        recent=tuple(i for i in turn.closed if i.job == job.name and i.fault_at >= job.submitted_at)[-RECENT_MAX:],
        reports_steps=not job.progress.reports_no_steps,
    )


def _remaining_s(turn: Turn, job: Job) -> float:
    """Estimated remaining run time of the job. If its number of steps is unknown: as long as it has run, the median for
    anything whose end is unknown (Lindy)."""
    if job.spec.steps and job.progress.step_s > 0:
        return max(0, job.spec.steps - job.progress.step) * job.progress.step_s
    return max(0.0, turn.at - job.submitted_at)
