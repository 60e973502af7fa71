"""Domain values → response models."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from holdfast.domain import spans, tracing
from holdfast.domain.generations import Generation
from holdfast.domain.incidents import Action, Incident
from holdfast.domain.nodes import TERMINATION, NodeState, Preflight
from holdfast.domain.rules import rule_of
from holdfast.domain.tiers import DURABLE, STORE
from holdfast.supervisor.api import incident_models, job_models, node_models
from holdfast.supervisor.core import (
    SavedStep,
    State,
    holders,
    reserved_nodes,
    returns,
    saved_steps,
    unwritten,
    waits_for,
)
from holdfast.supervisor.core.job import Job
from holdfast.supervisor.core.lifecycle import Failed, Suspended
from holdfast.supervisor.core.links import LinkTest
from holdfast.supervisor.core.nodes import unknown_job
from holdfast.supervisor.core.offenders import rate_per_day, score
from holdfast.supervisor.core.progress import start_patience_s
from holdfast.supervisor.core.state import Node
from holdfast.supervisor.core.wording import listed, moment
from holdfast.supervisor.history.protocol import ActionEntry
from holdfast.supervisor.history.time_classes import BADPUT, Class, Ledger
from holdfast.supervisor.leader.picture import Picture, Progress
from holdfast.supervisor.protocol import FindingJudged, JobPhase, PolicyChanged
from holdfast.supervisor.published import PolicyAsked
from holdfast.wire import job_sections, jobfile, records

NO_LEADER = "no supervisor leads, so this is the state"

SILENT_S = 60.0  # since its start: a script that has reported no step for so long is shown as one that reports none


def incident(value: Incident) -> incident_models.Incident:
    return incident_models.Incident(
        id=value.id,
        job=value.job,
        kind=value.kind,
        cause=value.cause,
        state=value.state,
        severity=value.severity,
        node=value.node,
        rank=value.rank,
        gpu=value.gpu,
        generation=value.generation,
        new_generation=value.new_generation,
        action=None if value.action is None else _decision(value.action),
        decided_by=value.decided_by,
        fault_at=value.fault_at,
        detected_at=value.detected_at,
        decided_at=value.decided_at,
        prepared_at=value.prepared_at,
        first_step_at=value.first_step_at,
        restored_step=value.restored_step,
        last_step=value.last_step,
        rework_steps=value.rework_steps,
        phases_s={name: round(seconds, 6) for name, seconds in value.phases_s.items()},
        restored_from=dict(value.restored_from),
        outcome=value.outcome,
        trace_id=value.trace_id,
        findings=list(value.findings),
        evidence=dict(value.evidence),
        walk=[
            incident_models.Rung(
                recipe=rung.recipe,
                rung=rung.number,
                action=rung.steps,
                nodes=list(rung.nodes),
                began_at=rung.began_at,
                ended_at=rung.ended_at,
                within_s=rung.within_s,
                end=rung.end,
                reason=rung.reason,
                why=rung.why,
            )
            for rung in value.walk
        ],
        confidence=value.confidence,
        cost_share=value.cost_share,
    )


def _decision(value: Action) -> incident_models.Decision:
    return incident_models.Decision(
        kind=value.kind,
        reason=value.reason,
        nodes=list(value.nodes),
        dp=value.dp,
        within_s=value.within_s,
        before=[_decision(each) for each in value.before],
        fallbacks=[_decision(each) for each in value.fallbacks],
    )


def finding(judged: FindingJudged) -> incident_models.Finding:
    value, rule = judged.finding, rule_of(judged.finding)
    return incident_models.Finding(
        id=value.id,
        kind=value.kind,
        severity=value.severity,
        summary=value.summary,
        node=value.node,
        job=value.job,
        generation=value.generation,
        rank=value.rank,
        gpu=value.gpu,
        at=value.at,
        since=value.since,
        confidence=value.confidence,
        rule=rule.rule,
        source=rule.source,
        advice=rule.advice,
        evidence=dict(value.evidence),
        recommended_actions=list(value.recommended_actions),
        ttl_s=value.ttl_s,
        judged_at=judged.at,
        verdict=judged.verdict,
        incident=judged.incident,
    )


def trace(value: Incident) -> incident_models.Trace:
    own = [
        incident_models.Span(
            name=span.name,
            service=span.service,
            span_id=span.context.span_id,
            parent_id=span.parent,
            start=span.start,
            end=span.end,
            attributes={tracing.ATTRIBUTE_PREFIX + name: value for name, value in span.attributes.items()},
            error=span.error,
        )
        for span in spans.of_trace(value)
    ]
    return incident_models.Trace(incident=value.id, trace_id=value.trace_id, spans=own)


def action(done: ActionEntry) -> incident_models.Action:
    return incident_models.Action(
        id=f"{done.incident.id}.{done.number}",
        incident=done.incident.id,
        job=done.incident.job,
        kind=done.action.kind,
        reason=done.action.reason,
        decided_by=done.incident.decided_by,
        at=done.at,
        nodes=list(done.action.nodes),
        dp=done.action.dp,
        generation=done.incident.generation,
        new_generation=done.incident.new_generation,
    )


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
        return f"{NO_LEADER} at {moment(state.folded_at, time.time())}; until then: {job.reason}"
    held = _held(picture, job)
    if silent and held:
        return f"{held}; before that: {job.reason}"
    if silent:
        return f"not confirmed by {listed(sorted(silent))} that every rank lives; before that: {job.reason}"
    further = [job.final_upload.status] if job.final_upload else []
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
    return job_models.Interval(steps=chosen.steps, auto=auto, store_s=chosen.store_s, reason=chosen.reason)


def checkpoint(step: SavedStep) -> job_models.Checkpoint:
    return job_models.Checkpoint(
        attempt=step.attempt,
        step=step.step,
        mesh=dict(step.mesh.dims),
        tiers={**step.ranks, STORE: step.stored},
        complete=step.complete,
        newest=step.newest,
        needed=step.needed,
    )


def shard_sources(state: State, value: Job, step: SavedStep) -> job_models.ShardSources:
    ranks = {
        rank: {name: state.nodes[name].facts.replicator_endpoint for name in names}
        for rank, names in holders(state, value.name, step.attempt, step.step).items()
    }
    return job_models.ShardSources(
        attempt=step.attempt, step=step.step, mesh=dict(step.mesh.dims), token=value.token, ranks=ranks
    )


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


def node(picture: Picture, value: Node, at: float) -> node_models.Node:
    """`at`: Unix seconds; a node's faults count less the older they are."""
    facts = value.facts
    return node_models.Node(
        node=value.name,
        state=value.state,
        connected=value.connected,
        inventoried=value.inventoried,
        job=_job_of(picture, value.name),
        reason=reason_of_node(picture, value, at),
        zone=value.zone,
        capacity=facts.capacity,
        hostname=facts.hostname,
        address=facts.address,
        replicator_endpoint=facts.replicator_endpoint,
        incarnation=facts.incarnation,
        agent_pid=facts.agent_pid,
        directory=facts.directory,
        kernel_log=facts.kernel_log,
        disk_dir=facts.disk_dir,
        version=facts.version,
        quarantined=value.quarantined,
        preflight=preflight(value.preflight) if value.preflight is not None else None,
        faults_per_day=rate_per_day(value.faults, value.known_since, at, picture.state.config.offenders),
        boot_id=facts.boot_id,
        hold_until=returns.held_until(value, at),
        probation_until=returns.on_probation_until(value, at),
        returns_by=_returns_by(value),
        notices=[
            node_models.Notice(source=each.source, event=each.event, starts_at=each.starts_at)
            for each in value.notices
            if each.event
        ],
        telemetry_cut_since=picture.telemetry_cut_since(value.name),
        pool=facts.pool,
    )


def _returns_by(value: Node) -> Literal["", "itself", "operator"]:
    if not value.unschedulable_reason:
        return "itself" if value.unfit and value.state is NodeState.CORDONED else ""
    return "itself" if returns.comes_back(value) else "operator"


def node_detail(picture: Picture, value: Node, at: float, incidents: Sequence[Incident]) -> node_models.NodeDetail:
    faults = [
        node_models.Fault(at=each.at, incident=each.incident, job=each.job, weight=each.weight, shared=each.shared)
        for each in value.faults
    ]
    past = [incident(each) for each in incidents]
    links = [link_test(each) for each in value.links]
    rules = picture.state.config.offenders
    return node_models.NodeDetail(
        **dict(node(picture, value, at)),
        faults=faults,
        incidents=past,
        links=links,
        faults_weigh=round(score(value.faults, at, rules), 3),
        quarantine_limit=rules.limit,
    )


def link_test(value: LinkTest) -> node_models.LinkTest:
    measured, than = value.measured, value.expected
    return node_models.LinkTest(
        at=value.at,
        partner=value.partner,
        out_bytes_per_s=measured.out_bytes_per_s,
        in_bytes_per_s=measured.in_bytes_per_s,
        round_trip_s=measured.round_trip_s,
        failure=measured.failure,
        verdict=value.verdict.value,
        expected_bytes_per_s=than.bytes_per_s if than is not None else None,
        expected_round_trip_s=than.round_trip_s if than is not None else None,
    )


def preflight(value: Preflight) -> node_models.Preflight:
    checks = [node_models.Check(name=each.name, ok=each.ok, detail=each.detail) for each in value.checks]
    passed = bool(value.at) and not value.failures
    return node_models.Preflight(at=value.at, passed=passed, duration_s=round(value.duration_s, 3), checks=checks)


def _job_of(picture: Picture, name: str) -> str:
    """The unfinished job whose newest generation includes the node."""
    for job in picture.state.jobs.values():
        if job.generation is not None and not job.phase.finished and job.generation.slot_of(name) is not None:
            return job.name
    return ""


def reason_of_node(picture: Picture, value: Node, at: float) -> str:
    """Why it is cordoned or lost, or will be; empty when there is nothing to say. `at`: Unix seconds."""
    standing = _standing_of_node(picture, value, at)
    since = picture.telemetry_cut_since(value.name)
    if since is None:
        return standing
    cut = (
        f"no telemetry of it has reached diagnostics since {moment(since, at)}: faults there are found late; check "
        "diagnostics and the network between them"
    )
    return f"{standing}; {cut}" if standing else cut


def _standing_of_node(picture: Picture, value: Node, at: float) -> str:
    if not picture.leading:
        return f"{NO_LEADER} at {moment(picture.state.folded_at, at)}"
    standing = returns.standing(value, at, picture.state.config.returns.probation_s)
    if value.unschedulable_reason and value.removal is None:
        # An operator's cordon; the standing is about an earlier fault.
        return "; ".join(filter(None, (value.unschedulable_reason, standing)))
    if value.unschedulable_reason:
        return standing or value.unschedulable_reason
    if value.lost:
        if value.asked_to_end:
            return "left: its agent was asked to end; it comes back when an agent is started there again"
        return (
            "lost: no contact with its agent; check its power, network and agent; it comes back when its agent connects"
        )
    leaves = value.notice is not None and value.notice.source == TERMINATION
    if not value.connected:
        return "left: its agent was asked to end" if leaves else "no control session at the moment"
    if unknown := unknown_job(value, picture.state.jobs):
        return (
            f"runs workers of {unknown}, a job that is not known here: left alone until `holdfast jobs stop {unknown}`"
        )
    if value.notice is not None:
        return f"leaves: {value.notice.event}" if leaves else f"its machine will be taken: {value.notice.event}"
    if value.reset_due is not None:
        return f"gets no ranks before a GPU is reset: {value.reset_due.cause}"
    if value.unfit:
        again = "it tests itself again every minute, and may have ranks when it passes"
        return f"failed its pre-flight: {value.unfit}; {again}"
    return "tests itself before it gets ranks" if value.untested else standing


def goodput(job: str, started_at: float, ledger: Ledger) -> job_models.Goodput:
    return job_models.Goodput(
        job=job,
        started_at=started_at,
        wall_s=ledger.wall_s,
        useful_s=ledger.seconds[Class.USEFUL],
        unmeasured_s=ledger.seconds[Class.RUNNING],
        badput_s={name.value: ledger.seconds[name] for name in BADPUT},
        goodput_job=ledger.goodput_job,
        goodput_paid=ledger.goodput_paid,
        fault_free_tokens_per_s=ledger.fault_free_tokens_per_s,
        fault_free_flops_per_s=ledger.fault_free_flops_per_s,
        tokens=ledger.tokens,
        rework_steps=ledger.rework_steps,
        world_sizes=list(ledger.world_sizes),
        tokens_per_s=list(ledger.tokens_per_s),
    )
