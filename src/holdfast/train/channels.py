"""The worker's side of the two channels to its agent (`holdfast.domain.worker`). Neither ever blocks or raises in a step.

A message that cannot be sent at once waits in a short queue. If the queue is full, or the agent has exited, the message is
dropped and counted. The first drop is logged.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from holdfast.domain import worker
from holdfast.domain.notes import (
    GroupsNote,
    MissedNote,
    Note,
    ObservedStepsNote,
    PhaseNote,
    ReplicaCheckNote,
    SavedNote,
    Sender,
    StartedNote,
    StepNote,
    encode,
    reported,
)
from holdfast.domain.signals import Phase

log = logging.getLogger("holdfast.train")

# Limit of orders read per step, so that an agent that floods the channel cannot delay training. The rest are read
# later.
ORDERS_PER_POLL_MAX = 16

WAITING_NOTES_MAX = 64  # per socket; about 10 kB
LAST_NOTES_TIMEOUT_S = 0.25  # waits for a slow receiver when the worker ends
LAST_NOTES_POLL_S = 0.002
REASON_CHARS_MAX = 1000


class _Outbox:
    """Datagrams to one socket path. Sends to the path, not over a connection, so a restarted receiver gets them again.

    The kernel queues few datagrams per socket (`net.unix.max_dgram_qlen`, often 10), so a slow receiver would lose
    messages that are sent only once. Messages that do not fit are sent with the next one; the oldest are dropped first.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._waiting: deque[bytes] = deque(maxlen=WAITING_NOTES_MAX)
        self.dropped = 0

    def send(self, note: bytes) -> None:
        if len(self._waiting) == WAITING_NOTES_MAX:
            self._drop(1, "its reader does not keep up")
        self._waiting.append(note)
        self.flush()

    def flush(self) -> None:
        """Send waiting messages until the socket would block."""
        try:
            while self._waiting:
                self._socket.sendto(self._waiting[0], socket.MSG_DONTWAIT, self._path)
                self._waiting.popleft()
        except BlockingIOError:
            return  # the kernel's queue is full; the next `flush` tries again
        except OSError as error:  # no receiver
            self._drop(len(self._waiting), str(error))
            self._waiting.clear()

    def _drop(self, count: int, why: str) -> None:
        if not self.dropped:
            log.warning(
                "a message to %s was dropped (%s); training continues, further drops are only counted", self._path, why
            )
        self.dropped += count

    def close(self) -> None:
        """Send the queued notes, with at most `LAST_NOTES_TIMEOUT_S` for a slow receiver. Call this after the last step."""
        deadline = time.monotonic() + LAST_NOTES_TIMEOUT_S
        self.flush()
        while self._waiting and time.monotonic() < deadline:
            time.sleep(LAST_NOTES_POLL_S)
            self.flush()
        self._socket.close()


class Notes:
    """Messages from this worker to the agent; `saved` and `missed` also to the replicator. An empty path disables a
    receiver."""

    def __init__(self, *, agent: str, replicator: str, job: str, generation: int, rank: int) -> None:
        self._sender = Sender(job, generation, rank)
        self._agent = _Outbox(agent) if agent else None
        self._replicator = _Outbox(replicator) if replicator else None

    @property
    def dropped(self) -> int:
        """Number of dropped messages."""
        return sum(box.dropped for box in (self._agent, self._replicator) if box is not None)

    def step(
        self,
        *,
        step: int,
        started_at: float,
        ended_at: float,
        ended_uptime_s: float,
        data_s: float,
        stall_s: float,
        comm_wait_s: float | None = None,
        tokens: int,
        loss: float | None,
        grad_norm: float | None,
        local_grad_norm: float | None = None,
        flops: float = 0.0,
    ) -> None:
        note = StepNote(
            self._sender,
            step=step,
            started_at=started_at,
            ended_at=ended_at,
            ended_uptime_s=ended_uptime_s,
            data_s=data_s,
            stall_s=stall_s,
            comm_wait_s=math.nan if comm_wait_s is None else comm_wait_s,
            tokens=tokens,
            loss=reported(loss),
            grad_norm=reported(grad_norm),
            local_grad_norm=reported(local_grad_norm),
            flops=float(flops) if 0 <= flops < math.inf else 0.0,  # an invalid count must not make the note invalid
        )
        self._send(note, self._agent)

    def observed_steps(self, *, step: int, steps: int, started_at: float, ended_at: float, comm_wait_s: float) -> None:
        self._send(ObservedStepsNote(self._sender, step, steps, started_at, ended_at, comm_wait_s), self._agent)

    def phase(self, phase: Phase, at: float, step: int) -> None:
        self._send(PhaseNote(self._sender, phase, at, step), self._agent)

    def started(self, phases_s: Mapping[str, float]) -> None:
        self._send(StartedNote(self._sender, tuple(phases_s.items())), self._agent)

    def saved(self, *, step: int, attempt: int, image: str, stall_s: float) -> None:
        self._send(SavedNote(self._sender, step, attempt, image, stall_s), self._replicator, self._agent)

    def groups(self, members: Mapping[str, str]) -> None:
        self._send(GroupsNote(self._sender, tuple(members.items())), self._agent)

    def replica_check(self, *, step: int, digest: str, duration_s: float, restored: bool) -> None:
        self._send(ReplicaCheckNote(self._sender, step, digest, duration_s, restored), self._agent)

    def missed(self, step: int, reason: str) -> None:
        self._send(MissedNote(self._sender, step, reason[:REASON_CHARS_MAX]), self._replicator, self._agent)

    def _send(self, note: Note, *targets: _Outbox | None) -> None:
        for outbox in targets:
            if outbox is not None:
                outbox.send(encode(note))

    def close(self) -> None:
        for outbox in (self._agent, self._replicator):
            if outbox is not None:
                outbox.close()
        self._agent = self._replicator = None


class Control:
    """Orders from the agent to this worker, polled between steps, and the answers to some of them. At end of file the agent has
    exited, and polling stops."""

    def __init__(self, fd: int | None) -> None:
        self._socket = None if fd is None else socket.socket(fileno=fd)

    def poll(self) -> list[Mapping[str, Any]]:
        """Return the orders that have arrived, oldest first. Does not block."""
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

    def answer(self, kind: str, **fields: object) -> bool:
        """Send a message to the agent without waiting. Returns False if it cannot be sent now."""
        try:
            return (
                self._socket is not None and self._socket.send(worker.encode(kind, **fields), socket.MSG_DONTWAIT) > 0
            )
        except OSError:
            return False

    def _abandon(self, why: str) -> None:
        log.warning("%s; training continues without orders", why)
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
