"""Logs refused calls, at a limited rate: a refused agent tries again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

LOG_EVERY_S = 60.0  # per host and reason
LOGGED_MAX = 1024  # hosts and reasons that are remembered


class RefusalLog:
    """Logs `event` with its fields, at most once in `LOG_EVERY_S` for each host and reason, or for each reason alone."""

    def __init__(self, logger: str, event: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._event, self._clock = structlog.get_logger(logger), event, clock
        self._logged: dict[tuple[str, str], float] = {}

    def add(self, peer: str, reason: str, **fields: str) -> None:
        """`peer`: host and port of the caller, as gRPC names it."""
        if self._is_due(peer.rpartition(":")[0], reason):
            self._log.warning(self._event, **fields, peer=peer, reason=reason, repeated_after_s=LOG_EVERY_S)

    def expected(self, peer: str, reason: str) -> None:
        """A refusal that is no fault and that any number of hosts may get at once: one line for all of them."""
        if self._is_due("", reason):
            self._log.info(self._event, peer=peer, reason=reason, repeated_after_s=LOG_EVERY_S)

    def _is_due(self, host: str, reason: str) -> bool:
        now = self._clock()
        if now - self._logged.get((host, reason), -LOG_EVERY_S) < LOG_EVERY_S:
            return False
        if len(self._logged) >= LOGGED_MAX:
            self._logged.clear()
        self._logged[host, reason] = now
        return True
