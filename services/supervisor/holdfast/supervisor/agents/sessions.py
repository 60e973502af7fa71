"""The control sessions of one term: which agent is connected, what goes to it, and who may speak for a node."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import anyio
import grpc
import structlog

from holdfast.domain.clocks import OtherClock
from holdfast.domain.errors import HoldfastError, NotFound
from holdfast.domain.evolve import evolve
from holdfast.domain.gpus import GpuState
from holdfast.domain.nodes import PROTOCOL_VERSION, NodeFacts, ServiceVersions
from holdfast.domain.orders import FirstStepsRecorded, Order, RanksStarted, RanksStepping, StepReached
from holdfast.domain.rank_reads import MeasuredRanks, RaisedError
from holdfast.domain.worker_logs import LogPart, LogRequest
from holdfast.runtime import freeze
from holdfast.supervisor.agents.beats import NodeStarted, NodeSteps, Reported, patience_s
from holdfast.supervisor.agents.questions import Questions
from holdfast.supervisor.inbox import InboxWriter, gone_entry
from holdfast.supervisor.protocol import NodeGone, NodeReported, Notification, Post, node_reported
from holdfast.supervisor.telemetry.meters import Latencies
from holdfast.v1 import control_pb2 as pb
from holdfast.wire import gpus, rank_reads, worker_logs
from holdfast.wire.control import SlotOrders, encode_first_steps_recorded, encode_heard, encode_order
from holdfast.wire.retention import encode_saved_by_all

ALIVE_S = 1.5  # agents say something every 0.5 s; one that has been silent for this long may be replaced
ANSWER_S = 2.0  # a beat is answered when nothing was sent to the agent for this long
OUTGOING_MAX = 1024  # messages that an agent does not read
AGAIN_S = 2.0  # first steps in heartbeats that are not confirmed after this time are passed on again
PEERS_MAX = 4  # with which an agent is asked to test its network
WORDS_MAX = 16  # encoded notifications that are kept: each goes to all nodes of a job
NUMBERS_PER_EPOCH = 10**9  # session numbers grow over all terms: a later one of a node is always the higher

Outgoing = pb.SupervisorMessage | bytes  # a message to an agent; bytes = encoded already

log = structlog.get_logger("holdfast.supervisor.agents.sessions")


class Refused(HoldfastError):
    """The session ends, with this status and message for the agent."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class End:
    code: grpc.StatusCode
    message: str


class AgentSession:
    """One agent's stream. `offer` never waits; `close` ends it from this side."""

    def __init__(self, facts: NodeFacts, number: int, peer: str) -> None:
        self.node = facts.node
        self.incarnation = facts.incarnation
        self.number = number
        self.peer = peer
        self.replicator = facts.replicator_endpoint
        self.restore_runs = facts.restore_runs
        self.end: End | None = None
        self.renewed = False  # we ended it, and nothing is wrong with the node
        self.ended = anyio.Event()
        self.heard()
        self.offered_at_s = self.heard_at_s
        self.workers_version = 0  # of the workers that run there, as its newest beat says; 0 = not reported
        self.steps: tuple[StepReached, ...] = ()  # how far they have come, likewise
        self.started: tuple[RanksStarted, ...] = ()  # generations that were started and have reported no step, likewise
        # By job: the first steps in its beats, and when they were passed on.
        self._first_steps: dict[str, tuple[RanksStepping, float]] = {}
        self.telemetry_cut_at_s: float | None = None  # since when diagnostics acknowledges no telemetry of it, likewise
        self.versions = ServiceVersions()
        self.clock = OtherClock()  # against the time of the leader
        self.machine_clock = OtherClock()  # against the clock of this machine, which may differ from that time
        self.differs_since_s: float | None = None  # what was reported in full is not what the beats say
        self._outgoing: deque[Outgoing] = deque()
        self._changed = anyio.Event()
        self.logs = Questions[LogPart](self.node, "the log", self.offer)
        self.gpus = Questions[tuple[GpuState, ...]](self.node, "the values of its GPUs", self.offer)
        self.ranks = Questions[MeasuredRanks](self.node, "the measurements of its ranks", self.offer)
        self.errors = Questions[tuple[RaisedError, ...]](self.node, "the exceptions of its ranks", self.offer)

    def heard(self) -> None:
        self.heard_at_s = anyio.current_time()
        self._heard_awake_s = freeze.awake()  # its silence counts while we listen

    def beat(
        self,
        workers_version: int,
        steps: tuple[StepReached, ...],
        started: tuple[RanksStarted, ...] = (),
        *,
        telemetry_cut_s: float = 0.0,
        versions: ServiceVersions = ServiceVersions(),
    ) -> None:
        self.versions = versions
        self.workers_version, self.steps, self.started = workers_version, steps, started
        now_s = anyio.current_time()
        self.telemetry_cut_at_s = now_s - telemetry_cut_s if telemetry_cut_s else None
        if now_s - self.offered_at_s >= ANSWER_S:
            self.offer(encode_heard())

    def to_pass_on(self, first_steps: tuple[RanksStepping, ...]) -> list[RanksStepping]:
        """Those of a beat's first steps that the core has to learn: they are new, or were not confirmed in time."""
        now_s, known = anyio.current_time(), self._first_steps
        due = [
            each
            for each in first_steps
            if (last := known.get(each.job)) is None or last[0] != each or now_s - last[1] >= AGAIN_S
        ]
        if due or known:
            passed = {each.job: known.get(each.job, (each, now_s)) for each in first_steps}
            self._first_steps = {**passed, **{each.job: (each, now_s) for each in due}}
        return due

    @property
    def said(self) -> Reported:
        return Reported(self.number, self.workers_version)

    @property
    def alive(self) -> bool:
        return freeze.awake() - self._heard_awake_s < ALIVE_S

    def offer(self, message: Outgoing) -> None:
        if len(self._outgoing) >= OUTGOING_MAX:
            self.close(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{OUTGOING_MAX} messages wait for this agent: it does not read"
            )
            return
        self.offered_at_s = anyio.current_time()
        self._outgoing.append(message)
        self._changed.set()

    def renew(self, reason: str) -> None:
        """End it, for the agent to open another one, which begins with everything that it has to say."""
        self.renewed = self.end is None
        self.close(grpc.StatusCode.ABORTED, reason)

    def close(self, code: grpc.StatusCode, message: str) -> None:
        if self.end is None:
            self.end = End(code, message)
            self.ended.set()

    async def next(self) -> Outgoing:
        """The next message to write."""
        while not self._outgoing:
            await self._changed.wait()
            self._changed = anyio.Event()
        return self._outgoing.popleft()


class Sessions:
    """By node. The end of a session goes into the inbox, behind everything that was said in it."""

    def __init__(
        self,
        epoch: int,
        inbox: InboxWriter,
        clock: Callable[[], float],
        on_first_steps: Callable[[NodeReported], None] = lambda _: None,
    ) -> None:
        """`on_first_steps` receives those in heartbeats, which are not in the inbox."""
        self.epoch = epoch
        self._on_first_steps = on_first_steps
        self.inbox = inbox
        self.latencies = Latencies()
        self._clock = clock
        self._numbers = itertools.count(epoch * NUMBERS_PER_EPOCH)
        self._by_node: dict[str, AgentSession] = {}
        self._closed: End | None = None
        self._notification = lru_cache(WORDS_MAX)(partial(_notification, epoch))

    def open(self, facts: NodeFacts, peer: str) -> AgentSession:
        """Raises `Refused`: another protocol version, or a node name that somebody else bears and is alive."""
        if self._closed is not None:
            raise Refused(self._closed.code, self._closed.message)
        if facts.protocol_version != PROTOCOL_VERSION:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{facts.node} (holdfast {facts.version or '?'}) speaks protocol version {facts.protocol_version}, this "
                f"supervisor speaks {PROTOCOL_VERSION}: install the same version of holdfast on both",
            )
        old = self._by_node.get(facts.node)
        if old is not None and old.incarnation != facts.incarnation and old.alive:
            raise Refused(
                grpc.StatusCode.ALREADY_EXISTS,
                f"another agent bears the name {facts.node} and is alive ({old.peer}): give this one another HOLDFAST_NODE",
            )
        session = AgentSession(facts, next(self._numbers), peer)
        if old is not None:
            old.close(grpc.StatusCode.ABORTED, f"a newer session of {facts.node} has begun ({peer})")
        self._by_node[facts.node] = session
        return session

    def peers(self, session: AgentSession) -> tuple[str, ...]:
        """Replicators of other nodes, the newest sessions': whoever is asked can be reached, or its network is broken."""
        others = [other for other in self._by_node.values() if other is not session and other.replicator]
        newest = sorted(others, key=lambda other: other.number)[-PEERS_MAX:]
        return tuple(other.replicator for other in newest)

    def leave(self, session: AgentSession) -> None:
        """The stream is over, from whatever side."""
        if self._by_node.get(session.node) is session:
            del self._by_node[session.node]
        if self._closed is None:
            number, renewed = session.number, session.renewed
            gone = NodeGone(self._clock(), session.node, session.incarnation, number, renewed)
            self.inbox.put(gone_entry(gone))

    def send(self, node: str, command_id: str, order: Order) -> bool:
        """False when the node has no session: the core sends the order again after its next Hello."""
        session = self._by_node.get(node)
        if session is None:
            return False
        self.latencies.sent(command_id, order)
        session.offer(encode_order(self.epoch, command_id, order))
        return True

    def post(self, post: Post) -> None:
        """`send` of a broadcast: what the orders have in common is encoded once."""
        broadcast = post.broadcast
        orders = SlotOrders(self.epoch, broadcast.order)
        for slot in post.slots:
            placement, command_id = broadcast.placements[slot], broadcast.id_of(slot)
            if (session := self._by_node.get(placement.node)) is not None:
                self.latencies.sent(command_id, broadcast.order)
                restore, peers = broadcast.of(slot)
                session.offer(
                    orders.encode(
                        command_id,
                        placement,
                        restore,
                        peers,
                        in_runs=session.restore_runs,
                        suspected=slot in broadcast.suspected,
                    )
                )

    def first_steps(self, session: AgentSession, at: float, in_beat: tuple[RanksStepping, ...]) -> None:
        """Pass on the first steps in a beat, unless they were passed on a moment ago. Their times become those of our clock.
        `at`: when the beat was sent, by the clock of its node."""
        now = self._clock()
        session.clock.saw(at, now)
        for each in session.to_pass_on(in_beat):
            stepping = evolve(each, at=session.clock.ours(each.at))
            self._on_first_steps(node_reported(now, session.node, session.incarnation, 0, stepping, session.number))

    def tell(self, nodes: Iterable[str], message: Notification) -> None:
        """Send a notification to these nodes. Nodes without a session do not receive it."""
        encoded = self._notification(message)
        for node in nodes:
            if (session := self._by_node.get(node)) is not None:
                session.offer(encoded)

    async def read_log(self, node: str, request: LogRequest) -> LogPart:
        """A part of a log of this node. Raises `NotFound` without a session, `Conflict` without an answer, and what the
        agent says against it."""
        session = self._connected(node, f"the log is on {node}, whose agent is not connected")
        return await session.logs.ask(lambda number: worker_logs.encode_request(number, request), session.ended)

    async def read_gpus(self, node: str) -> tuple[GpuState, ...]:
        """The newest values of the node's GPUs. Raises `NotFound` without a session, and `Conflict` without an answer."""
        session = self._connected(
            node, f"the agent of {node} is not connected, so the values of its GPUs are not known"
        )
        return await session.gpus.ask(gpus.encode_request, session.ended)

    async def read_ranks(self, node: str, job: str) -> MeasuredRanks:
        """What the node's ranks of a job measure now. Raises `NotFound` without a session, and `Conflict` without an answer."""
        session = self._connected(
            node, f"the agent of {node} is not connected, so the measurements of its ranks are not known"
        )
        return await session.ranks.ask(lambda number: rank_reads.encode_ranks_request(number, job), session.ended)

    async def read_errors(self, node: str, job: str, generation: int) -> tuple[RaisedError, ...]:
        """The exceptions that the node's ranks of a generation have left, earliest first; 0 = of the newest generation that has
        some there. Raises `NotFound` without a session, and `Conflict` without an answer."""
        session = self._connected(
            node, f"the agent of {node} is not connected, so the exceptions of its ranks are not known"
        )
        return await session.errors.ask(
            lambda number: rank_reads.encode_errors_request(number, job, generation), session.ended
        )

    def _connected(self, node: str, without: str) -> AgentSession:
        """Raises `NotFound` with the reason `without` if the node has no session."""
        session = self._by_node.get(node)
        if session is None:
            raise NotFound(without)
        return session

    @property
    def nodes(self) -> Container[str]:
        """Those that have a session."""
        return self._by_node.keys()

    def renew(self, node: str, number: int, reason: str) -> None:
        """End this session of the node, unless it is over, for the agent to open another one."""
        if (session := self._by_node.get(node)) is not None and session.number == number:
            session.renew(reason)

    def compare(self, reported: Callable[[str], Reported | None]) -> None:
        """End the sessions of agents of whom something else was `reported` in full, by node, than their beats say: a report,
        or the Hello itself, was lost. The agent opens a new one, and Hello carries everything."""
        now = freeze.awake()
        for session in list(self._by_node.values()):
            known = reported(session.node)
            if not session.workers_version or session.said == known:
                session.differs_since_s = None
            elif session.differs_since_s is None:
                session.differs_since_s = now
            elif now - session.differs_since_s >= patience_s(session.number, known):
                session.renew(
                    f"what {session.node} reported in full ({known}) is not what its beats say "
                    f"({session.said}): a report was lost, and a new session carries all of it"
                )

    def steps(self) -> Iterator[NodeSteps]:
        """What the newest beats say of the steps, node after node."""
        for session in self._by_node.values():
            for reached in session.steps:
                yield session.node, reached

    def started(self) -> Iterator[NodeStarted]:
        """The generations that the newest beats name as started, node after node."""
        for session in self._by_node.values():
            for started in session.started:
                yield session.node, started

    def steps_of(self, node: str) -> tuple[StepReached, ...]:
        """What the node's newest beat says of its steps; empty without a session."""
        session = self._by_node.get(node)
        return () if session is None else session.steps

    def heard_s_ago(self, node: str) -> float | None:
        """Seconds since the node's agent last said anything; None when it has no session."""
        session = self._by_node.get(node)
        return None if session is None else anyio.current_time() - session.heard_at_s

    def telemetry_cut_s(self, node: str) -> float | None:
        """How long diagnostics has acknowledged no telemetry of the node, as its newest beat says; None if it does, or the node
        has no session."""
        session = self._by_node.get(node)
        cut_at_s = None if session is None else session.telemetry_cut_at_s
        return None if cut_at_s is None else anyio.current_time() - cut_at_s

    def clock_ahead_s(self, node: str) -> float | None:
        """How far the clock of the node is ahead of this machine's; 0.0 = not worth mentioning, None = it has no session."""
        session = self._by_node.get(node)
        return None if session is None else session.machine_clock.ahead_s

    def versions_of(self, node: str) -> ServiceVersions:
        """What the node's newest beat says of the services that its agent talks to."""
        session = self._by_node.get(node)
        return ServiceVersions() if session is None else session.versions

    def close_all(self, message: str) -> None:
        """The term is over. Agents keep training and look for the next leader."""
        self._closed = End(grpc.StatusCode.FAILED_PRECONDITION, message)
        for session in list(self._by_node.values()):
            session.close(self._closed.code, message)

    def __len__(self) -> int:
        return len(self._by_node)


def _notification(epoch: int, message: Notification) -> bytes:
    if isinstance(message, FirstStepsRecorded):
        return encode_first_steps_recorded(message).SerializeToString()
    return encode_saved_by_all(epoch, message).SerializeToString()
