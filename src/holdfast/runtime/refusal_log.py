"""Logs refused calls, at a limited rate: a refused agent tries again and again."""

from __future__ import annotations

import time

import structlog

LOG_EVERY_S = 60.0  # per host and reason
LOGGED_MAX = 1024  # hosts and reasons that are remembered


class RefusalLog:
    """Logs `event` with its fields, at most once in `LOG_EVERY_S` for each host and reason."""

    def __init__(self, logger: str, event: str) -> None:
        self._log, self._event = structlog.get_logger(logger), event
        self._logged: dict[tuple[str, str], float] = {}

    def add(self, peer: str, reason: str, **fields: str) -> None:
        """`peer`: host and port of the caller, as gRPC names it."""
        host, now = peer.rpartition(":")[0], time.monotonic()
        if now - self._logged.get((host, reason), -LOG_EVERY_S) < LOG_EVERY_S:
            return
        if len(self._logged) >= LOGGED_MAX:
            self._logged.clear()
        self._logged[host, reason] = now
        self._log.warning(self._event, **fields, peer=peer, reason=reason, repeated_after_s=LOG_EVERY_S)
