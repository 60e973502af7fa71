"""One term of leadership: from the lease to its loss.

    findings, steps, inbox ──► fold ──► commit (state, records, acknowledgements: one fenced write) ──► act

Nothing is done before it is committed, so the next leader knows of it: unanswered orders, timers and questions are in the state
and are issued again. Any error of the event log ends the term: the outcome of a write may be unknown, and the next term begins
from what the log contains.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import TaskGroup

from holdfast.domain.errors import HoldfastError, StaleEpoch, Unavailable
from holdfast.domain.evolve import evolve
from holdfast.log.names import LEADER_LEASE, SUPERVISOR_GROUP, SUPERVISOR_STREAMS
from holdfast.log.protocol import FencedLog, Lease
from holdfast.runtime.garbage import collect_at_rest
from holdfast.runtime.service import guarded
from holdfast.runtime.steady_clock import SteadyClock
from holdfast.runtime.telling.refusal_log import Repeats
from holdfast.supervisor import protocol
from holdfast.supervisor.agents import beats
from holdfast.supervisor.agents.beats import Reported
from holdfast.supervisor.agents.sessions import Sessions
from holdfast.supervisor.agents.unanswered import Unanswered
from holdfast.supervisor.alerts.alert import REDIS
from holdfast.supervisor.core import State, view
from holdfast.supervisor.core.repair.capacity import lacking
from holdfast.supervisor.fault_rules import OwnFaultRules
from holdfast.supervisor.history.protocol import History
from holdfast.supervisor.inbox import InboxWriter
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.leader.cluster import ClusterBridge, FleetOfTerm
from holdfast.supervisor.leader.fold import Folded, Folder
from holdfast.supervisor.leader.intake import Input, Intake, take
from holdfast.supervisor.leader.kept import Kept
from holdfast.supervisor.leader.own_faults import OwnFaults
from holdfast.supervisor.leader.timers import Timers
from holdfast.supervisor.link_rules import LinkRules
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.picture import Picture
from holdfast.supervisor.policies.questions import Questions
from holdfast.supervisor.policies.runner import PolicyRunner
from holdfast.supervisor.providers import Provider, Supplier, asking
from holdfast.supervisor.providers.demand import Demand, DemandRules
from holdfast.supervisor.published import LeaderChanged, PolicyAsked
from holdfast.supervisor.requests import OperatorRequest
from holdfast.supervisor.return_rules import ReplacementRules, ReturnRules
from holdfast.supervisor.telemetry import announce, tracing
from holdfast.supervisor.timers import Timer

# All leaders read as one consumer, so entries that a previous leader read but did not acknowledge are delivered again at once.
CONSUMER = "leader"
BATCH_MAX = 256
BATCHES_AHEAD = 2
BEATS_S = 1.0
FIRST_STEPS_MAX = 100_000  # of heartbeats that wait to be folded
CLOCKS_DIFFER_S = 10.0  # a difference between two leaders' clocks that is logged
DEMAND_S = 10.0  # between two checks of the nodes that jobs lack

log = structlog.get_logger("holdfast.supervisor.leader.term")


class LeaseLost(StaleEpoch):
    """Another supervisor may lead: this one must not act any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """A leader that cannot renew its lease within `ttl_s` stops by itself `margin_s` before another one can start."""

    ttl_s: float = 3.0
    renew_s: float = 1.0
    retry_s: float = 0.1
    margin_s: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What every term of this supervisor uses. `clock`: Unix seconds. `api`: where the API of this supervisor answers."""

    event_log: FencedLog
    history: History
    policies: PolicyRunner
    clock: Callable[[], float]
    supervisor: str
    api: str
    times: LeaseTimes = LeaseTimes()
    returns: ReturnRules | None = None
    replacements: ReplacementRules | None = None
    links: LinkRules | None = None
    offenders: OffenderRules | None = None
    provider: Provider | None = None
    supplier: Supplier | None = None
    demand: DemandRules = field(default_factory=DemandRules)
    own_faults: OwnFaults | None = None
    bridge: ClusterBridge | None = None


class Term:
    """Run once. `sessions` accepts agents from the beginning: their reports wait in the inbox until they are folded."""

    def __init__(self, parts: Parts, *, lease: Lease, leased_at_s: float, kept: Kept | None = None) -> None:
        """`leased_at_s`: by the loop's clock, before the lease was requested. `kept`: the state of earlier terms here."""
        self._parts = parts
        self._log = parts.event_log
        self._lease = lease
        self._leased_at_s = leased_at_s
        self._kept = kept or Kept()
        self._clock = SteadyClock(parts.clock, anyio.current_time)
        self._demand = Demand(parts.demand)
        self._own_faults = parts.own_faults or OwnFaults(OwnFaultRules(), parts.event_log)
        self._inbox = InboxWriter(parts.event_log)
        self.sessions = Sessions(lease.epoch, self._inbox, self._clock, self._on_first_steps)
        self._timers = Timers(self._clock)
        self._internal: deque[Input] = deque()  # events of the shell itself
        self._first_steps: deque[Input] = deque()  # of heartbeats
        self._read: deque[Intake] = deque()
        self._reading_trouble = ""  # why findings and reports cannot be read; empty = they can
        self._questions = Questions()
        self._unanswered = Unanswered()
        self._wake = anyio.Event()
        self._room = anyio.Event()
        self._folder: Folder | None = None
        self._tasks: TaskGroup | None = None

    @property
    def picture(self) -> Picture | None:
        """None until the state has been loaded."""
        if self._folder is None:
            return None
        return Picture(
            self._folder.state,
            leading=True,
            at=self._clock(),
            heard_s_ago=self.sessions.heard_s_ago,
            steps_of=self.sessions.steps_of,
            telemetry_cut_s=self.sessions.telemetry_cut_s,
            versions_of=self.sessions.versions_of,
            clock_ahead_s=self.sessions.clock_ahead_s,
        )

    @property
    def trouble(self) -> str:
        """Why reports and requests wait outside the event log, or findings in it; empty if none does."""
        return self._inbox.trouble or self._reading_trouble

    async def run(self) -> None:
        """Run until the lease or the event log is lost: raises `LeaseLost`, `StaleEpoch` or `Unavailable`, in a group."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                guarded(tasks, "lease", self._keep_lease)
                await self._begin()
                guarded(tasks, "inbox", self._inbox.run)
                guarded(tasks, "timers", lambda: self._timers.run(self._on_timer))
                guarded(tasks, "beats", self._compare_heartbeats)
                guarded(tasks, "streams", self._read_streams)
                if self._parts.supplier is not None:
                    guarded(tasks, "demand", partial(self._ask_for_more, self._parts.supplier))
                guarded(tasks, "fold", self._fold)
                if self._parts.bridge is not None:
                    guarded(tasks, "bridge", partial(self._parts.bridge.run, self._fleet()))
        finally:
            if self._folder is not None:
                self._kept.keep(self._folder.state, anyio.current_time())
            self._folder = None
            self.sessions.close_all("not the leader any more")

    def _fleet(self) -> FleetOfTerm:
        assert self._folder is not None
        folder = self._folder
        return FleetOfTerm(lambda: folder.state, lambda event: self._enqueue(Input(event)), self._clock)

    def frozen(self, length_s: float) -> None:
        """This process was frozen. Postpone timers, so that reports of that time are folded before their absence counts."""
        self._timers.postpone(length_s)

    # ------------------------------------------------------------------ the lease

    async def _keep_lease(self) -> None:
        times = self._parts.times
        good_until_s = self._leased_at_s + times.ttl_s - times.margin_s
        pause_s = times.renew_s
        repeats = Repeats(times.ttl_s, anyio.current_time)
        while True:
            await anyio.sleep(min(pause_s, max(0.0, good_until_s - anyio.current_time())))
            asked_at_s = anyio.current_time()
            held: bool | None = None
            with anyio.move_on_at(good_until_s):
                try:
                    held = await self._log.renew(self._lease, times.ttl_s, self._time_to_record())
                except Unavailable as error:
                    if repeats.is_due(str(error)):
                        log.warning("the lease is not renewed", reason=str(error))
            if held is False:
                raise LeaseLost(f"the lease of epoch {self._lease.epoch} was lost")
            if held:
                good_until_s = asked_at_s + times.ttl_s - times.margin_s
            elif anyio.current_time() >= good_until_s:
                raise LeaseLost(f"the lease of epoch {self._lease.epoch} could not be renewed for {times.ttl_s:g} s")
            pause_s = times.renew_s if held else times.retry_s

    def _time_to_record(self) -> float | None:
        """The time for the successor to continue; None before this leader has continued that of its predecessor."""
        return self._clock() if self._folder is not None else None

    # ------------------------------------------------------------------ begin

    async def _begin(self) -> None:
        """Load the state that the last leader committed, and issue again what it may not have carried out."""
        parts = await self._log.snapshot(LEADER_LEASE)
        stored = _load(parts)
        state, lost = self._kept.choose(stored, self._lease.epoch)
        if state is stored and snapshot.is_current(parts):
            folder = Folder(state, self._lease.epoch, committed=state)
        else:
            folder = Folder(state, self._lease.epoch, obsolete=parts)
        await self._resume_time(state)
        at = self._clock()
        started = protocol.LeaderStarted(
            at,
            self._lease.epoch,
            secrets.token_hex(16),
            self._parts.returns,
            self._parts.replacements,
            self._parts.links,
            self._parts.offenders,
        )
        folded = folder.fold([Input(started)], at)
        if folded.state.epoch != self._lease.epoch:
            raise RuntimeError(f"the core did not take over epoch {self._lease.epoch}; the log has the reason")
        record = LeaderChanged(at, self._lease.epoch, self._parts.supervisor, self._parts.api)
        if lost:
            folded = _with(folded, protocol.Noted(at, REDIS, lost))
        folded = _with(folded, record)
        await self._log.commit(self._lease, folder.commit(folded, {}))
        folder.keep(folded)
        self._folder, self._kept.led, self._kept.lost = folder, True, False
        jobs = sum(not job.phase.finished for job in state.jobs.values())
        log.info(
            "leading", epoch=self._lease.epoch, jobs=jobs, nodes=len(state.nodes), orders=sum(1 for _ in state.sends())
        )
        self._act(folded)

    async def _resume_time(self, state: State) -> None:
        """Continue the time of the previous leader: this machine's clock may differ from its clock by any amount."""
        renewal = await self._log.last_renewal(LEADER_LEASE)
        own = self._clock()
        if renewal is not None:
            self._clock.resume(renewal.at, renewal.ago_s)
        self._clock.not_before(state.folded_at)
        differs_s = own - self._clock()
        if abs(differs_s) >= CLOCKS_DIFFER_S:
            log.warning(
                "this machine's clock differs from the time of the previous leader, which is continued; check the time "
                "service of this machine and of the event log's",
                ahead_s=round(differs_s, 1),
            )

    # ------------------------------------------------------------------ inputs

    async def _read_streams(self) -> None:
        batches = self._log.subscribe(
            *SUPERVISOR_STREAMS,
            group=SUPERVISOR_GROUP,
            consumer=CONSUMER,
            batch_max=BATCH_MAX,
            on_trouble=self._on_reading_trouble,
        )
        async for batch in batches:
            if not batch:
                continue
            self._read.append(take(batch, self._clock(), self._inbox.decoded))
            self._wake.set()
            while len(self._read) >= BATCHES_AHEAD:
                await self._room.wait()

    def _on_reading_trouble(self, reason: str) -> None:
        self._reading_trouble = reason

    async def _compare_heartbeats(self) -> None:
        """Compare the agents' heartbeats with the state. Heartbeats are not in the event log: most of them change nothing."""
        while True:
            await anyio.sleep(BEATS_S)
            assert self._folder is not None
            if not (self._read or self._inbox.waiting):  # else reports are waiting that the state does not contain yet
                self.sessions.compare(self._reported)
                state = self._folder.state
                for send in self._unanswered.due(state, self.sessions.nodes, anyio.current_time()):
                    self.sessions.send(send.node, send.command_id, send.order)
                collect_at_rest()
            for seen in beats.starts_to_fold(self.sessions.started(), self._folder.state, self._clock()):
                self._enqueue(Input(seen))
            for node, reached in beats.steps_to_fold(self.sessions.steps(), self._folder.state, self._clock()):
                self._enqueue(Input(protocol.StepSeen(self._clock(), reached, node)))

    def _reported(self, node: str) -> Reported | None:
        assert self._folder is not None
        known = self._folder.state.nodes.get(node)
        return Reported(known.session, known.workers_version) if known is not None and known.connected else None

    def _enqueue(self, each: Input) -> None:
        self._internal.append(each)
        self._wake.set()

    def _on_first_steps(self, event: protocol.NodeReported) -> None:
        if len(self._first_steps) < FIRST_STEPS_MAX:  # else the agent's heartbeats repeat them
            self._first_steps.append(Input(event))
            self._wake.set()

    def _on_timer(self, timer: Timer) -> None:
        self._enqueue(Input(protocol.TimerFired(self._clock(), timer)))

    async def _answer(self, folder: Folder, question: protocol.Evaluate) -> None:
        """Ask the policy. Its answer becomes an event."""
        incident = folder.state.incidents.get(question.incident)
        if incident is None:
            return  # closed meanwhile
        try:
            seen = view(folder.state, question.job, self._clock())
            policy = folder.state.jobs[question.job].spec.policy_spec
            action, decided_by = await self._parts.policies.decide(policy, incident, seen)
        except Exception as error:  # without an answer, the core's timer lets the default policy decide
            log.error("the policy could not be asked", incident=incident.id, exc_info=error)
            return
        at = self._clock()
        asked = PolicyAsked(at, incident, seen, action, decided_by)
        self._enqueue(Input(protocol.PolicyAnswered(at, incident.id, action, decided_by), asked=asked))

    async def _ask_provider(self, wanted: protocol.RequestReplacement) -> None:
        ok, reason = await asking.ask(self._parts.provider, wanted)
        self._enqueue(Input(protocol.ProviderAnswered(self._clock(), wanted.node, wanted.request, ok, reason)))

    async def _ask_for_more(self, supplier: Supplier) -> None:
        """Request more nodes, one request at a time. Each is recorded with its answer."""
        while True:
            await anyio.sleep(DEMAND_S)
            assert self._folder is not None
            state = self._folder.state
            breaker_open = state.breaker.open_until is not None
            for asked in self._demand.due(lacking(state), breaker_open=breaker_open, now=anyio.current_time()):
                ok, text = await asking.ask_more(supplier, asked)
                self._enqueue(
                    Input(protocol.MoreNodesRequested(self._clock(), asked.jobs, asked.wanted, asked.reason, ok, text))
                )

    # ------------------------------------------------------------------ fold, commit, act

    async def _fold(self) -> None:
        assert self._folder is not None
        assert self._tasks is not None
        while True:
            while not (self._internal or self._first_steps or self._read or self._questions):
                await self._wake.wait()
                self._wake = anyio.Event()
            intake = self._read.popleft() if self._read else Intake()
            internal, first_steps = list(self._internal), list(self._first_steps)
            self._internal.clear()
            self._first_steps.clear()
            self._room.set()
            self._room = anyio.Event()
            # Streams before internal events such as timers: an order that was answered in time must not count as late. Before
            # both the first steps of heartbeats: a later report of the same node may be in the streams already.
            await self._take(self._folder, [*first_steps, *intake.inputs, *internal], intake)
            for question in self._questions.due(self._folder.state, behind=bool(self._read)):
                self._tasks.start_soon(self._answer, self._folder, question)
            if self._questions:  # so that the next turn includes immediate answers
                await anyio.lowlevel.checkpoint()

    async def _take(self, folder: Folder, inputs: list[Input], intake: Intake) -> None:
        await self._recall(folder, inputs)
        inputs = await self._own_faults.examined(inputs, self._lease)
        folded = folder.dead_letter(folder.fold(inputs, self._clock()), intake.poison)
        if folded.changed or folded.published or folded.dead or intake.positions:
            await self._log.commit(self._lease, folder.commit(folded, intake.positions))
        folder.keep(folded)
        self._act(folded)

    async def _recall(self, folder: Folder, inputs: Iterable[Input]) -> None:
        """Mark requests that an earlier term answered, so that they are not folded again. Reads the history, but rarely."""
        for each in inputs:
            if not isinstance(each.event, OperatorRequest) or folder.knows(each.event.operation):
                continue
            if await self._parts.history.operation(each.event.operation) is not None:
                folder.remember(each.event.operation)

    def _act(self, folded: Folded) -> None:
        for record in folded.published:
            announce.decision(record)
            if isinstance(record, protocol.IncidentChanged) and record.incident.closed:
                tracing.closed(record.incident)
        for command in folded.commands:
            self._carry_out(command)

    def _carry_out(self, command: protocol.Command) -> None:
        match command:
            case protocol.Send():
                self.sessions.send(command.node, command.command_id, command.order)
            case protocol.Post():
                self.sessions.post(command)
            case protocol.SendNotification():
                self.sessions.tell(command.nodes, command.message)
            case protocol.RenewSession():
                self.sessions.renew(command.node, command.session, command.reason)
            case protocol.Evaluate():
                self._questions.add(command)
            case protocol.RequestReplacement():
                assert self._tasks is not None
                self._tasks.start_soon(self._ask_provider, command)
            case protocol.SetTimer():
                self._timers.set(command.timer, command.due)
            case protocol.CancelTimer():
                self._timers.cancel(command.timer)
            case protocol.CauseFault():
                assert self._tasks is not None
                self._tasks.start_soon(self._own_faults.cause, command)
            case protocol.Publish() | protocol.Answer():
                pass  # part of the commit
            case _:
                assert_never(command)


def _with(folded: Folded, record: LeaderChanged | protocol.Noted) -> Folded:
    return evolve(folded, published=(record, *folded.published))


def _load(parts: Mapping[str, bytes]) -> State:
    try:
        return snapshot.load(parts)
    except HoldfastError as error:
        raise HoldfastError(
            f"the supervisor's snapshot cannot be read, and starting without it could harm running jobs: {error}. "
            "Was it written by a newer version of holdfast? Start the newer version"
        ) from error
