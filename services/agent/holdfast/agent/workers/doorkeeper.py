"""Checks the notes of workers that run as another user, and passes those about checkpoints on to the replicator.

All jobs of a node share one socket, and a note contains its rank. It is accepted only if the kernel confirms its sender
(`senders`). The replicator has no list of workers to compare with: its socket is closed to workers, and it receives only notes
that were checked here."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from holdfast.agent.workers.senders import Senders
from holdfast.agent.workers.worker import Worker
from holdfast.domain.notes import MissedNote, Note, SavedNote

log = structlog.get_logger("holdfast.agent.workers")

LOG_INTERVAL_S = 60.0


class Doorkeeper:
    """`replicator`: the datagram socket of the replicator; a relative path = there is no replicator. `refused`: how many notes
    were not their sender's."""

    def __init__(self, replicator: Path) -> None:
        self._replicator = str(replicator) if replicator.is_absolute() else ""
        self._senders = Senders()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._logged_at = -LOG_INTERVAL_S
        self.refused = 0

    def admit(self, note: Note, sender: int, raw: bytes, workers: Mapping[int, Worker]) -> bool:
        """Whether the process `sender` belongs to the worker whose rank the note names. `raw`: the note as it was sent."""
        worker = workers.get(note.sender.rank)
        if worker is None or not self._senders.belongs(sender, worker.pid):
            self._refuse(note, sender)
            return False
        if self._replicator and isinstance(note, SavedNote | MissedNote):
            self._pass_on(raw)
        return True

    def _refuse(self, note: Note, sender: int) -> None:
        self.refused += 1
        if time.monotonic() - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            log.warning(
                "note of a process refused: it is of another worker",
                job=note.sender.job, rank=note.sender.rank, pid=sender, refused=self.refused,
            )  # fmt: skip

    def close(self) -> None:
        self._socket.close()

    def _pass_on(self, raw: bytes) -> None:
        try:
            self._socket.sendto(raw, socket.MSG_DONTWAIT, self._replicator)
        except OSError:
            pass  # it restarts, or has many notes to read (its rescan finds the save), or this agent is stopping
