"""Detects freezes of this process: it was stopped (SIGSTOP), its machine was paused, or one callback blocked the event loop.

Theory of operation. A frozen process has received no messages, so missing messages prove nothing. When the process continues,
the event loop handles its sockets and all expired timers in the same iteration. A time-out would therefore win
against an answer that arrived minutes ago. So `watch` sets a timer twice a second, as a callback of the loop and not as a
task. After a freeze it is the first timer to run, and before any task it

* extends the deadline of every `patience` by the length of the freeze,
* notifies the service (`react`), for heartbeats that are not measured by a time-out,
* logs the freeze, and counts the seconds.

Use `patience` for a time-out that draws a conclusion about another process. A pause, or a limit on this process's own work,
does not need it. The state is global in the process, as that of telemetry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

import anyio
import structlog

from holdfast.runtime.telling import metrics, telemetry

LOOK_S = 0.5
FROZEN_S = 1.0  # a longer delay is not caused by a busy machine; same value as in diagnostics' detectors
LAP_S_MAX = 1.0

log = structlog.get_logger("holdfast.freeze")

_waiting: set[anyio.CancelScope] = set()
_total_s = 0.0


class _Patience:
    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope

    def __enter__(self) -> anyio.CancelScope:
        _waiting.add(self._scope)
        return self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        _waiting.discard(self._scope)
        return bool(self._scope.__exit__(kind, error, trace))


def patience(limit_s: float, *, shield: bool = False) -> _Patience:
    """As `anyio.move_on_after`, but counts only time in which this process runs."""
    return _Patience(anyio.move_on_after(limit_s, shield=shield))


def frozen_s() -> float:
    """Return the seconds in which this process did not run, since `watch` began."""
    return _total_s


def awake() -> float:
    """Return the loop's time without freezes."""
    return anyio.current_time() - _total_s


class Laps:
    """`patience` for a thread that polls: each iteration counts for at most `LAP_S_MAX`."""

    def __init__(self, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._elapsed = elapsed
        self._at = elapsed()
        self._spent_s = 0.0

    def spent_s(self) -> float:
        """Return the seconds counted so far. Call it once per iteration."""
        now = self._elapsed()
        self._spent_s += min(now - self._at, LAP_S_MAX)
        self._at = now
        return self._spent_s


async def watch(
    react: Callable[[float], object] = lambda _: None,
    *,
    since_boot: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
) -> None:
    """A loop for the service's task group. Calls `react` with the length of every freeze, before any task continues.

    `since_boot` includes the time in which the machine sleeps; the loop's clock does not.
    """
    looker = _Looker(react, since_boot)
    looker.begin()
    try:
        await looker.ended.wait()
    finally:
        looker.end()
    if looker.failure is not None:
        raise looker.failure


class _Looker:
    def __init__(self, react: Callable[[float], object], since_boot: Callable[[], float]) -> None:
        self._react = react
        self._since_boot = since_boot
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = self._booted_at = self._worked_s = 0.0
        self.ended = anyio.Event()
        self.failure: Exception | None = None

    def begin(self) -> None:
        self._looked_at, self._booted_at = self._loop.time(), self._since_boot()
        self._worked_s = time.process_time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        late_s = self._loop.time() - self._looked_at - LOOK_S
        length_s = max(late_s, self._since_boot() - self._booted_at - LOOK_S)
        if length_s >= FROZEN_S:
            try:
                self._over(length_s, max(late_s, 0.0))
            except Exception as error:  # an exception in a timer would be lost; `watch` raises it
                self.failure = error
                self.ended.set()
                return
        self.begin()

    def _over(self, length_s: float, late_s: float) -> None:
        global _total_s
        _total_s += late_s
        for scope in list(_waiting):
            scope.deadline += late_s
        log.warning(
            "process was frozen",
            seconds=round(length_s, 1),
            # close to `seconds` if the process was not stopped but its own work took that long
            cpu_s=round(time.process_time() - self._worked_s, 1),
            effect="messages missing in this time are not counted as failures",
        )
        telemetry.record(metrics.FROZEN, length_s)
        self._react(length_s)
