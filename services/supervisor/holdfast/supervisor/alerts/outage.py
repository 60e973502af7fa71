"""The alert that a supervisor cannot act on faults, because Redis is away or refuses. It does not pass through Redis: each
supervisor sends its own."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

from holdfast.supervisor.alerts.alert import Alert, Level, Topic
from holdfast.supervisor.alerts.sender import Alerts

AFTER_S = 60.0  # a restart of Redis and most failovers are over by then
EVERY_S = 5.0


class Outage:
    """When to send it. Pure."""

    def __init__(self, supervisor: str) -> None:
        self._supervisor = supervisor
        self._since_s: float | None = None
        self._sent = False

    def seen(self, trouble: str, now_s: float, at: float) -> Alert | None:
        """`trouble`: why it cannot act; "" = it can, or another supervisor leads. `now_s`: monotonic, `at`: Unix seconds."""
        if trouble:
            self._since_s = now_s if self._since_s is None else self._since_s
            if self._sent or now_s - self._since_s < AFTER_S:
                return None
            self._sent = True
            text = f"For {AFTER_S:.0f} s. Training continues; a rank that fails stops its job until then. {trouble}"
            return self._alert("cannot act on faults", Level.ERROR, text, at)
        over, self._since_s, self._sent = self._sent, None, False
        return self._alert("can act on faults again", Level.INFO, "Redis serves again.", at) if over else None

    def _alert(self, what: str, level: Level, text: str, at: float) -> Alert:
        title = f"supervisor {self._supervisor} {what}"
        return Alert(f"outage:{self._supervisor}:{at:.3f}", at, Topic.REDIS, level, title, text)


async def watch(supervisor: str, trouble: Callable[[], str], alerts: Alerts) -> None:
    """Runs until cancelled."""
    outage = Outage(supervisor)
    while True:
        if (alert := outage.seen(trouble(), anyio.current_time(), time.time())) is not None:
            alerts.offer(alert)
        await anyio.sleep(EVERY_S)
