"""The worker's ends of the two channels to its agent (`holdfast.domain.worker`). Neither ever blocks or raises in a step.

A note that cannot be sent at once is dropped and counted: a full buffer, an agent that died, a socket that was
replaced. The first drop is logged, so that a run without insight says why.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Any

from holdfast.domain import worker
from holdfast.domain.signals import Phase

log = logging.getLogger("holdfast.train")

# Orders taken per look; more wait for the next step. An agent that floods the channel cannot hold up training.
ORDERS_PER_POLL_MAX = 16


class Notes:
    """Worker → agent datagrams. `targets` are socket paths; an empty path means that nobody listens.

    Sends to a path, not over a connection: an agent or replicator that restarts is found again by the next note.
    """

    def __init__(self, *, agent: str, replicator: str, job: str, generation: int, rank: int) -> None:
        self._agent = agent
        self._replicator = replicator
        self._whose: dict[str, Any] = {"job": job, "generation": generation, "rank": rank}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if agent or replicator else None
        self.dropped = 0

    def step(
        self,
        *,
        step: int,
        started_at: float,
        ended_at: float,
        data_s: float,
        stall_s: float,
        tokens: int,
        loss: float | None,
        grad_norm: float | None,
    ) -> None:
        self._send(
            self._agent,
            "step",
            step=step,
            started_at=started_at,
            ended_at=ended_at,
            data_s=data_s,
            stall_s=stall_s,
            tokens=tokens,
            loss=loss,
            grad_norm=grad_norm,
        )

    def phase(self, phase: Phase, at: float, step: int) -> None:
        self._send(self._agent, "phase", phase=phase.value, at=at, step=step)

    def started(self, phases_s: Mapping[str, float]) -> None:
        self._send(self._agent, "started", phases_s=dict(phases_s))

    def saved(self, *, step: int, attempt: int, image: str, stall_s: float) -> None:
        for target in (self._replicator, self._agent):
            self._send(target, "saved", step=step, attempt=attempt, image=image, stall_s=stall_s)

    def missed(self, step: int, reason: str) -> None:
        self._send(self._agent, "missed", step=step, reason=reason)

    def _send(self, target: str, kind: str, **fields: object) -> None:
        if self._socket is None or not target:
            return
        try:
            self._socket.sendto(worker.encode(kind, **self._whose, **fields), socket.MSG_DONTWAIT, target)
        except (OSError, ValueError) as error:  # ValueError: too long for a datagram
            self.dropped += 1
            if self.dropped == 1:
                log.warning("a %s note to %s was dropped (%s); further drops are only counted", kind, target, error)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Control:
    """Agent → worker orders, looked at between steps. End of file means that the agent is gone: there is nothing to obey."""

    def __init__(self, fd: int | None) -> None:
        self._socket = None if fd is None else socket.socket(fileno=fd)

    def poll(self) -> list[Mapping[str, Any]]:
        """The orders that have arrived, oldest first; never waits."""
        orders: list[Mapping[str, Any]] = []
        while self._socket is not None and len(orders) < ORDERS_PER_POLL_MAX:
            try:
                raw = self._socket.recv(worker.MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                self._abandon(f"the control channel failed ({error})")
                break
            if not raw:
                self._abandon("the agent closed the control channel")
                break
            orders.append(worker.decode(raw))
        return orders

    def _abandon(self, why: str) -> None:
        log.warning("%s; training goes on without orders", why)
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
