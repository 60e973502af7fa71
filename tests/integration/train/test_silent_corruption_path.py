"""A flipped bit on its way: the trainer's step loop, the note, the agent's columns, the wire, the engine, the finding."""

from __future__ import annotations

import copy
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

import holdfast.train as hf
from holdfast.agent.workers.progress import Progress
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.notes import Note, parse
from holdfast.domain.signals import GenerationStarted, Tick
from holdfast.train.channels import Control, Notes
from holdfast.train.environment import Environment
from holdfast.wire.telemetry import decode_tick, encode_tick

MESH = Mesh.of({"dp": 3})
STEPS, EVERY, FLIPPED_AFTER = 20, 5, 12


class Rank:
    """One rank and its agent's ear, in this process."""

    def __init__(self, rank: int, model: nn.Module, directory: Path, stack: ExitStack) -> None:
        self.node, self.state = f"n{rank}", {"model": model}
        path = directory / f"{rank}.sock"
        self._ear = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._ear.bind(str(path))
        notes = Notes(agent=str(path), replicator="", job="gpt", generation=1, rank=rank)
        stack.callback(notes.close)
        environment = Environment(hf.World(MESH, rank, 1), job="gpt", replica_check_steps=EVERY)
        self.run = hf.Run(
            environment=environment, device=torch.device("cpu"), notes=notes, control=Control(None), process_group_s=0.0
        )
        self.progress = Progress(node=self.node, job="gpt", generation=1, ranks=(rank,), step=0, at=time.time())
        self.started = GenerationStarted(self.node, time.time(), "gpt", 1, MESH, (rank,), HangSpec())

    def train(self, step: int) -> None:
        with self.run.step(step) as s:
            s.log(loss=1.0, local_grad_norm=0.5)
        self.run.checkpoint(self.state, step + 1)

    def tick(self, seq: int) -> Tick:
        """What its agent sends, after a trip through bytes."""
        for note in self._heard():
            self.progress.fold(note)
        at = time.time()
        said = (self.progress.take_steps(at), self.progress.take_checks(at))
        tick = Tick(self.node, "a", seq, at, tuple(signal for signal in said if signal is not None))
        return decode_tick(encode_tick(tick))

    def _heard(self) -> list[Note]:
        notes: list[Note] = []
        while True:
            try:
                raw = self._ear.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return notes
            if (note := parse(raw)) is not None:
                notes.append(note)


def test_the_node_is_named_with_the_step_that_passed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    engine, found = Engine(detectors.standard(xid.load())), list[Finding]()
    with ExitStack() as stack:
        ranks = [Rank(rank, copy.deepcopy(model), tmp_path, stack) for rank in range(3)]
        for rank in ranks:
            engine.fold(rank.started, time.time())
        for step in range(STEPS):
            for number, rank in enumerate(ranks):
                rank.train(step)
                if (number, step + 1) == (1, FLIPPED_AFTER):
                    first = next(iter(rank.state["model"].parameters()))
                    first.data.view(torch.int32)[3, 5] ^= 1
                for signal in rank.tick(step + 1).signals:
                    found += engine.fold(signal, time.time()).findings
    (finding,) = (finding for finding in found if finding.kind is FindingKind.SILENT_CORRUPTION)
    assert (finding.severity, finding.node, finding.rank) == (Severity.FATAL, "n1", 1)
    assert (finding.evidence["step"], finding.evidence["verified_step"]) == ("15", "10")
