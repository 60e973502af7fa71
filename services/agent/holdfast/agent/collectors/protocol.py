"""The protocol of a collector, and the detection of its silence.

A collector reads one source (a log, a driver, the host) and emits signals. Its source may block it (a hanging driver, a dead
network file system). Calls that can block therefore run in a separate thread or process with a deadline, and a missed deadline
is itself a signal: `CollectorSilent`."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio
import anyio.from_thread
import anyio.lowlevel
import structlog

from holdfast.domain.signals import CollectorSilent, NodeSignal
from holdfast.runtime import freeze
from holdfast.runtime.rpc.backoff import Backoff

log = structlog.get_logger("holdfast.agent.collectors")

Emit = Callable[[NodeSignal], None]
SETTLED_S = 60.0  # after this time a collector has recovered, and its next failure counts as the first
REASON_CHARS_MAX = 500


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Configuration of the collectors."""

    node: str
    agent_dir: Path
    memory_dir: Path
    disk_dir: Path
    kernel_log: Path
    gpus: int = 0  # number of GPUs of this node; 0 = not configured
    nvml_replay: Path | None = None  # recorded answers instead of a driver
    infiniband: Path = Path("/sys/class/infiniband")
    nic_exclude: tuple[str, ...] = ()  # devices that are not read, as shell patterns
    nvrx_path: Path | None = None  # directory of nvidia-resiliency-ext, if it is not installed in this environment
    maintenance_file: Path | None = None
    maintenance_url: str = ""
    files_left: Callable[[], tuple[int, int]] | None = None  # file descriptors left for new work, and the limit


class Collector(Protocol):
    name: str

    async def run(self, emit: Emit) -> None:
        """Run until cancelled. Raises `OSError` if the source cannot be read. Any other exception is a bug of the
        collector."""


async def keep_collecting(collector: Collector, node: str, emit: Emit) -> None:
    """Run a collector. Never returns: a collector that fails is reported and restarted, and never ends the agent."""
    backoff, misses = Backoff(first_s=1.0, max_s=SETTLED_S), 0
    explained = set[str]()
    while True:
        started = anyio.current_time()
        try:
            await collector.run(emit)
            reason = "the collector ended by itself"
        except OSError as error:
            reason = str(error)
        except Exception as error:
            # A bug in the collector or its library, which must not affect other collectors or training.
            reason = _described(error)
            if (where := _origin(error)) not in explained:
                explained.add(where)
                log.error("unexpected exception in collector", collector=collector.name, exc_info=error)
        if anyio.current_time() - started >= SETTLED_S:
            misses = 0
            backoff.reset()
        misses += 1
        log.warning("collector failed", collector=collector.name, reason=reason, in_a_row=misses)
        emit(CollectorSilent(node, time.time(), collector.name, misses, reason[:REASON_CHARS_MAX]))
        await backoff.sleep()


class Pausable:
    """A loop that can be paused: a reader of GPUs, which must close them during a reset."""

    def __init__(self, loop: Callable[[], Awaitable[None]]) -> None:
        self._loop = loop
        self._scope: anyio.CancelScope | None = None
        self._stopped = anyio.Event()
        self._wanted = anyio.Event()
        self._wanted.set()

    async def run(self) -> None:
        """Run the loop until cancelled, again after every pause."""
        while True:
            with anyio.CancelScope() as scope:
                self._scope = scope
                await self._loop()
            self._scope = None
            self._stopped.set()
            await self._wanted.wait()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Stop the loop before the block, and start it again after the block. One block at a time."""
        if self._scope is None:  # the loop has not begun yet
            yield
            return
        self._stopped, self._wanted = anyio.Event(), anyio.Event()
        self._scope.cancel()
        try:
            await self._stopped.wait()
            yield
        finally:
            self._wanted.set()


def _described(error: Exception) -> str:
    """Return type and message of an exception; of a group, those of the first."""
    return _described(error.exceptions[0]) if isinstance(error, ExceptionGroup) else f"{type(error).__name__}: {error}"


def _origin(error: Exception) -> str:
    """Return type and location of an exception, so that a recurring exception with varying messages is logged once."""
    if isinstance(error, ExceptionGroup):
        return _origin(error.exceptions[0])
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} {frame.filename}:{frame.lineno}"


class Probe:
    """A collector that calls `ask` every `interval_s` and expects the answer within `deadline_s`.

    `ask` may block, so it runs in a daemon thread, which cannot delay the agent or its exit. While it hangs, it is not
    called again, and each further interval counts as a miss.
    """

    def __init__(
        self, name: str, node: str, ask: Callable[[], Sequence[NodeSignal]], *, interval_s: float, deadline_s: float
    ) -> None:
        self.name = name
        self._node = node
        self._ask = ask
        self._interval_s, self._deadline_s = interval_s, deadline_s

    async def run(self, emit: Emit) -> None:
        misses = 0
        answer: _Answer | None = None
        while True:
            if answer is None:
                answer = _Answer(self._ask)
            with freeze.patience(self._deadline_s):
                await answer.wait()
            if answer.done:
                for signal in answer.take():
                    emit(signal)
                answer, misses = None, 0
            else:
                misses += 1
                emit(
                    CollectorSilent(
                        self._node, time.time(), self.name, misses, f"no answer within {self._deadline_s:g} s"
                    )
                )
            await anyio.sleep(self._interval_s)


class _Answer:
    """A call of `ask` in its own thread."""

    def __init__(self, ask: Callable[[], Sequence[NodeSignal]]) -> None:
        self._signals: Sequence[NodeSignal] = ()
        self._error: Exception | None = None
        self._event = anyio.Event()
        self._token = anyio.lowlevel.current_token()
        threading.Thread(target=self._work, args=(ask,), daemon=True).start()

    @property
    def done(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    def take(self) -> Sequence[NodeSignal]:
        """Return the answer. Raises the exception of `ask`."""
        if self._error is not None:
            raise self._error
        return self._signals

    def _work(self, ask: Callable[[], Sequence[NodeSignal]]) -> None:
        try:
            self._signals = ask()
        except Exception as error:
            self._error = error
        except BaseException as error:  # a library that calls `sys.exit` must not end the agent
            self._error = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            anyio.from_thread.run_sync(self._event.set, token=self._token)
        except RuntimeError:
            pass  # the event loop has ended, so no task waits for the answer
