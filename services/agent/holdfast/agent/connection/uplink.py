"""The telemetry stream to diagnostics: a tick every `TICK_S`, and immediately for reliable signals. Never blocks other work.

The stream may fail, block or be refused for any time: signals are queued in the bounded `Outbox`, training continues, and
endpoints are tried in turn with jittered back-off. An agent that is not connected to the first endpoint returns to an earlier
one as soon as that serves, because only a process that receives the telemetry of all nodes of a job can tell whether all ranks
have finished a step."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

import anyio
import grpc
import structlog

from holdfast.agent.connection.contact import Contact
from holdfast.agent.connection.outbox import Outbox
from holdfast.agent.connection.streams import (
    REFUSED_S,
    Failures,
    broken,
    check,
    first_error,
    is_of_another_fleet,
    join,
    write,
)
from holdfast.domain.errors import OtherFleet
from holdfast.domain.nodes import TELEMETRY_RETRY_S_MAX
from holdfast.domain.signals import NodeSignal, Tick
from holdfast.runtime.rpc.backoff import Backoff
from holdfast.runtime.rpc.grpc_channel import cancellable, connected
from holdfast.runtime.trust.expiry import own_problem
from holdfast.runtime.trust.fleet import Introduction, Membership
from holdfast.runtime.trust.identities import Role
from holdfast.runtime.trust.tls import Tls
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.v1.telemetry_pb2_grpc import TelemetryStub
from holdfast.wire.telemetry import encode_tick

log = structlog.get_logger("holdfast.agent.connection.uplink")

TICK_S = 1.0
GOODBYE_TIMEOUT_S = 1.0
LAST_WORDS_TIMEOUT_S = 3.0
RETURN_S = 5.0  # average interval of the search for an earlier endpoint, with jitter to spread the agents of a fleet
REACH_TIMEOUT_S = 1.0

_Call = grpc.aio.StreamStreamCall[pb.Tick, pb.TickAck]


class Uplink:
    """`sample(at)` is called at every tick for signals that are taken only when they are sent.

    `standing()` is called at the start of every stream for lasting conditions, because a restarted diagnostics must know the
    running workers to detect a hang. Diagnostics ignores repetitions.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        standing: Callable[[], Sequence[NodeSignal]],
        sample: Callable[[float], Sequence[NodeSignal]],
        lost: Callable[[], int],
        last_words: anyio.Event,
        membership: Membership | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`lost` returns how many steps were dropped before they became a signal, since the start.

        `last_words` is set when the workers have exited at the agent's end; their last signals are sent before the
        goodbye.
        """
        self._outbox = outbox
        self._standing = standing
        self._sample = sample
        self._lost = lost
        self._last_words = last_words
        self._membership = membership or Membership()
        self._tls = tls
        self._endpoints: tuple[str, ...] = ()
        self._endpoints_known = anyio.Event()
        self._wake = anyio.Event()
        self._shield = anyio.CancelScope(shield=True)
        self._left = anyio.Event()
        self._streaming = False
        self._closing = False
        self._moving = False  # to an earlier endpoint
        self._refused_in_a_row = 0
        self._failures = Failures(explain=lambda: own_problem(tls, time.time()))
        self._contact = Contact()
        self.version = ""  # of the diagnostics that acknowledged last; empty = not known
        self._foreign: set[str] = set()  # endpoints that belonged to another fleet when they were last asked

    def emit(self, signal: NodeSignal) -> None:
        """Queue a signal. A reliable one is sent immediately."""
        self._outbox.add(signal)
        if self._outbox.urgent:
            self._wake.set()

    def use(self, endpoints: Sequence[str]) -> None:
        """Set the endpoints of diagnostics, best first. All agents of a fleet have the same order, so that they use the
        same one."""
        if endpoints:
            self._endpoints = tuple(endpoints)
            self._endpoints_known.set()
            self._contact.expected()

    def cut_s(self) -> float:
        """How long diagnostics has not acknowledged telemetry; 0 = the stream stands, or diagnostics is not used."""
        return self._contact.cut_s()

    async def run(self) -> None:
        """Run until cancelled; then send the last signals of the workers and a goodbye, if a stream is open."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._talk_shielded)
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._leave()

    async def _leave(self) -> None:
        with anyio.move_on_after(LAST_WORDS_TIMEOUT_S):
            await self._last_words.wait()
        self._closing = True
        self._wake.set()
        if self._streaming:
            with anyio.move_on_after(GOODBYE_TIMEOUT_S):
                await self._left.wait()
        self._shield.cancel()

    async def _talk_shielded(self) -> None:
        # A cancelled read or write cancels its stream, on which the goodbye could then not be sent.
        with self._shield:
            await self._talk()
        self._left.set()

    async def _talk(self) -> None:
        await self._endpoints_known.wait()
        backoff = Backoff(max_s=TELEMETRY_RETRY_S_MAX)
        for endpoint in self._in_turn():
            self._foreign.discard(endpoint)
            introduction = self._membership.introduce()
            try:
                async with connected(endpoint, self._tls, Role.DIAGNOSTICS) as channel:
                    call = TelemetryStub(channel).Stream(metadata=introduction.metadata)
                    await self._stream(call, introduction, backoff, endpoint)
            except* grpc.aio.AioRpcError as group:
                self._say_lost(endpoint, group)
            except* OtherFleet as others:
                self._failures.refused("telemetry stream refused", endpoint, str(others.exceptions[0]))
                self._foreign.add(endpoint)
            if self._closing:
                return
            if not self._moving:
                await (anyio.sleep(REFUSED_S) if self._foreign >= set(self._endpoints) else backoff.sleep())

    def _in_turn(self) -> Iterator[str]:
        turn = 0
        while True:
            if self._moving:
                turn, self._moving = 0, False
            yield self._endpoints[turn % len(self._endpoints)]
            turn += 1

    async def _stream(self, call: _Call, introduction: Introduction, backoff: Backoff, endpoint: str) -> None:
        """Run one stream until it fails (`AioRpcError` or `OtherFleet`), the agent stops, or an earlier endpoint serves."""
        try:
            await join(call, introduction)
            async with anyio.create_task_group() as tasks:
                ended = anyio.Event()
                tasks.start_soon(check, call, introduction)
                tasks.start_soon(self._hear, call, backoff, ended, endpoint)
                tasks.start_soon(self._look_for_better, endpoint)
                for tick in self._outbox.again():
                    await write(call, encode_tick(tick))
                if standing := self._standing():
                    await self._write(call, self._outbox.compose(time.time(), standing, lost=self._lost()))
                self._streaming = True
                while not self._closing and not self._moving:
                    await self._write_tick(call)
                    await self._pause()
                await self._write_tick(call, goodbye=True)
                await call.done_writing()
                with anyio.move_on_after(GOODBYE_TIMEOUT_S):
                    await ended.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._streaming = False
            self._contact.ended()
            call.cancel()

    async def _write_tick(self, call: _Call, *, goodbye: bool = False) -> None:
        at = time.time()
        fresh = () if goodbye or self._outbox.stalled else self._sample(at)
        tick = self._outbox.compose(at, fresh, lost=self._lost())
        await self._write(call, tick, goodbye=goodbye)

    async def _write(self, call: _Call, tick: Tick, *, goodbye: bool = False) -> None:
        """Send the tick that has just been composed."""
        await write(call, encode_tick(tick, goodbye=goodbye, wants_ack=self._outbox.wants_ack))

    async def _pause(self) -> None:
        with anyio.move_on_after(TICK_S):
            await self._wake.wait()
        self._wake = anyio.Event()
        if self._closing:
            self._wake.set()

    async def _look_for_better(self, endpoint: str) -> None:
        """Wait until an earlier endpoint in the list is reachable. Returns immediately if there is none."""
        while better := [*itertools.takewhile(lambda each: each != endpoint, self._endpoints)]:
            await anyio.sleep(RETURN_S * random.uniform(0.8, 1.2))
            for each in better:
                if await self._reached(each):
                    log.info("telemetry endpoint changed", from_endpoint=endpoint, to_endpoint=each)
                    self._moving = True
                    self._wake.set()
                    return

    async def _reached(self, endpoint: str) -> bool:
        try:
            async with connected(endpoint, self._tls, Role.DIAGNOSTICS) as channel:
                with anyio.move_on_after(REACH_TIMEOUT_S):
                    await cancellable(channel.channel_ready())
                    return True
        except (grpc.aio.AioRpcError, OtherFleet):
            pass
        return False

    async def _hear(self, call: _Call, backoff: Backoff, ended: anyio.Event, endpoint: str) -> None:
        """Read acknowledgements until diagnostics closes the stream, which it does after receiving our goodbye."""
        async for ack in call:
            backoff.reset()
            self._failures.over(endpoint)
            self._contact.answered()
            self._refused_in_a_row = 0
            self._outbox.acknowledge(ack.seq)
            self.version = ack.version
        if not self._closing and not self._moving:
            raise await broken(call)
        ended.set()

    def _say_lost(self, endpoint: str, group: BaseExceptionGroup[grpc.aio.AioRpcError]) -> None:
        error = first_error(group)
        self._failures.failed("telemetry stream failed", endpoint, error)
        if is_of_another_fleet(error):
            self._foreign.add(endpoint)
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            return
        self._refused_in_a_row += 1
        if self._refused_in_a_row > 1 and (tick := self._outbox.give_up_oldest()) is not None:
            log.error(
                "tick dropped: rejected by diagnostics",
                seq=tick.seq,
                signals=[str(s) for s in tick.signals],
            )
