"""The control session with the supervisor: sends Hello, reports and heartbeats, receives orders.

Training continues while it is disconnected. Endpoints are tried in turn: a standby refuses the session, and the next one is
tried."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import anyio
import grpc
import structlog

from holdfast.agent.connection.executor import Executor
from holdfast.agent.connection.log_reads import LogReads
from holdfast.agent.connection.reports import Reports
from holdfast.agent.connection.streams import (
    REFUSED_S,
    Failures,
    check,
    first_error,
    is_of_another_fleet,
    join,
    read,
    write,
)
from holdfast.domain.errors import HoldfastError, IncompatibleVersion, MalformedMessage, OtherFleet, Unavailable
from holdfast.domain.gpus import GpuState
from holdfast.domain.nodes import PROTOCOL_VERSION
from holdfast.domain.orders import Hello, Inventory, OrderDone, RanksStepping, Report
from holdfast.domain.rank_reads import MeasuredRanks
from holdfast.domain.replication import CommonCheckpoint
from holdfast.runtime import freeze
from holdfast.runtime.rpc.backoff import Backoff
from holdfast.runtime.rpc.grpc_channel import connected
from holdfast.runtime.trust.expiry import own_problem
from holdfast.runtime.trust.fleet import Introduction, Membership
from holdfast.runtime.trust.identities import Role
from holdfast.runtime.trust.tls import Tls
from holdfast.v1 import control_pb2 as pb
from holdfast.v1.control_pb2_grpc import ControlStub
from holdfast.wire import gpus, rank_reads
from holdfast.wire.control import decode_first_steps_recorded, decode_order, encode_report
from holdfast.wire.retention import decode_saved_by_all

log = structlog.get_logger("holdfast.agent.connection.session")

BEAT_S = 0.5
RETRY_S_MAX = 1.0  # recovery waits until a new leader knows the connected nodes
UNANSWERED_BEATS_MAX = 40  # counted in heartbeats, because a frozen agent sends none
ANSWERS_MAX = 32  # that wait to be sent; further requests of the supervisor are dropped
WELCOME_TIMEOUT_S = 3.0  # a leader answers immediately; otherwise the next endpoint is tried
# Part of a supervisor's refusal message; a gRPC status has no other field for it.
OTHER_VERSION = "speaks protocol version"

_Call = grpc.aio.StreamStreamCall[pb.AgentMessage, pb.SupervisorMessage]


class Session:
    """`hello` and `inventories` are called at the start of every session, `beat` twice a second, with the first steps that are
    not recorded. `on_diagnostics` receives the endpoints for telemetry, `on_peers` replicators of other nodes,
    `on_present_peers` those that replace all others, and `on_saved_by_all` the newest step that every node has.

    Inventories are sent to every leader again, because those of the previous leader may be hundreds of steps old. A supervisor
    of an earlier version gets no reports: it might understand a part of them.
    """

    def __init__(
        self,
        *,
        endpoints: Sequence[str],
        hello: Callable[[], Hello],
        inventories: Callable[[], Iterable[Inventory] | None],
        executor: Executor,
        reports: Reports,
        on_diagnostics: Callable[[Sequence[str]], None],
        on_peers: Callable[[Sequence[str]], None],
        on_saved_by_all: Callable[[CommonCheckpoint], None],
        beat: Callable[[Sequence[RanksStepping]], pb.AgentMessage],
        on_present_peers: Callable[[Sequence[str]], None],
        log_reads: LogReads,
        read_gpus: Callable[[], Sequence[GpuState]],
        read_ranks: Callable[[str], MeasuredRanks],
        membership: Membership | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._hello = hello
        self._inventories = inventories
        self._executor = executor
        self._reports = reports
        self._on_diagnostics = on_diagnostics
        self._on_peers, self._on_present_peers = on_peers, on_present_peers
        self._on_saved_by_all = on_saved_by_all
        self._beat = beat
        self._log_reads = log_reads
        self._read_gpus, self._read_ranks = read_gpus, read_ranks
        self._answers: deque[pb.AgentMessage] = deque()  # that need no time, to be sent
        self._membership = membership or Membership()
        self._tls = tls
        self._to_send = anyio.Event()
        self._welcomed = False
        self._unanswered_beats = 0
        self._incompatible: set[str] = set()  # endpoints whose last answer refused this protocol version
        self._failures = Failures(explain=lambda: own_problem(tls, time.time()))
        self._foreign: set[str] = set()  # endpoints that belonged to another fleet when they were last asked

    def report(self, report: Report) -> None:
        """Send a report to the supervisor, now or when a session is open."""
        self._reports.add(report)
        self._to_send.set()

    async def run(self) -> None:
        """Run until cancelled. Raises `IncompatibleVersion` if no supervisor has ever accepted this agent's version."""
        backoff = Backoff(max_s=RETRY_S_MAX)
        turn = 0
        while True:
            endpoint = self._endpoints[turn % len(self._endpoints)]
            turn += 1
            incompatible = ""
            self._foreign.discard(endpoint)
            introduction = self._membership.introduce()
            try:
                async with connected(endpoint, self._tls, Role.SUPERVISOR) as channel:
                    call = ControlStub(channel).Session(metadata=introduction.metadata)
                    await self._converse(call, introduction, backoff, endpoint)
            except* grpc.aio.AioRpcError as group:
                error = first_error(group)
                self._failures.failed("control session failed", endpoint, error)
                incompatible = (error.details() or "") if OTHER_VERSION in (error.details() or "") else ""
                if is_of_another_fleet(error):
                    self._foreign.add(endpoint)
            except* OtherFleet as others:
                self._failures.refused("control session refused", endpoint, str(others.exceptions[0]))
                self._foreign.add(endpoint)
            except* IncompatibleVersion as versions:
                incompatible = str(versions.exceptions[0])
                self._failures.refused("control session rejected: version", endpoint, incompatible)
            except* Unavailable as refused:
                self._failures.refused("control session refused", endpoint, str(refused.exceptions[0]))
            self._judge(endpoint, incompatible)
            await (anyio.sleep(REFUSED_S) if self._foreign >= set(self._endpoints) else backoff.sleep())

    def _judge(self, endpoint: str, incompatible: str) -> None:
        """Raise `IncompatibleVersion` if no supervisor has ever accepted this agent's version; otherwise wait.

        During an upgrade an agent with running workers meets a supervisor of another version: training continues until the
        agent is upgraded."""
        if not incompatible:
            self._incompatible.discard(endpoint)
            return
        self._incompatible.add(endpoint)
        if not self._welcomed and self._incompatible >= set(self._endpoints):
            raise IncompatibleVersion(f"supervisor {endpoint}: {incompatible}")

    async def _converse(self, call: _Call, introduction: Introduction, backoff: Backoff, endpoint: str) -> None:
        """Run one session until it fails. Raises the reason, in an exception group or alone."""
        try:
            await join(call, introduction)
            self._reports.greet(self._hello(), self._inventories())
            hello = self._reports.take()
            assert hello is not None
            await write(call, encode_report(hello.report, hello.seq))
            await self._hear_welcome(call, introduction)
            backoff.reset()
            self._failures.over(endpoint)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._speak, call)
                tasks.start_soon(self._expect_answers)
                tasks.start_soon(self._log_reads.run, self._wake_sender)
                while True:
                    self._take(await read(call, pb.SupervisorMessage))
        finally:
            call.cancel()

    async def _speak(self, call: _Call) -> None:
        """Send every report, and a heartbeat every `BEAT_S`, which also contains the newest steps. First steps are in a
        heartbeat that does not wait."""
        self._log_reads.forget()
        self._answers.clear()
        beat_at = anyio.current_time() + BEAT_S
        while True:
            while (numbered := self._reports.take()) is not None:
                await write(call, encode_report(numbered.report, numbered.seq))
            if self._answers:
                await write(call, self._answers.popleft())
                continue
            if self._log_reads.answers:
                await write(call, self._log_reads.answers.popleft())
                continue
            if not self._reports.wants_beat:
                with anyio.move_on_at(beat_at):
                    await self._to_send.wait()
                self._to_send = anyio.Event()
            if self._reports.wants_beat or anyio.current_time() >= beat_at:
                await write(call, self._beat(self._reports.in_beat()))
                beat_at = anyio.current_time() + BEAT_S

    def _wake_sender(self) -> None:
        self._to_send.set()

    async def _expect_answers(self) -> None:
        """Raises `Unavailable` after `UNANSWERED_BEATS_MAX` heartbeats without an answer: an open stream may not be served."""
        self._unanswered_beats = 0
        while self._unanswered_beats < UNANSWERED_BEATS_MAX:
            await anyio.sleep(BEAT_S)
            self._unanswered_beats += 1
        raise Unavailable(f"no answer to {UNANSWERED_BEATS_MAX} heartbeats")

    async def _hear_welcome(self, call: _Call, introduction: Introduction) -> None:
        """Read the leader's greeting. Raises `Unavailable` if there is none, or if it comes from a replaced leader or from
        another fleet's, and `IncompatibleVersion`."""
        message: pb.SupervisorMessage | None = None
        with freeze.patience(WELCOME_TIMEOUT_S):
            message = await read(call, pb.SupervisorMessage)
        if message is None or message.WhichOneof("message") != "welcome":
            raise Unavailable(f"no welcome within {WELCOME_TIMEOUT_S:g} s")
        await check(call, introduction)
        welcome = message.welcome
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise IncompatibleVersion(
                f"the supervisor {OTHER_VERSION} {welcome.protocol_version}, this agent {PROTOCOL_VERSION}: "
                "install the same version of holdfast on both"
            )
        if not welcome.shard_shapes:  # the newest of the forms and answers that this agent uses
            raise IncompatibleVersion(
                f"the supervisor {welcome.supervisor} is of an earlier version than this agent: replace the supervisors first"
            )
        if not self._executor.greet(welcome.epoch):
            raise Unavailable(
                f"{welcome.supervisor} has leader epoch {welcome.epoch}, but this agent has already seen epoch "
                f"{self._executor.epoch}"
            )
        self._welcomed = True
        log.info("control session opened", supervisor=welcome.supervisor, epoch=welcome.epoch)
        self._on_diagnostics(tuple(welcome.diagnostics))
        self._on_peers(tuple(welcome.peers))

    def _take(self, message: pb.SupervisorMessage) -> None:
        self._unanswered_beats = 0
        match message.WhichOneof("message"):
            case "ack":
                self._reports.acknowledge(message.ack.seq)
            case "command":
                self._take_command(message.command)
            case "saved_by_all":
                self._take_saved_by_all(message.saved_by_all)
            case "first_steps_recorded":
                recorded = decode_first_steps_recorded(message.first_steps_recorded)
                self._reports.recorded(recorded.job, recorded.generation)
            case "peers":
                self._on_present_peers(tuple(message.peers.endpoints))
            case "heard":
                pass
            case "read_log":
                self._log_reads.ask(message.read_log)
            case "read_errors":
                self._log_reads.ask(message.read_errors)
            case "read_gpus":
                self._answer(lambda: gpus.encode_answer(message.read_gpus.id, self._read_gpus()))
            case "read_ranks":
                asked = message.read_ranks
                self._answer(lambda: rank_reads.encode_ranks(asked.id, self._read_ranks(asked.job)))
            case kind:
                log.debug("unknown message ignored", kind=kind)

    def _answer(self, answer: Callable[[], pb.AgentMessage]) -> None:
        if len(self._answers) < ANSWERS_MAX:
            self._answers.append(answer())
            self._wake_sender()

    def _take_command(self, command: pb.Command) -> None:
        try:
            order = decode_order(command)
        except HoldfastError as error:
            # from a newer supervisor, or corrupt: answer, so that the supervisor does not wait
            log.error("order rejected: malformed", command_id=command.command_id, reason=str(error))
            self.report(OrderDone(command.command_id, ok=False, reason=str(error), at=time.time()))
            return
        self._executor.submit(command.epoch, command.command_id, order)

    def _take_saved_by_all(self, message: pb.SavedByAll) -> None:
        if message.epoch < self._executor.epoch:
            return  # a replaced leader
        try:
            self._on_saved_by_all(decode_saved_by_all(message))
        except MalformedMessage as error:
            log.warning("notification rejected", reason=str(error))
