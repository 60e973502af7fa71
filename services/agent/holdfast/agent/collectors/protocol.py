"""What a collector is, and how its silence is noticed.

A collector watches one thing (a log, a driver, the host) and emits signals. It may be wedged by what it watches (a hanging
driver, a dead network file system), so what can block runs in a thread or process of its own, under a deadline, and a missed
deadline is itself a signal: `CollectorSilent`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio
import anyio.from_thread
import anyio.lowlevel
import structlog

from holdfast.domain.signals import CollectorSilent, NodeSignal
from holdfast.runtime.backoff import Backoff

log = structlog.get_logger("holdfast.agent.collectors")

Emit = Callable[[NodeSignal], None]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What collectors may need to know."""

    node: str
    agent_dir: Path
    memory_dir: Path
    disk_dir: Path
    kernel_log: Path
    gpus: int = 0  # that this node should have; 0 = nobody said
    nvml_replay: Path | None = None  # recorded answers instead of a driver
    infiniband: Path = Path("/sys/class/infiniband")
    nic_exclude: tuple[str, ...] = ()  # devices that are not read, as shell patterns
    maintenance_file: Path | None = None
    maintenance_url: str = ""


class Collector(Protocol):
    name: str

    async def run(self, emit: Emit) -> None:
        """Until cancelled. Raises `OSError` when what it watches cannot be watched."""


async def keep_collecting(collector: Collector, node: str, emit: Emit) -> None:
    """Run a collector for ever; one that fails is reported and started again. It never ends the agent."""
    backoff = Backoff(first_s=1.0, max_s=60.0)
    misses = 0
    while True:
        try:
            await collector.run(emit)
        except OSError as error:
            misses += 1
            log.warning("collector failed", collector=collector.name, reason=str(error))
            emit(CollectorSilent(node, time.time(), collector.name, misses, str(error)))
        await backoff.sleep()


class Probe:
    """A collector that asks something every `interval_s` and expects the answer within `deadline_s`.

    `ask` blocks, so it runs in a daemon thread of its own: one that never comes back holds up neither the agent nor its
    end. While it hangs no second one is started; each further interval counts as a miss.
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
            with anyio.move_on_after(self._deadline_s):
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
    """One question under way in its own thread."""

    def __init__(self, ask: Callable[[], Sequence[NodeSignal]]) -> None:
        self._signals: Sequence[NodeSignal] = ()
        self._error: BaseException | None = None
        self._event = anyio.Event()
        self._token = anyio.lowlevel.current_token()
        threading.Thread(target=self._work, args=(ask,), daemon=True).start()

    @property
    def done(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    def take(self) -> Sequence[NodeSignal]:
        """Raises what the question raised."""
        if self._error is not None:
            raise self._error
        return self._signals

    def _work(self, ask: Callable[[], Sequence[NodeSignal]]) -> None:
        try:
            self._signals = ask()
        except BaseException as error:
            self._error = error
        try:
            anyio.from_thread.run_sync(self._event.set, token=self._token)
        except RuntimeError:
            pass  # the event loop has ended meanwhile: nobody is waiting
