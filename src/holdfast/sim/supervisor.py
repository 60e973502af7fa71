"""The supervisor's shell in virtual time: a durable log, one leader at a time, crashes between any two writes.

What a leader does with one event: fold it, commit (state and acknowledged input in one write), carry out the commands one by
one. It may crash before the commit (the event comes again), or after any of the commands (the rest are lost, or, when it was
only paused, come late under its old epoch). A standby then takes the lease, loads the snapshot from its bytes, and goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from holdfast.domain.incidents import Action, Incident
from holdfast.domain.orders import Report
from holdfast.policy import JobView, default
from holdfast.sim.agent import Agent
from holdfast.sim.world import Violation, World
from holdfast.supervisor.core import Config, State, step, view
from holdfast.supervisor.core.index import Index
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.core.upkeep import poke
from holdfast.supervisor.protocol import (
    CancelTimer,
    Command,
    Evaluate,
    Event,
    FindingJudged,
    GenerationChanged,
    IncidentChanged,
    JobAccepted,
    JobChanged,
    LeaderStarted,
    NodeChanged,
    NodeGone,
    NodeReported,
    Noted,
    PolicyAnswered,
    Publish,
    Record,
    Send,
    SetTimer,
    TimerFired,
)
from holdfast.wire import records

Policy = Callable[[Incident, JobView], Action]
Step = Callable[[State, Event], tuple[State, tuple[Command, ...]]]


class Observer(Protocol):
    """Sees every committed fold: the invariants."""

    def folded(self, before: State, event: Event, after: State, commands: tuple[Command, ...]) -> None: ...


class Supervisor:
    def __init__(
        self,
        world: World,
        agents: dict[str, Agent],
        observer: Observer,
        policy: Policy = default,
        fold: Step = step,
        config: Config | None = None,
    ) -> None:
        self.world, self.agents, self.observer, self.policy, self.fold = world, agents, observer, policy, fold
        # Durable, with the inbox: its left end is the first entry not acknowledged.
        self.committed = State(config=config or Config())
        self.inbox: deque[Event] = deque()
        self.internal: deque[Event] = deque()  # the leader's own events, in its memory
        self.epoch = 0
        self.leading = False
        self.crash_in = (
            0  # writes until the leader crashes: 1 = before the next commit, 2 = right after it; 0 = it does not
        )
        self.sessions: dict[str, int] = {}  # node → session
        self._session_count = 0
        self._armed: dict[str, float] = {}
        self._awake = False
        self._in_flight: dict[int, deque[tuple[int, Report]]] = {}  # per session: first in, first out
        self._last_arrival: dict[int, float] = {}  # per session, orders

    # ------------------------------------------------------------ leadership

    def lead(self) -> None:
        """A standby takes over: all that it has is the bytes of the last commit."""
        self.epoch += 1
        self.leading = True
        self.committed = records.loads(records.dumps(self.committed, State), State)
        self.world.say(f"supervisor of epoch {self.epoch} leads")
        self.tell(LeaderStarted(self.world.now, self.epoch))

    def crash(self) -> None:
        self.world.say(f"supervisor of epoch {self.epoch} crashes")
        self.leading = False
        self.crash_in = 0
        self._armed.clear()
        self.internal.clear()
        for agent in self.agents.values():
            self.hang_up(agent, tell=False)
        self.world.soon(0.2, 4.0, self.lead)

    # ------------------------------------------------------------ sessions

    def dial(self, agent: Agent) -> None:
        """An agent opens a session, when it can."""
        if self.leading and agent.alive and not agent.control_cut and not agent.session:
            self._session_count += 1
            self.sessions[agent.name] = self._session_count
            agent.connect(self._session_count)

    def hang_up(self, agent: Agent, *, tell: bool = True) -> None:
        """The session breaks; what was in flight on it is lost. A leader that lives notices, sooner or later."""
        session = self.sessions.pop(agent.name, 0)
        agent.session = 0
        if session and tell:
            incarnation, epoch = agent.incarnation, self.epoch

            def gone() -> None:
                if self.leading and self.epoch == epoch:
                    self.tell(NodeGone(self.world.now, agent.name, incarnation, session))

            self.world.soon(0.0, 0.2, gone)

    def deliver(self, agent: Agent, session: int, seq: int, report: Report) -> None:
        """A report on its way; acknowledged once it is in the log."""
        self._in_flight.setdefault(session, deque()).append((seq, report))
        incarnation = agent.incarnation

        def arrive() -> None:
            seq, report = self._in_flight[session].popleft()
            if not self.leading or self.sessions.get(agent.name) != session:
                return
            event = NodeReported(self.world.now, agent.name, incarnation, seq, report, session)
            self.append(event)
            agent.acknowledged(seq)
            if self.world.chance.random() < 0.05:  # a log delivers at least once
                self.world.soon(0.0, 1.0, lambda: self.append(event))

        self.world.soon(0.001, 0.05, arrive)

    # ------------------------------------------------------------ folding

    def append(self, event: Event) -> None:
        """Into the durable inbox."""
        self.inbox.append(event)
        self._wake()

    def tell(self, event: Event) -> None:
        """The leader's own event: folded and committed like the rest, lost with the leader."""
        self.internal.append(event)
        self._wake()

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self.world.soon(0.0005, 0.004, self._work)

    def _work(self) -> None:
        self._awake = False
        source = self.internal or self.inbox
        if not self.leading or not source:
            return
        event = source[0]
        after, commands = self._decide(event)
        if self._crashes():
            self.crash()  # before the commit: nothing has happened, an entry of the log comes again
            return
        source.popleft()
        before, self.committed = self.committed, after
        self.observer.folded(before, event, after, commands)
        self._carry_out(commands)
        if self.leading and (self.internal or self.inbox):
            self._wake()

    def _decide(self, event: Event) -> tuple[State, tuple[Command, ...]]:
        after, commands = self.fold(self.committed, event)
        if self.world.chance.random() < 0.02:
            again = records.loads(records.dumps(self.committed, State), State)
            if again != self.committed or self.fold(again, event) != (after, commands):
                raise Violation(f"a snapshot decides differently about {type(event).__name__}")
            self._overlooks_nothing(after, event)
        return after, commands

    def _overlooks_nothing(self, after: State, event: Event) -> None:
        """What the core finds by its index, and leaves alone because nothing touched it, is what a full search would say."""
        if after.index is not None and after.index != Index.of(after):
            raise Violation(f"the index does not follow from the state any more, after {event}")
        turn = Turn(after, event.at)
        turn.touch_all()
        poke(turn)
        if turn.commands:
            raise Violation(f"after {event} a job was not looked at, and wanted {turn.commands[0]}")

    def _crashes(self) -> bool:
        self.crash_in = max(0, self.crash_in - 1) if self.crash_in != 1 else -1
        return self.crash_in == -1

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for index, command in enumerate(commands):
            if self._crashes():
                epoch = self.epoch
                self.crash()
                if self.world.chance.random() < 0.5:  # it was only paused, wakes up, and goes on under its old epoch
                    for late in commands[index:]:
                        if isinstance(late, Send):
                            self._send_late(epoch, late)
                return
            self._do(command)

    def _send_late(self, epoch: int, send: Send) -> None:
        agent = self.agents[send.node]
        if not agent.control_cut:
            self.world.soon(0.1, 5.0, lambda: agent.receive(epoch, send.command_id, send.order))

    def _do(self, command: Command) -> None:
        epoch = self.epoch
        match command:
            case Send():
                self._send(command)
            case Evaluate():
                self.world.soon(0.001, 0.05, lambda: self._evaluate(epoch, command))
            case SetTimer(name=name, due=due):
                self._armed[name] = due
                self.world.at(due, lambda: self._fire(epoch, name, due))
            case CancelTimer(name=name):
                self._armed.pop(name, None)
            case Publish(record=record):
                if self.world.tracing:
                    self.world.say(describe(record))

    def _send(self, send: Send) -> None:
        session, agent, epoch = self.sessions.get(send.node, 0), self.agents[send.node], self.epoch
        if not session:
            return  # the core sends it again after the node's Hello
        arrival = max(self.world.now + self.world.chance.uniform(0.001, 0.05), self._last_arrival.get(session, 0.0))
        self._last_arrival[session] = arrival + 1e-6

        def arrive() -> None:
            for _ in range(2 if self.world.chance.random() < 0.05 else 1):
                if agent.session == session:
                    agent.receive(epoch, send.command_id, send.order)

        self.world.at(arrival, arrive)

    def _evaluate(self, epoch: int, question: Evaluate) -> None:
        if self.leading and self.epoch == epoch and question.incident in self.committed.incidents:
            incident = self.committed.incidents[question.incident]
            action = self.policy(incident, view(self.committed, question.job, self.world.now))
            self.tell(PolicyAnswered(self.world.now, question.incident, action, "the policy"))

    def _fire(self, epoch: int, name: str, due: float) -> None:
        if self.leading and self.epoch == epoch and self._armed.get(name) == due:
            del self._armed[name]
            self.tell(TimerFired(self.world.now, name))


def describe(record: Record) -> str:
    match record:
        case JobAccepted():
            return f"    job {record.job} accepted"
        case JobChanged():
            return f"    job is {record.phase}: {record.reason}"
        case GenerationChanged():
            nodes = " ".join(record.generation.nodes)
            return f"    generation {record.generation.number} {record.stage} on {nodes}: {record.reason}"
        case IncidentChanged(incident=incident):
            action = f" → {incident.action.kind} ({incident.action.reason})" if incident.action else ""
            return f"    incident {incident.id} {incident.kind} {incident.state}: {incident.cause}{action} {incident.outcome}"
        case NodeChanged():
            return f"    node {record.node} is {record.state}: {record.reason}"
        case FindingJudged(finding=finding):
            return f"    finding {finding.id} {record.verdict}: {finding.summary}"
        case Noted():
            return f"    note on {record.subject}: {record.text}"
