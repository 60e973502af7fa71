"""State and history → the columns and summaries of `fleet_models`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from holdfast.domain.generations import Placement
from holdfast.domain.nodes import NodeState
from holdfast.supervisor.api import fleet_models as models
from holdfast.supervisor.api import incident_views, job_views, node_views
from holdfast.supervisor.api.models import Breaker
from holdfast.supervisor.core import State
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.rules.offenders import rate_per_day
from holdfast.supervisor.core.saves.catalogue import saved_steps
from holdfast.supervisor.history import goodput, time_classes
from holdfast.supervisor.history.accounts import Account
from holdfast.supervisor.history.protocol import Run, Series
from holdfast.supervisor.picture import Picture, Progress
from holdfast.supervisor.protocol import JobPhase

JOBS_MAX = 500
INCIDENTS_MAX = 100
MARKS_MAX = 500
STATES = ("alive", "starting", "absent", "unreported", "lost", "suspect")
ALIVE, STARTING, ABSENT, UNREPORTED, LOST, SUSPECT = range(len(STATES))


def breaker(state: State, at: float) -> Breaker:
    """`at`: Unix seconds."""
    now = state.breaker.since(at - state.config.breaker_window_s)
    return Breaker(
        state="closed" if now.open_until is None else "open",
        reason=now.reason,
        open_until=now.open_until,
        failed_nodes=list(dict.fromkeys(name for _, name in now.failed_nodes)),
        changes=len(now.changes),
    )


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Unfinished ones first, then by name."""
    return sorted(jobs, key=lambda job: (job.phase.finished, job.name))


def fleet(
    picture: Picture, progress: Progress, shown: Sequence[Job], accounts: Mapping[str, Account], at: float
) -> models.Fleet:
    """`shown`: the jobs of the list; `accounts`: by job, where there is one."""
    state = picture.state
    by_state = Counter(node.state for node in state.nodes.values())
    opened = sorted(state.incidents.values(), key=lambda each: (each.detected_at, each.id))
    return models.Fleet(
        at=at,
        jobs=[_fleet_job(picture, progress, job, accounts.get(job.name)) for job in shown],
        jobs_left_out=len(state.jobs) - len(shown),
        nodes={each: by_state[each] for each in NodeState},
        disconnected=sum(not node.connected for node in state.nodes.values()),
        incidents=[incident_views.incident(each) for each in opened[:INCIDENTS_MAX]],
        incidents_open=len(opened),
        breaker=breaker(state, at),
    )


def _fleet_job(picture: Picture, progress: Progress, job: Job, account: Account | None) -> models.FleetJob:
    summary = job_views.job_summary(picture, progress, job)
    mesh = job.generation.mesh if job.generation else job.spec.mesh
    return models.FleetJob(
        **(dict(summary) | {"nodes": []}),
        finished=job.phase.finished,
        ranks=mesh.world_size,
        node_count=len(summary.nodes),
        checkpoint_at=job.checkpoints.saved_at or None,
        goodput=_recent(account.goodput) if account else None,
        trend=models.Trend.of(account.trend) if account else None,
    )


def fleet_checkpoints(picture: Picture, shown: Sequence[Job], at: float) -> models.FleetCheckpoints:
    """`shown`: the jobs of the list."""
    return models.FleetCheckpoints(
        at=at,
        jobs=[_saved(picture, job) for job in shown],
        jobs_left_out=len(picture.state.jobs) - len(shown),
    )


def _saved(picture: Picture, job: Job) -> models.FleetCheckpoint:
    steps = saved_steps(picture.state, job.name)
    newest = next((step for step in steps if step.newest), None)
    known_since = newest is not None and newest.step == job.checkpoints.step and job.checkpoints.saved_at
    return models.FleetCheckpoint(
        job=job.name,
        phase=job.phase,
        finished=job.phase.finished,
        ranks=(job.generation.mesh if job.generation else job.spec.mesh).world_size,
        newest=None if newest is None else job_views.checkpoint(newest),
        saved_at=known_since or None,
        complete=sum(step.complete for step in steps),
        incomplete=sum(not step.complete for step in steps),
        stored_step=next((step.step for step in steps if step.stored), None),
        store=job.spec.checkpoint.store,
        interval=job_views.interval(job),
    )


def _recent(value: time_classes.Recent) -> models.RecentGoodput:
    return models.RecentGoodput(
        since=value.since,
        wall_s=value.until - value.since,
        useful_s=value.seconds[time_classes.Class.USEFUL],
        unmeasured_s=value.seconds[time_classes.Class.RUNNING],
        badput_s={name.value: value.seconds[name] for name in time_classes.BADPUT},
    )


def fleet_nodes(picture: Picture, at: float) -> models.FleetNodes:
    """`at`: Unix seconds; a node's faults count less the older they are."""
    nodes = [picture.state.nodes[name] for name in sorted(picture.state.nodes)]
    jobs = {
        name: job.name
        for job in picture.state.jobs.values()
        if job.generation is not None and not job.phase.finished
        for name in job.generation.nodes
    }
    return models.FleetNodes(
        at=at,
        node=[each.name for each in nodes],
        state=[each.state for each in nodes],
        connected=[each.connected for each in nodes],
        job=[jobs.get(each.name, "") for each in nodes],
        zone=[each.zone for each in nodes],
        reason=[node_views.reason_of_node(picture, each, at) for each in nodes],
        faults_per_day=[_faults_per_day(picture.state, each, at) for each in nodes],
    )


def _faults_per_day(state: State, node: Node, at: float) -> float:
    return round(rate_per_day(node.faults, node.known_since, at, state.config.offenders), 6)


def rank_columns(picture: Picture, job: Job, at: float) -> models.RankColumns:
    """`at`: Unix seconds."""
    generation = None if job.phase.finished else job.generation
    names = list(dict.fromkeys(generation.nodes)) if generation else []
    index = {name: number for number, name in enumerate(names)}
    nodes = [picture.state.nodes.get(name) for name in names]
    size = generation.mesh.world_size if generation else 0
    column = [0] * size
    state, age_s = [UNREPORTED] * size, [-1] * size
    suspects = _suspects(picture.state, job)
    for placement in generation.placements if generation else ():
        number, ranks = index[placement.node], slice(placement.first_rank, placement.first_rank + placement.nproc)
        found, since = _processes(nodes[number], job, placement)
        if placement.node in suspects and found[0] != LOST:
            named = suspects[placement.node]
            found = [
                SUSPECT if None in named or rank in named else what
                for rank, what in zip(placement.ranks, found, strict=True)
            ]
        column[ranks] = [number] * placement.nproc
        state[ranks] = found
        age_s[ranks] = [max(0, int(at - began)) if began else -1 for began in since]
    return models.RankColumns(
        at=at,
        job=job.name,
        generation=job.number,
        mesh=dict(generation.mesh.dims) if generation else {},
        nodes=names,
        faults_per_day=[_faults_per_day(picture.state, node, at) if node else 0.0 for node in nodes],
        states=list(STATES),
        node=column,
        state=state,
        age_s=age_s,
    )


def _suspects(state: State, job: Job) -> Mapping[str, Container[int | None]]:
    """Node → ranks that open incidents of the job name; None = every rank of the node."""
    found: dict[str, set[int | None]] = {}
    for each in state.incidents.values():
        if each.job == job.name and each.node:
            found.setdefault(each.node, set()).add(each.rank)
    return found


def _processes(node: Node | None, job: Job, placement: Placement) -> tuple[list[int], list[float]]:
    """State of each rank of a placement, and when its process began (Unix seconds, 0 = not known)."""
    unknown = [0.0] * placement.nproc
    if node is None or node.lost:
        return [LOST] * placement.nproc, unknown
    if not node.workers_version:
        return [UNREPORTED] * placement.nproc, unknown
    name, number = job.name, job.number
    living = {each.rank: each.since for each in node.workers if each.generation == number and each.job == name}
    missing = ABSENT if job.phase is JobPhase.RUNNING else STARTING
    return (
        [ALIVE if rank in living else missing for rank in placement.ranks],
        [living.get(rank, 0.0) for rank in placement.ranks],
    )


def timeline(job: str, history: time_classes.History, run: Run, series: Series) -> models.Timeline:
    """`history`: of the run; takes up to a second for a hundred thousand steps."""
    spans = goodput.spans(history)
    middles = [series.since + (index + 0.5) * series.bucket_s for index in series.index]
    return models.Timeline(
        job=job,
        since=history.started_at,
        until=history.ended_at,
        bucket_s=series.bucket_s,
        at=[min(middle, history.ended_at) for middle in middles],
        step=list(series.step),
        loss=list(series.loss),
        tokens_per_s=list(series.tokens_per_s),
        world_sizes=list(history.world_sizes),
        spans=models.Spans(
            begin=[span.begin for span in spans],
            end=[span.end for span in spans],
            kind=[span.kind.value for span in spans],
        ),
        generations=[
            models.GenerationMark(
                at=each.at,
                generation=each.generation.number,
                attempt=each.generation.attempt,
                stage=each.stage.value,
                ranks=each.generation.mesh.world_size,
                reason=each.reason,
            )
            for each in run.generations[-MARKS_MAX:]
        ],
        incidents=[
            models.Mark.of(each, at=each.fault_at, until=each.first_step_at)
            for each in sorted(run.incidents, key=lambda each: each.fault_at)[-MARKS_MAX:]
        ],
    )
