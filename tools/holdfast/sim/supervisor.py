"""The supervisor's shell in virtual time: a durable log, one leader at a time, crashes between any two writes.

A leader processes a batch in three phases, as production's `leader/term.py`: its `Folder` folds the events that wait, one write
commits the changed parts of the state, the records and the acknowledgements, and the commands are executed one by one. It may
crash before the commit (the batch is delivered again), or after any of the commands (the rest are lost or, if the leader was
only paused, arrive late with its old epoch). A standby then takes the lease, loads the snapshot from its bytes, and continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol

from holdfast.domain.errors import HoldfastError
from holdfast.domain.faults import DIE_AFTER_S, FaultKind
from holdfast.domain.findings import StepRecord
from holdfast.domain.incidents import Action, Incident
from holdfast.domain.orders import FirstStepsRecorded, Hello, RanksStepping, Report, Stop
from holdfast.log.protocol import Lease
from holdfast.policy import JobView, default
from holdfast.runtime.steady_clock import SteadyClock
from holdfast.sim import traces
from holdfast.sim.agent import Agent
from holdfast.sim.clocks import Clock
from holdfast.sim.cohorts import COHORT_NODES_MAX, Cohorts
from holdfast.sim.log import LENGTH_MAX, Log
from holdfast.sim.watched import Step, Watched, batch_of
from holdfast.sim.world import Violation, World
from holdfast.supervisor import protocol
from holdfast.supervisor.agents import beats
from holdfast.supervisor.agents.beats import Reported, patience_s
from holdfast.supervisor.agents.unanswered import Unanswered
from holdfast.supervisor.core import Config, State, as_sends, step, view
from holdfast.supervisor.core.handling.job_needs import reconcile
from holdfast.supervisor.core.model.indexing import index_of
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.leader.fold import Folder
from holdfast.supervisor.leader.intake import Input, Intake
from holdfast.supervisor.published import OperationDone
from holdfast.supervisor.timers import Timer

BEATS_S = 1.0  # interval at which the leader evaluates the agents' heartbeats
TURN_S = (0.0005, 0.004)
AGAIN_S = 0.1  # until an order arrives at a cohort that was busy
CHECKED_SHARE = 0.005  # of the commits: the snapshot and the index are compared with the state

Policy = Callable[[Incident, JobView], Action]


class Observer(Protocol):
    """Receives every committed fold: the invariants."""

    def folded(
        self, before: State, event: protocol.Event, after: State, commands: tuple[protocol.Command, ...]
    ) -> None: ...


class Supervisor:
    """Leader and standby, each on a machine with its own clock."""

    def __init__(
        self,
        world: World,
        agents: dict[str, Agent],
        observer: Observer,
        policy: Policy = default,
        fold: Step = step,
        config: Config | None = None,
        *,
        log_flushes_late: bool = False,
        log_length_max: int = LENGTH_MAX,
        batch: Callable[[State], Watched] | None = None,
        beats_s: float = BEATS_S,
        checked_share: float = CHECKED_SHARE,
        gathers: bool = False,
        turn_s: tuple[float, float] = TURN_S,
    ) -> None:
        """`batch`: creates the batches that are observed; None = those that `fold` needs. `gathers`: as in `Log`. `turn_s`:
        time from the first event that waits to the fold of all that wait."""
        self.world, self.agents, self.observer, self.policy, self.fold = world, agents, observer, policy, fold
        self.config = config or Config()
        self.log_clock = Clock(world)
        self.committed = State(config=self.config)
        self.log = Log(
            world,
            self.log_clock,
            self.committed,
            flushes_late=log_flushes_late,
            length_max=log_length_max,
            gathers=gathers,
        )
        self._batch = batch or batch_of(fold)
        self._beats_s, self._checked_share, self._turn_s = beats_s, checked_share, turn_s
        self._folder: Folder | None = None
        self._watched: Watched | None = None
        self._lease: Lease | None = None
        self.machines = (Clock(world), Clock(world))
        self._machine = 1
        self.clock = self._steady()
        self.internal: deque[protocol.Event] = deque()  # the leader's own events, in its memory
        self.first_steps: deque[protocol.NodeReported] = deque()  # from heartbeats, in its memory
        self.epoch = 0
        self._terms = 0
        self.leading = False
        # writes until the leader crashes: 1 = before the next commit, 2 = right after it; 0 = it does not
        self.crash_in = 0
        self.sessions: dict[str, int] = {}  # node → session
        self._broken: set[str] = set()  # nodes whose session has ended, and whose next Hello has not been folded
        self.led_since = 0.0
        self._session_count = 0
        self._unanswered = Unanswered()
        self._differs: dict[str, float] = {}  # node → time since which its heartbeats contradict the state
        self._armed: dict[Timer, float] = {}
        self._awake = False
        self.cohorts: Cohorts | None = None
        self.provider: Callable[[int, protocol.RequestReplacement], None] = lambda _epoch, _wanted: None  # of machines
        self._in_flight: dict[int, deque[tuple[int, Report]]] = {}  # session → reports, first in, first out
        self._last_arrival: dict[int, float] = {}  # session → arrival of its last order

    def _steady(self) -> SteadyClock:
        return SteadyClock(self.machines[self._machine].now, lambda: self.world.now)

    # ------------------------------------------------------------ leadership

    def lead(self) -> None:
        """Let a standby take over, with only the bytes of the last commit."""
        self._machine = 1 - self._machine
        self._lease = self.log.elect()
        self.epoch = self._lease.epoch
        self.leading = True
        self.led_since = self.world.now
        self._unanswered = Unanswered()
        self.committed = state = self.log.load()
        self._folder = Folder(state, self.epoch, committed=state, batch=self._begin_batch)
        self.clock = self._steady()
        if (renewal := self.log.last_renewal()) is not None:
            self.clock.resume(renewal.at, renewal.ago_s)
        self.clock.not_before(state.folded_at)
        self.world.say(f"supervisor of epoch {self.epoch} leads")
        self._terms += 1  # a new secret per term, as in the real shell: a log that lost data may issue an epoch twice
        self.tell(protocol.LeaderStarted(self.world.now, self.epoch, f"term {self._terms}"))
        epoch = self.epoch
        self.world.after(self._beats_s, lambda: self._evaluate_heartbeats(epoch))

    def crash(self, away_s: tuple[float, float] = (0.2, 4.0)) -> None:
        """End the leader. For `away_s` there is no other."""
        self.world.say(f"supervisor of epoch {self.epoch} crashes")
        self.leading = False
        self.crash_in = 0
        self._armed.clear()
        self.internal.clear()
        self.first_steps.clear()
        for agent in self.agents.values():
            self.hang_up(agent, tell=False)
        self.world.soon(*away_s, self.lead)

    def lose_log(self, lost_s: float | None) -> None:
        """Let the log lose its last `lost_s`, or everything if None."""
        if lost_s is None:
            self.log.lose_everything(State(config=self.config))
        else:
            self.log.lose_tail(lost_s)
        self.committed = self.log.load()

    # ------------------------------------------------------------ sessions

    def dial(self, agent: Agent) -> None:
        """Open a session for an agent, if the network allows it."""
        if self.leading and agent.alive and not agent.control_cut and not agent.session:
            self._session_count += 1
            self.sessions[agent.name] = self._session_count
            agent.connect(self._session_count)

    def keep_connected(self, agent: Agent, least_s: float, most_s: float) -> None:
        """Open a session now, and whenever there is none, after a random delay."""

        def dial() -> None:
            self.dial(agent)
            self.world.soon(least_s, most_s, dial)

        dial()

    def sees(self, agent: Agent) -> bool:
        """Whether the node has a working control link and a session that the supervisor knows."""
        return bool(agent.session) and agent.name not in self._broken

    def hang_up(self, agent: Agent, *, tell: bool = True, renewed: bool = False) -> None:
        """End the session and lose its messages in flight. A running leader notices this after some time."""
        if self.cohorts is not None and not self.cohorts.alone(agent):
            self.world.after(AGAIN_S, partial(self.hang_up, agent, tell=tell, renewed=renewed))
            return
        session = self.sessions.pop(agent.name, 0)
        agent.session = 0
        if session and tell:
            if not renewed:
                self._broken.add(agent.name)
            incarnation, epoch = agent.incarnation, self.epoch

            def gone() -> None:
                if self.leading and self.epoch == epoch:
                    self.append(protocol.NodeGone(self.world.now, agent.name, incarnation, session, renewed))

            self.world.soon(0.0, 0.2, gone)

    def deliver(self, agent: Agent, session: int, seq: int, report: Report) -> None:
        """Send a report. It is acknowledged when it is in the log."""
        if session not in self._in_flight:
            self._in_flight[session] = deque()
        self._in_flight[session].append((seq, report))
        incarnation = agent.incarnation

        def arrive() -> None:
            seq, report = self._in_flight[session].popleft()
            if not self.leading or self.sessions.get(agent.name) != session:
                return

            def written() -> None:
                if self.sessions.get(agent.name) == session:
                    agent.acknowledged(seq)

            if self.world.loses(lambda: f"{type(report).__name__} of {agent.name}"):
                written()
                return
            event = protocol.NodeReported(self.world.now, agent.name, incarnation, seq, report, session)
            events = (event,) if agent.cohort is None else (event, *agent.cohort.reported(event))
            for each in events:
                self.append(each, written if each is event else _nothing)
            if self.world.chance.random() < 0.05:  # a log delivers at least once
                self.world.soon(0.0, 1.0, partial(self._append_again, events))

        self.world.soon(0.001, 0.05, arrive)

    def beat(self, agent: Agent, session: int, first_steps: Sequence[RanksStepping]) -> None:
        """Send first steps in a heartbeat. It may be lost: the next one repeats them."""
        incarnation = agent.incarnation

        def arrive() -> None:
            if not self.leading or self.sessions.get(agent.name) != session:
                return
            if self.world.loses(lambda: f"the first steps in a heartbeat of {agent.name}"):
                return
            for each in first_steps:
                event = protocol.NodeReported(self.world.now, agent.name, incarnation, 0, each, session)
                self.first_steps += (event,) if agent.cohort is None else (event, *agent.cohort.reported(event))
            self._wake()

        self.world.soon(0.001, 0.05, arrive)

    def _evaluate_heartbeats(self, epoch: int) -> None:
        """Compare the agents' heartbeats, which are not logged, with the state, and end a session in which a report was
        lost."""
        if not self.leading or self.epoch != epoch:
            return
        self.log.renew(self.clock())
        connected = [self.agents[name] for name in sorted(self.sessions) if self.agents[name].session]
        for agent in [] if self.log.is_behind else connected:
            session, known = self.sessions[agent.name], self._reported(agent.name)
            if known is not None and (known.session, known.version) == (session, agent.shown_version):
                self._differs.pop(agent.name, None)
            elif self.world.now - self._differs.setdefault(agent.name, self.world.now) >= patience_s(session, known):
                self.world.say(f"what {agent.name} runs is not what it reported: its session ends")
                del self._differs[agent.name]
                self.hang_up(agent, renewed=True)
        for send in [] if self.log.is_behind else self._unanswered.due(self.committed, self.sessions, self.world.now):
            self._send(send)
        leaders = [agent for agent in connected if agent.represented_by is agent]
        for agent in leaders:
            if agent.session:
                agent.beat()
        started = [(node, each) for agent in leaders for each in agent.begun for node in agent.stands_for]
        for seen in beats.starts_to_fold(started, self.committed, self.clock()):
            self.tell(seen)
        reached = [(node, each) for agent in leaders for each in agent.steps for node in agent.stands_for]
        for node, each in beats.steps_to_fold(reached, self.committed, self.clock()):
            self.tell(protocol.StepSeen(self.world.now, each, node))
        self.world.after(self._beats_s, lambda: self._evaluate_heartbeats(epoch))

    def _reported(self, node: str) -> Reported | None:
        known = self.committed.nodes.get(node)
        return Reported(known.session, known.workers_version) if known is not None and known.connected else None

    # ------------------------------------------------------------ folding

    def append(self, event: protocol.Event, written: Callable[[], None] = lambda: None) -> None:
        """Append an event to its stream of the log. `written` is called when it is there."""
        self.log.append(event, written)
        self._wake()

    def _append_again(self, events: Iterable[protocol.Event]) -> None:
        for each in events:
            self.append(each)

    def append_steps(self, records: Sequence[StepRecord]) -> None:
        """Append finished steps to their stream of the log."""
        self.log.append_steps(records)
        self._wake()

    def tell(self, event: protocol.Event) -> None:
        """Queue an event of the leader itself. It is folded and committed like others, but lost if the leader crashes."""
        self.internal.append(event)
        self._wake()

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self.world.soon(*self._turn_s, self._work)

    def _work(self) -> None:
        """Fold and commit what waits, and carry out the commands."""
        self._awake = False
        if not self.leading:
            return
        assert self._folder is not None
        assert self._lease is not None
        begins = bool(self.internal) and isinstance(self.internal[0], protocol.LeaderStarted)
        internal = [self.internal[0]] if begins else list(self.internal)
        first_steps = [] if begins else list(self.first_steps)
        intake = Intake() if begins else self.log.take(self.clock())
        if intake.poison:
            raise Violation(f"an entry cannot be read: {intake.poison[0]}")
        inputs = [*map(Input, first_steps), *intake.inputs, *map(Input, internal)]
        if not inputs:
            return
        folded = self._folder.fold(inputs, self.clock())
        watched = self._watched
        assert watched is not None
        if watched.error is not None and not isinstance(watched.error, HoldfastError):
            raise watched.error
        if self._crashes():
            self.crash()  # before the commit: no effect, and the entries of the log are delivered again
            return
        for _ in internal:
            self.internal.popleft()
        for _ in first_steps:
            self.first_steps.popleft()
        for record in folded.published:
            if isinstance(record, OperationDone) and not record.ok:
                self.world.say(f"{record.operation} is refused: {record.reason}")
        self.log.commit(self._lease, self._folder.commit(folded, intake.positions))
        self._folder.keep(folded)
        self.committed = folded.state
        self._observe(watched, folded.state)
        self._carry_out(folded.commands if self.cohorts is not None else as_sends(folded.commands))
        if self.leading and (self.internal or self.first_steps or self.log.is_behind):
            self._wake()

    def _begin_batch(self, state: State) -> Watched:
        self._watched = self._batch(state)
        return self._watched

    def _observe(self, watched: Watched, state: State) -> None:
        last: protocol.Event | None = None
        for fold in watched.folds(state):
            last = fold.event
            if isinstance(last, protocol.NodeReported) and isinstance(last.report, Hello):
                self._broken.discard(last.node)
            self.observer.folded(*fold)
        if last is not None and self.world.chance.random() < self._checked_share:
            if self.log.load() != state:
                raise Violation(f"the parts that were committed after {type(last).__name__} are not the state")
            self._check_index(state, last)

    def _check_index(self, after: State, event: protocol.Event) -> None:
        """Check that the core, which examines only what its index and the changes name, decides as with a full search."""
        if after.index is not None and after.index != index_of(after):
            raise Violation(f"the index does not follow from the state any more, after {event}")
        if any(due <= event.at for due in after.timers.values()):
            return  # timers that are due now are processed next
        turn = Turn(after, event.at)
        turn.touch_all()
        reconcile(turn)
        if turn.commands:
            raise Violation(f"after {event} a job was not looked at, and wanted {turn.commands[0]}")

    def _crashes(self) -> bool:
        self.crash_in = max(0, self.crash_in - 1) if self.crash_in != 1 else -1
        return self.crash_in == -1

    def _carry_out(self, commands: Sequence[protocol.Command]) -> None:
        for index, command in enumerate(commands):
            if self._crashes():
                epoch = self.epoch
                self.crash()
                if self.world.chance.random() < 0.5:  # the leader was only paused, and continues with its old epoch
                    for late in commands[index:]:
                        if isinstance(late, protocol.Send):
                            self._send_late(epoch, late)
                return
            self._do(command)

    def _send_late(self, epoch: int, send: protocol.Send) -> None:
        agent = self.agents[send.node]
        if not agent.control_cut:
            self.world.soon(0.1, 5.0, lambda: agent.receive(epoch, send.command_id, send.order))

    def _do(self, command: protocol.Command) -> None:
        epoch = self.epoch
        match command:
            case protocol.Send():
                self._send(command)
            case protocol.Post():
                self._post(command)
            case protocol.SendNotification(nodes=nodes, message=message):
                for node in nodes:
                    if self.agents[node].represented_by is self.agents[node]:
                        self._notify(node, message)
            case protocol.Evaluate():
                self.world.soon(0.001, 0.05, lambda: self._evaluate(epoch, command))
            case protocol.RequestReplacement():
                self.world.soon(0.1, 5.0, lambda: self.provider(epoch, command))
            case protocol.RenewSession(node=node, session=session, reason=reason):
                if self.sessions.get(node) == session:
                    self.world.say(reason)
                    self.hang_up(self.agents[node], renewed=True)
            case protocol.CauseFault(kind=kind):
                self.world.after(DIE_AFTER_S, lambda: self._die(epoch, kind))
            case protocol.SetTimer(timer=timer, due=due):
                self._armed[timer] = due
                self._wait(epoch, timer, due)
            case protocol.CancelTimer(timer=timer):
                self._armed.pop(timer, None)
            case protocol.Publish(record=record):
                if self.world.tracing:
                    self.world.say(traces.of_record(record))

    def _notify(self, node: str, message: protocol.Notification) -> None:
        """Send a message that may be lost, late and repeated."""
        session, agent = self.sessions.get(node, 0), self.agents[node]

        def arrive() -> None:
            if not session or agent.session != session or self.world.loses(lambda: f"{message} to {node}"):
                return
            if isinstance(message, FirstStepsRecorded):
                agent.recorded(message.job, message.generation)
            else:
                agent.replicator.retain(message.job, message.checkpoint_id)

        self.world.soon(0.001, 0.2, arrive)

    def _die(self, epoch: int, kind: FaultKind) -> None:
        """Crash the leader for an injected fault. If the fault is the end of the log, the log returns with all commits, and the
        leader's term ends as well."""
        if self.leading and self.epoch == epoch:
            self.world.say(f"FAULT {kind}")
            self.crash()

    def _send(self, send: protocol.Send) -> None:
        session, agent, epoch = self.sessions.get(send.node, 0), self.agents[send.node], self.epoch
        if not session:
            return  # the core sends it again after the node's Hello
        arrival = max(self.world.now + self.world.chance.uniform(0.001, 0.05), self._last_arrival.get(session, 0.0))
        self._last_arrival[session] = arrival + 1e-6

        def arrive() -> None:
            times = 2 if self.world.chance.random() < 0.05 else 1
            if self.world.loses(lambda: f"{type(send.order).__name__} {send.command_id} to {agent.name}"):
                if isinstance(send.order, Stop):
                    agent.stops_missed = max(agent.stops_missed, send.order.generation)
                return
            self._sent(epoch, session, send, times)

        self.world.at(arrival, arrive)

    def _sent(self, epoch: int, session: int, send: protocol.Send, times: int) -> None:
        agent = self.agents[send.node]
        if self.cohorts is not None and not self.cohorts.alone(agent):
            self.world.after(AGAIN_S, partial(self._sent, epoch, session, send, times))
            return
        for _ in range(times):
            if agent.session == session:
                agent.receive(epoch, send.command_id, send.order)

    def _post(self, post: protocol.Post) -> None:
        """Send the orders of a broadcast. Those to neighbouring slots arrive at the same time."""
        for _, block in groupby(post.slots, lambda slot: slot // COHORT_NODES_MAX):
            sessions = {slot: self.sessions.get(post.broadcast.placements[slot].node, 0) for slot in block}
            last = max(self._last_arrival.get(session, 0.0) for session in sessions.values())
            arrival = max(self.world.now + self.world.chance.uniform(0.001, 0.05), last)
            self._last_arrival |= dict.fromkeys(sessions.values(), arrival + 1e-6)
            times = 2 if self.world.chance.random() < 0.05 else 1
            self.world.at(arrival, partial(self._posted, self.epoch, post.broadcast, sessions, times))

    def _posted(self, epoch: int, broadcast: protocol.Broadcast, sessions: Mapping[int, int], times: int) -> None:
        assert self.cohorts is not None
        agents = self.agents
        slots = [
            slot for slot, session in sessions.items() if agents[broadcast.placements[slot].node].session == session > 0
        ]
        for left in range(times, 0, -1):
            if not self.cohorts.receive(epoch, broadcast, slots):
                self.world.after(AGAIN_S, partial(self._posted, epoch, broadcast, sessions, left))
                return

    def _evaluate(self, epoch: int, question: protocol.Evaluate) -> None:
        if self.leading and self.epoch == epoch and question.incident in self.committed.incidents:
            incident = self.committed.incidents[question.incident]
            action = self.policy(incident, view(self.committed, question.job, self.clock()))
            self.tell(protocol.PolicyAnswered(self.world.now, question.incident, action, "the policy"))

    def _wait(self, epoch: int, timer: Timer, due: float) -> None:
        """Schedule a timer, which is due by the leader's clock. That clock may run differently from the world's time."""
        self.world.at(self.world.now + (due - self.clock()), lambda: self._fire(epoch, timer, due))

    def _fire(self, epoch: int, timer: Timer, due: float) -> None:
        if not self.leading or self.epoch != epoch or self._armed.get(timer) != due:
            return
        if self.clock() < due - 1e-6:
            self._wait(epoch, timer, due)
            return
        del self._armed[timer]
        self.tell(protocol.TimerFired(self.world.now, timer))


def _nothing() -> None:
    pass
