"""The other ends of the channels of a run, for tests without an agent, and the README's loop."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast.train as hf
from holdfast.domain import worker
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import Phase
from holdfast.train.channels import Notes

MESH = Mesh.of({"dp": 2})

StartRun = Callable[..., hf.Run]


class Agent:
    """The other ends of a run's channels."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "notes"
        self._notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notes.bind(str(self.path))
        self._notes.setblocking(False)
        self._control: socket.socket | None = None
        self._seen: list[dict[str, Any]] = []

    def connect(self) -> int:
        """A new worker; returns its end of the control channel."""
        if self._control is not None:
            self._control.close()
        self._control, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return child.detach()

    def order(self, kind: str, **fields: object) -> None:
        assert self._control is not None
        self._control.send(worker.encode(kind, **fields))

    def votes(self) -> list[tuple[int, bool]]:
        """The answers to proposals since the last call."""
        assert self._control is not None
        found: list[tuple[int, bool]] = []
        while True:
            try:
                message = worker.decode(self._control.recv(worker.MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return found
            assert message["type"] == "vote"
            found.append((message["ballot"], message["yes"]))

    def order_once_saving(self, patch: pytest.MonkeyPatch, step: int, kind: str, **fields: object) -> None:
        """Send the order once, when the save of `step` has begun and before it goes on."""
        say, orders = Notes.phase, [(kind, fields)]

        def saying(notes: Notes, phase: Phase, at: float, of_step: int) -> None:
            say(notes, phase, at, of_step)
            while orders and (phase, of_step) == (Phase.CHECKPOINT, step):
                name, values = orders.pop()
                self.order(name, **values)

        patch.setattr(Notes, "phase", saying)

    def notes(self, kind: str) -> list[dict[str, Any]]:
        while True:
            try:
                self._seen.append(dict(worker.decode(self._notes.recv(worker.MESSAGE_BYTES_MAX))))
            except BlockingIOError:
                return [note for note in self._seen if note["type"] == kind]

    def close(self) -> None:
        for end in (self._notes, self._control):
            if end is not None:
                end.close()


def loop(
    run: hf.Run, steps: int, *, state: dict[str, Any] | None = None, start: int = 0, listener: Agent | None = None
) -> list[int]:
    """The README's loop; returns the steps that were saved. `listener` takes its notes as they come."""
    saved = []
    for step in range(start, start + steps):
        with run.step(step):
            pass
        if run.checkpoint(state or {"w": torch.ones(2)}, step + 1):
            saved.append(step + 1)
        if listener is not None:
            listener.notes("step")
    return saved
