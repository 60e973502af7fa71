"""Jobs, their checkpoints, policies and time → response models."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from holdfast.domain.generations import Generation
from holdfast.domain.tiers import DURABLE, STORE
from holdfast.supervisor.api import job_models
from holdfast.supervisor.api.incident_views import incident
from holdfast.supervisor.api.node_views import NO_LEADER
from holdfast.supervisor.core import SavedStep, State, holders, reserved_nodes, saved_steps, unwritten, waits_for
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Failed, Suspended
from holdfast.supervisor.core.progress import start_patience_s
from holdfast.supervisor.core.rules.wording import listed, moment
from holdfast.supervisor.history.time_classes import BADPUT, Class, Ledger
from holdfast.supervisor.picture import Picture, Progress
from holdfast.supervisor.protocol import JobPhase, PolicyChanged
from holdfast.supervisor.published import PolicyAsked
from holdfast.wire import job_sections, jobfile, records

SILENT_S = 60.0  # since its start: a script that has reported no step for so long is shown as one that reports none


def job_summary(picture: Picture, progress: Progress, job: Job) -> job_models.JobSummary:
    generation = job.generation
    open_ones = [each for each in picture.state.incidents.values() if each.job == job.name]
    oldest = min(open_ones, key=lambda each: (each.detected_at, each.id), default=None)
    silent = picture.unconfirmed_since(job) if job.phase is JobPhase.RUNNING else {}
    observed = picture.observed(job) if job.progress.reports_no_steps and job.phase is JobPhase.RUNNING else None
    return job_models.JobSummary(
        name=job.name,
        phase="unknown" if silent else job.phase,
        reason=_reason_of(picture, job, silent),
        unknown_since=min(silent.values()) if silent else None,
        mesh=dict((generation.mesh if generation else job.spec.mesh).dims),
        target_dp=job.target_dp,
        min_dp=job.spec.min_dp,
        max_dp=job.spec.max_dp,
        generation=job.number,
        nodes=list(generation.nodes) if generation else [],
        step=None if _is_without_steps(picture, job, observed is not None) else job.progress.finished_step,
        observed_steps=observed[0] if observed else None,
        observed_step_s=observed[1] if observed else None,
        checkpoint_step=job.checkpoints.step,
        loss=job.progress.loss,
        tokens_per_s=progress.tokens_per_s(job.name) if job.phase is JobPhase.RUNNING else None,
        submitted_at=job.submitted_at,
        priority=job.spec.priority,
        permanent_failure=isinstance(job.doing, Failed) and job.doing.permanent,
        leaving=job.final_upload is not None and not job.final_upload.finished,
        incident=incident(oldest) if oldest else None,
    )


def _is_without_steps(picture: Picture, job: Job, is_observed: bool) -> bool:
    """Whether the script reports no steps. A silent one may still be importing, unless its optimizer steps were observed."""
    if not job.progress.reports_no_steps:
        return False
    now = picture.at or picture.state.folded_at
    return is_observed or job.phase.finished or now - job.membership.running_at >= SILENT_S


def _stepless(picture: Picture, job: Job) -> str:
    """What is to be known of a job that has reported no step for longer than a start usually takes; empty otherwise."""
    now = picture.at or picture.state.folded_at
    since_start_s = now - job.membership.running_at
    if since_start_s < SILENT_S:
        return ""
    if job.phase is JobPhase.RUNNING and job.progress.reports_no_steps:
        return "its script reports no steps (docs/scripts.md)"
    if job.phase is JobPhase.STARTING:
        return (
            f"not every rank has reported a step {since_start_s:.0f} s after the start; if the script takes longer than "
            f"{start_patience_s(job):g} s, raise limits.first_step_timeout_s; it must call run.step if it uses holdfast.train"
        )
    return ""


def _held(picture: Picture, job: Job) -> str:
    """Which fault of the job is not acted on because the breaker is open, and until when; empty if there is none."""
    state = picture.state
    if (until := state.breaker.open_until) is None:
        return ""
    undecided = (each for each in state.incidents.values() if each.job == job.name and not each.planned)
    oldest = min((each for each in undecided if each.action is None), key=lambda each: each.detected_at, default=None)
    if oldest is None:
        return ""
    return (
        f"no action for {oldest.id} while the circuit breaker is open ({state.breaker.reason}), until "
        f"{moment(until, time.time())} or `holdfast breaker reset`: {oldest.cause}"
    )


def _reason_of(picture: Picture, job: Job, silent: Mapping[str, float]) -> str:
    state = picture.state
    if silent and not picture.leading:
        why = f" ({picture.trouble})" if picture.trouble else ""
        return f"{NO_LEADER} at {moment(state.folded_at, time.time())}{why}; until then: {job.reason}"
    held = _held(picture, job)
    if silent:
        why = held or f"not confirmed by {listed(sorted(silent))} that every rank lives"
        return f"{why}; before that: {job.reason}"
    further = [job.final_upload.status] if job.final_upload else []
    if picture.trouble and not job.phase.finished:
        further.append(f"no decisions are made now: {picture.trouble}")
    if held:
        further.append(held)
    if stepless := _stepless(picture, job):
        further.append(stepless)
    if waiting := waits_for(state, job):
        further.append(waiting)
    if job.lent is not None and not job.phase.finished:
        further.append(f"keeps {job.lent.dp} replicas after a loan to {job.lent.to}, and grows when nodes are free")
    return "; ".join((job.reason, *further))


def job(picture: Picture, progress: Progress, value: Job, *, ranks: bool = True) -> job_models.Job:
    summary = job_summary(picture, progress, value)
    resumed = value.checkpoints.resumed
    spec = job_sections.JobFile.model_validate(jobfile.to_body(value.spec, policy_source=False))
    placed = value.generation if ranks and not value.phase.finished else None
    return job_models.Job(
        **dict(summary),
        goes_on_from=resumed.step if resumed is not None else None,
        kept=_kept(picture.state, value),
        suspended=_suspended(picture.state, value),
        interval=interval(value),
        reserved=list(reserved_nodes(picture.state, value)),
        ranks=_ranks(picture, value.name, placed) if placed is not None else [],
        spec=spec,
    )


def policy(value: Job, changes: Sequence[PolicyChanged]) -> job_models.Policy:
    """`changes`: of the newest run, oldest first."""
    now = value.spec.policy_spec
    return job_models.Policy(
        name=now.name,
        sha256=now.sha256,
        params=dict(now.params),
        source=now.source,
        since=next((each.at for each in reversed(changes) if each.policy == now), None),
        before=[
            job_models.EarlierPolicy(name=each.policy.name, sha256=each.policy.sha256, since=each.at)
            for each in changes[:-1]
        ],
    )


def policy_question(asked: PolicyAsked) -> job_models.PolicyQuestion:
    tree = json.loads(records.dumps(asked, PolicyAsked))
    return job_models.PolicyQuestion(**tree)


def _kept(state: State, value: Job) -> job_models.Kept | None:
    if not value.phase.finished:
        return None
    steps = [step for step in saved_steps(state, value.name) if step.complete and any(step.ranks.values())]
    newest = next((step for step in steps if step.newest), steps[0] if steps else None)
    if newest is None:
        return None
    directories = _directories(state, value.name, holders(state, value.name, newest.attempt, newest.step))
    on_disk = any(newest.ranks[tier] == newest.mesh.world_size for tier in DURABLE)
    return job_models.Kept(
        attempt=newest.attempt,
        step=newest.step,
        on_disk=on_disk,
        directories=directories,
        unwritten={} if on_disk else unwritten(state, value.name, newest.attempt, newest.step),
    )


def _suspended(state: State, value: Job) -> job_models.Suspended | None:
    doing = value.doing
    if not isinstance(doing, Suspended):
        return None
    steps = saved_steps(state, value.name, away=True)
    found = next((each for each in steps if (each.attempt, each.step) == (doing.attempt, doing.step)), None)
    names = holders(state, value.name, doing.attempt, doing.step, away=True)
    members = value.generation.nodes if value.generation else ()
    on_disk = found is not None and any(found.ranks[tier] == found.mesh.world_size for tier in DURABLE)
    stored = found is not None and found.stored
    return job_models.Suspended(
        since=doing.at,
        step=doing.step,
        attempt=doing.attempt,
        tiers={} if found is None else {**found.ranks, STORE: found.stored},
        durable=stored if value.spec.checkpoint.store else on_disk,
        directories=_directories(state, value.name, names),
        nodes_left=[name for name in members if name in state.nodes and state.nodes[name].connected],
    )


def _directories(state: State, job: str, holding: Mapping[int, Sequence[str]]) -> dict[str, str]:
    """Of the nodes that have a disk, among those that hold shards."""
    names = sorted({name for names in holding.values() for name in names})
    return {name: f"{disk}/{job}" for name in names if (disk := state.nodes[name].facts.disk_dir)}


def interval(value: Job) -> job_models.Interval | None:
    chosen = value.checkpoints.interval
    if chosen is None:
        return None
    auto = not value.spec.checkpoint.interval_steps
    return job_models.Interval.of(chosen, auto=auto)


def checkpoint(step: SavedStep) -> job_models.Checkpoint:
    return job_models.Checkpoint.of(step, mesh=dict(step.mesh.dims), tiers={**step.ranks, STORE: step.stored})


def shard_sources(state: State, value: Job, step: SavedStep) -> job_models.ShardSources:
    ranks = {
        rank: {name: state.nodes[name].facts.replicator_endpoint for name in names}
        for rank, names in holders(state, value.name, step.attempt, step.step).items()
    }
    return job_models.ShardSources.of(step, mesh=dict(step.mesh.dims), token=value.token, ranks=ranks)


def _ranks(picture: Picture, name: str, generation: Generation) -> list[job_models.Rank]:
    ranks = []
    for placement in generation.placements:
        node = picture.state.nodes.get(placement.node)
        state = node.state.value if node else "unknown"
        mine = (
            each for each in (node.workers if node else ()) if (each.job, each.generation) == (name, generation.number)
        )
        living = {each.rank: each for each in mine}
        for rank in placement.ranks:
            worker = living.get(rank)
            pid, since = (worker.pid, worker.since or None) if worker else (None, None)
            ranks.append(job_models.Rank(rank=rank, node=placement.node, state=state, pid=pid, since=since))
    return ranks


def goodput(job: str, started_at: float, ledger: Ledger) -> job_models.Goodput:
    return job_models.Goodput.of(
        ledger,
        job=job,
        started_at=started_at,
        useful_s=ledger.seconds[Class.USEFUL],
        unmeasured_s=ledger.seconds[Class.RUNNING],
        badput_s={name.value: ledger.seconds[name] for name in BADPUT},
    )
