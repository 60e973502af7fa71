"""The supervisor's core: all of its decisions, as one pure function.

    step(state, event) -> (state, commands)

Theory of operation. The shell folds one event after the other; each carries its time. The result (state, records,
acknowledged input) is committed in one atomic write before any command is carried out. A crash may therefore lose commands but
never state: every order stays in the outbox until its agent answers, and every timer and every question to a policy stays in
the state. `LeaderStarted` issues all of them again. Agents execute an order once, so issuing it twice does no harm.

    finding ──► incident ──► question to the policy ──► decision ──► PREPARE ──► START ──► every rank steps: RUNNING

    sessions.py    control sessions of agents; node_reports.py  their reports, which binding.py accepts only from the node
                   that they are about; operator_requests.py, fault_requests.py  what people ask for
    handling/      findings, decisions, a job from submission to end, and what runs compared with what should run
    changes/       from one generation of a job to the next
    repair/        nodes that fail
    saves/         saved steps; progress.py  the steps that generations have reached
    incidents/     incidents, and what a policy sees of them
    fleet/         nodes, and who is free
    model/         the state as values, and the turn that changes it
    rules/         rules that need no state

Each room uses those below it, and none above.

The core acts on no single witness, does nothing when in doubt, and gives the reason in every record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, assert_never

from holdfast.domain.evolve import evolve
from holdfast.supervisor import timers
from holdfast.supervisor.core import fault_requests, node_reports, operator_requests, progress, sessions
from holdfast.supervisor.core.changes import change, final_upload, handover, loans, planned
from holdfast.supervisor.core.fault_requests import check as check_fault
from holdfast.supervisor.core.fleet import breaker, invites, nodes, returns
from holdfast.supervisor.core.handling import (
    change_failures,
    decisions,
    findings,
    job_needs,
    jobs,
    notices,
    reconcile,
    resetting,
)
from holdfast.supervisor.core.handling.notices import check as check_notice
from holdfast.supervisor.core.handling.shortage import waits_for
from holdfast.supervisor.core.incidents import recipes
from holdfast.supervisor.core.incidents.views import check_submission, reserved_nodes, view
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.state import Breaker, Config, Invite, Node, State
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.operator_requests import check_agent_restart
from holdfast.supervisor.core.repair import capacity, link_tests, reboots, replacements
from holdfast.supervisor.core.repair.link_tests import STANDINGS as LINK_STANDINGS
from holdfast.supervisor.core.repair.link_tests import standing as link_standing
from holdfast.supervisor.core.saves import pruning, reports, retention
from holdfast.supervisor.core.saves.catalogue import SavedStep, holders, saved_steps, unwritten
from holdfast.supervisor.core.saves.earlier import check as check_earlier
from holdfast.supervisor.core.saves.pruning import check as check_pruning
from holdfast.supervisor.protocol import (
    AgentRestartRequested,
    BreakerResetRequested,
    CheckpointRequested,
    Command,
    Evaluate,
    Event,
    FaultRequested,
    FindingArrived,
    InviteMade,
    InviteRevoked,
    InviteUsed,
    JobStopRequested,
    JobSubmitted,
    LeaderStarted,
    MachineDeleted,
    MachineLabelled,
    MoreNodesRequested,
    NodeCordonRequested,
    NodeGone,
    NodeRepaired,
    NodeReported,
    NoticeRequested,
    PolicyAnswered,
    PolicyChangeRequested,
    Post,
    ProviderAnswered,
    PruneRequested,
    ResizeRequested,
    SetTimer,
    StartsSeen,
    StepsCompleted,
    StepSeen,
    TimerFired,
)
from holdfast.supervisor.timers import OfJob, Timer

__all__ = [
    "LINK_STANDINGS",
    "Batch",
    "Breaker",
    "Config",
    "Invite",
    "Job",
    "Node",
    "SavedStep",
    "State",
    "Written",
    "as_sends",
    "check_agent_restart",
    "check_earlier",
    "check_fault",
    "check_notice",
    "check_pruning",
    "check_submission",
    "holders",
    "link_standing",
    "reserved_nodes",
    "saved_steps",
    "step",
    "unwritten",
    "view",
    "waits_for",
]


# Timers that draw a conclusion from the absence of reports.
_SILENCE_TIMERS = (
    timers.PrepareTimeout,
    timers.FirstStepTimeout,
    timers.SlowStart,
    timers.ReconnectTimeout,
    timers.ResetTimeout,
    timers.RungTimeout,
    timers.WitnessTimeout,
    timers.FenceOver,
    timers.StopTimeout,
    timers.SaveTimeout,
    timers.CheckpointReportDue,
    timers.LostTimeout,
    timers.RanksDue,
    timers.StepDue,
)


def step(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Fold one event. Deterministic in state and event. Orders are returned as `Send`, broadcasts included."""
    batch = Batch(state)
    commands = batch.step(event)
    return batch.state, as_sends(commands)


def as_sends(commands: Iterable[Command]) -> tuple[Command, ...]:
    """The same commands, with each broadcast expanded to one `Send` per slot."""
    return tuple(chain.from_iterable(each.sends() if isinstance(each, Post) else (each,) for each in commands))


Written = Mapping[str, Mapping[Any, Iterable[str] | None]]


class Batch:
    """Folds several events in one turn, as `step` would one by one. An event that raises an exception leaves no trace."""

    def __init__(self, state: State) -> None:
        self._before = state
        self._turn = Turn(state, state.folded_at)
        self._folded: list[tuple[float, Event | Sequence[NodeReported]]] = []

    @property
    def state(self) -> State:
        """The newest state. It is valid until the next event is folded: do not keep it."""
        return self._turn.finish()

    @property
    def written(self) -> Written:
        """By table, keys of the rows that may have changed since the first event, each with its fields, None = any."""
        return self._turn.written

    def step(self, event: Event) -> tuple[Command, ...]:
        return self._fold(event.at, event)

    def reports(self, at: float, events: Sequence[NodeReported]) -> tuple[Command, ...]:
        """Fold reports that arrived at the same time. Reconciliation runs once, after the last."""
        return self._fold(at, events)

    def _fold(self, at: float, received: Event | Sequence[NodeReported]) -> tuple[Command, ...]:
        try:
            commands = self._step(at, received)
        except Exception:
            self._rebuild()
            raise
        self._folded.append((at, received))
        return commands

    def _step(self, at: float, received: Event | Sequence[NodeReported]) -> tuple[Command, ...]:
        self._turn.begin(at)
        if isinstance(received, Sequence):
            node_reports.on_reports(self._turn, received)
        else:
            _take(self._turn, received)
        job_needs.reconcile(self._turn)
        return self._turn.end()

    def _rebuild(self) -> None:
        """Replace the turn, which may contain half of an event, by one in which the earlier events are folded again."""
        self._turn = Turn(self._before, self._before.folded_at)
        for at, received in self._folded:
            self._step(at, received)


def _take(turn: Turn, event: Event) -> None:
    match event:
        case LeaderStarted():
            _lead(turn, event)
        case JobSubmitted():
            jobs.submit(turn, event)
        case JobStopRequested():
            jobs.request_stop(turn, event)
        case CheckpointRequested():
            jobs.request_checkpoint(turn, event)
        case PruneRequested():
            pruning.request(turn, event)
        case FaultRequested():
            fault_requests.request(turn, event)
        case ResizeRequested():
            jobs.request_resize(turn, event)
        case PolicyChangeRequested():
            operator_requests.change_policy(turn, event)
        case NodeCordonRequested():
            operator_requests.cordon(turn, event)
        case NodeRepaired():
            operator_requests.repaired(turn, event)
        case AgentRestartRequested():
            operator_requests.restart_agent(turn, event)
        case NoticeRequested():
            notices.on_request(turn, event)
        case MachineLabelled():
            nodes.set_zone(turn, event.node, event.zone)
        case MachineDeleted():
            nodes.forget(turn, event.node, event.reason)
        case NodeReported():
            node_reports.on_reports(turn, (event,))
        case NodeGone():
            sessions.on_gone(turn, event)
        case StepsCompleted():
            turn.set(diagnostics_at=event.at)
            jobs.on_steps(turn, event)
            handover.on_sign_of_step(turn, event.job, event.generation, event.step)
        case StepSeen():
            handover.on_step_reached(turn, event.node, event.reached)
        case StartsSeen():
            handover.on_started(turn, event.job, event.generation, event.slots)
        case FindingArrived():
            turn.set(diagnostics_at=event.at)
            findings.on_finding(turn, event.finding, event.age_s)
        case PolicyAnswered():
            decisions.on_answer(turn, event)
        case ProviderAnswered():
            replacements.on_answer(turn, event)
        case MoreNodesRequested():
            capacity.record(turn, event)
        case BreakerResetRequested():
            breaker.close(turn, event.reason)
        case InviteMade():
            invites.make(turn, event)
        case InviteRevoked():
            invites.revoke(turn, event)
        case InviteUsed():
            invites.use(turn, event)
        case TimerFired():
            if turn.timer_fired(event.timer):
                _timer(turn, event.timer)
        case _:
            assert_never(event)


def _lead(turn: Turn, event: LeaderStarted) -> None:
    """Issue everything again that the last leader may not have carried out. Its sessions have ended; agents reconnect."""
    turn.set(epoch=event.epoch, secret=event.secret, led_at=event.at)
    if event.returns is not None:
        turn.set(config=evolve(turn.config, returns=event.returns))
    if event.replacements is not None:
        turn.set(config=evolve(turn.config, replacements=event.replacements))
    if event.links is not None:
        turn.set(config=evolve(turn.config, links=event.links))
    if event.offenders is not None:
        turn.set(config=evolve(turn.config, offenders=event.offenders))
    link_tests.abandon(turn)
    turn.touch_all()
    _wait_for_agents(turn)
    turn.commands.extend(SetTimer(timer, due) for timer, due in sorted(turn.timers.items()))
    for incident in turn.questions:
        turn.commands.append(Evaluate(incident, turn.incidents[incident].job))
    turn.commands.extend(turn.orders(to_one=True))
    turn.commands.extend(Post(turn.broadcasts[job], slots) for job, slots in sorted(turn.unanswered.items()))
    if turn.nodes:
        turn.set_timer(timers.SessionsTimeout(event.epoch, event.at), event.at + turn.config.session_s)
    for name in turn.found(By.CONNECTED):  # training continued and saved meanwhile
        until = event.at + turn.config.session_s
        turn.put_node(name, unheard=True, stale_until=until, stale_session=turn.nodes[name].session)


def _wait_for_agents(turn: Turn) -> None:
    """Postpone conclusions from an agent's silence until agents had time to reconnect: no supervisor was listening before."""
    reconnected_by = turn.at + turn.config.session_s
    for timer, due in sorted(turn.timers.items()):
        if isinstance(timer, timers.SessionsTimeout):
            turn.cancel_timer(timer)  # of a term that ended before agents could reconnect to it
        elif isinstance(timer, _SILENCE_TIMERS):
            turn.postpone_timer(timer, max(due, reconnected_by, _due_from_now(turn, timer)))
    for name in turn.found(By.DEFERRED):
        turn.update(name, since=turn.at)


def _due_from_now(turn: Turn, timer: Timer) -> float:
    """When a timer is due that measures the time agents have for something, by this clock: the last leader's may differ."""
    if isinstance(timer, timers.ResetTimeout):
        return turn.at + turn.config.reset_s
    job = (
        turn.jobs.get(timer.job)
        if isinstance(timer, timers.PrepareTimeout | timers.FirstStepTimeout | timers.SlowStart | timers.FenceOver)
        else None
    )
    if job is None or job.change is None:
        return 0.0
    match timer:
        case timers.PrepareTimeout():
            return turn.at + change.prepare_timeout_s(turn, job, job.change)
        case timers.FirstStepTimeout():
            return turn.at + progress.start_patience_s(job)
        case timers.SlowStart():
            return turn.at + progress.LATER_START_S
        case _:
            return turn.at + turn.config.fence_s


def _timer(turn: Turn, timer: Timer) -> None:
    if isinstance(timer, OfJob):
        turn.touch(timer.job)
    match timer:
        case timers.PrepareTimeout(job, number):
            change_failures.on_prepare_timeout(turn, job, number)
        case timers.FirstStepTimeout(job, number):
            if (finding := change_failures.ranks_missing(turn, job, number)) is not None:
                findings.record_fault(turn, finding)
        case timers.SlowStart(job, number):
            change_failures.on_slow_start(turn, job, number)
        case timers.FenceOver(job, number):
            change_failures.on_fence_over(turn, job, number)
        case timers.FirstStepsDue(job, number):
            handover.on_stepping_timer(turn, job, number)
        case timers.ReconnectTimeout(job, number, node):
            change_failures.on_grace_over(turn, job, number, node)
        case timers.ResetTimeout(job, number):
            resetting.on_timer(turn, job, number)
        case timers.RungTimeout(job, incident):
            recipes.on_timer(turn, job, incident)
        case timers.PolicyTimeout(incident):
            if incident in turn.incidents:
                why = "default policy, because no answer came in time"
                decisions.decide_by_default(turn, turn.incidents[incident], why)
        case timers.WitnessTimeout(node):
            sessions.on_witness_timer(turn, node)
        case timers.LostTimeout(node):
            sessions.on_lost_timer(turn, node)
        case timers.SessionsTimeout(epoch, since):
            sessions.on_sessions_timer(turn, epoch, since)
        case timers.SaveTimeout(job):
            planned.on_save_timeout(turn, job)
        case timers.CheckpointReportDue(job):
            reports.review(turn, job)
        case timers.RetentionDue(job):
            retention.review(turn, job)
        case timers.FinalUploadTimeout(job):
            final_upload.on_timer(turn, job)
        case timers.StopTimeout(job):
            jobs.on_stop_timer(turn, job)
        case timers.DeferralOver(job) | timers.RetryDue(job):
            job_needs.retry(turn, job)
        case timers.DegradedStart(job):
            job_needs.start_degraded(turn, job)
        case timers.KeptOver(job):
            loans.on_kept_timer(turn, job)
        case timers.NoticeDue(node):
            notices.on_timer(turn, node)
        case timers.ReturnDue(node):
            returns.on_timer(turn, node)
        case timers.RebootDue(node):
            reboots.review(turn, node)
        case timers.ReplacementDue(node):
            replacements.review(turn, node)
        case timers.LinkTestTimeout(node, partner):
            link_tests.on_timeout(turn, node, partner)
        case timers.LinkTestsDue():
            link_tests.on_timer(turn)
        case timers.RanksDue(job):
            reconcile.on_timer(turn, job)
        case timers.StepDue(job):
            reconcile.on_still_timer(turn, job)
        case timers.PlannedChangeDue() | timers.WarningDue() | timers.LoanDue():
            pass  # reconciliation runs after every event anyway
        case timers.BreakerWindowOver():
            breaker.close(turn, "its window has passed")
        case _:
            assert_never(timer)
