"""Logs at a limited rate what happens again and again, such as refused calls of an agent."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

LOG_EVERY_S = 60.0  # per host and reason
LOGGED_MAX = 1024  # lines that are remembered


class Repeats:
    """Decides which lines are logged: each one at most once in `every_s`, also if several alternate."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._logged: dict[tuple[str, ...], float] = {}

    def is_due(self, *line: str) -> bool:
        now = self._clock()
        if now - self._logged.get(line, -self._every_s) < self._every_s:
            return False
        if len(self._logged) >= LOGGED_MAX:
            self._logged.clear()
        self._logged[line] = now
        return True


class RefusalLog:
    """Logs `event` with its fields, at most once in `LOG_EVERY_S` for each host and reason, or for each reason alone."""

    def __init__(self, logger: str, event: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._event, self._repeats = structlog.get_logger(logger), event, Repeats(LOG_EVERY_S, clock)

    def add(self, peer: str, reason: str, **fields: str) -> None:
        """`peer`: host and port of the caller, as gRPC names it."""
        if self._repeats.is_due(peer.rpartition(":")[0], reason):
            self._log.warning(self._event, **fields, peer=peer, reason=reason, repeated_after_s=LOG_EVERY_S)

    def expected(self, peer: str, reason: str) -> None:
        """A refusal that is no fault and that any number of hosts may get at once: one line for all of them."""
        if self._repeats.is_due("", reason):
            self._log.info(self._event, peer=peer, reason=reason, repeated_after_s=LOG_EVERY_S)
