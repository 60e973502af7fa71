"""A fleet in virtual time for tests of the detectors: signals by name, and a clock that ticks as the service's does.

fleet = Fleet(nodes=3, ranks_per_node=1)
fleet.start()                          # connect every node and start generation 1
fleet.run(until=2.0)                   # beats, progress and clock ticks, every 0.1 s and 20 ms
fleet.exits(4, signal=9)
fleet.run(until=3.0)
assert fleet.kinds() == [...]
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding, FindingKind, StepRecord
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    GenerationStopped,
    KernelLine,
    NodeBeat,
    NodeConnected,
    NodeDisconnected,
    Phase,
    RankProgress,
    Signal,
    StepColumns,
    WorkerError,
    WorkerExited,
)

T0 = 1_700_000_000.0
CATALOGUE = xid.load()
JOB = "gpt"

COLLECTIVE = WorkerError("RuntimeError", "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4242")
BUG = WorkerError("ValueError", "bad batch 17", ("/t/train.py:10 <module>", "/t/train.py:7 loss"))


@dataclass
class Rank:
    step: int = 0
    phase: Phase = Phase.STEP
    state: str = "S"
    cpu: float = 0.02  # CPU seconds per second
    cpu_s: float = 0.0
    seq: int = -1
    phase_at: float = 0.5  # since T0; an agent says its start for a rank that never spoke
    alive: bool = True


@dataclass
class Fleet:
    nodes: int = 3
    ranks_per_node: int = 1
    mesh: Mesh | None = None
    hang: HangSpec = field(default_factory=HangSpec)
    step_s: float = 0.5
    generation: int = 1
    job: str = JOB
    submission: str = "s1"
    learned_start: bool = False
    clock_ahead_s: dict[str, float] = field(default_factory=dict)  # of nodes whose clocks are wrong

    def __post_init__(self) -> None:
        self.engine = Engine(detectors.standard(CATALOGUE))
        self.now = 0.0  # since T0
        self.found: list[Finding] = []
        self.repeats: list[Finding] = []  # what was said before, and still holds
        self.records: list[StepRecord] = []
        self.ranks = {rank: Rank() for rank in range(self.nodes * self.ranks_per_node)}
        self.silent: set[str] = set()  # nodes that send nothing
        self.training = True
        self._next_beat = 0.0
        self._next_step = self.step_s

    # ------------------------------------------------------------------ names

    @property
    def names(self) -> list[str]:
        return [f"n{i}" for i in range(self.nodes)]

    def node_of(self, rank: int) -> str:
        return f"n{rank // self.ranks_per_node}"

    def ranks_of(self, node: str) -> list[int]:
        first = int(node[1:]) * self.ranks_per_node
        return list(range(first, first + self.ranks_per_node))

    # ------------------------------------------------------------------ what happens

    def fold(self, signal: Signal) -> None:
        folded = self.engine.fold(signal, T0 + self.now)
        self.found += [finding for finding in folded.findings if not finding.repeat]
        self.repeats += [finding for finding in folded.findings if finding.repeat]
        self.records += folded.steps

    def start(self, generation: int | None = None, *, connect: bool = True) -> None:
        self.generation = generation or self.generation
        for node in self.names:
            if connect:
                self.fold(NodeConnected(node, T0 + self.now, incarnation=f"{node}-a"))
            self.fold(self.started(node))

    def started(self, node: str) -> GenerationStarted:
        mesh = self.mesh or Mesh.of({"dp": len(self.ranks)})
        ranks = tuple(self.ranks_of(node))
        at = T0 + self.now + self.clock_ahead_s.get(node, 0.0)
        started = GenerationStarted(node, at, self.job, self.generation, mesh, ranks, self.hang, self.submission)
        return replace(started, learned_start=self.learned_start)

    def stop(self, *nodes: str, finished: bool = False) -> None:
        for node in nodes or self.names:
            self.fold(GenerationStopped(node, T0 + self.now, self.job, self.generation, finished))

    def exit_of(self, rank: int, *, at: float | None = None, **fields: object) -> WorkerExited:
        base = WorkerExited(
            node=self.node_of(rank),
            at=T0 + (self.now if at is None else at),
            job=self.job,
            generation=self.generation,
            rank=rank,
            pid=1000 + rank,
            exit_code=None if "signal" in fields else 1,
            signal=None,
            step=self.ranks[rank].step,
            expected=False,
        )
        return replace(base, **fields)  # type: ignore[arg-type]

    def exits(self, rank: int, *, at: float | None = None, **fields: object) -> None:
        self.ranks[rank].alive = False
        self.fold(self.exit_of(rank, at=at, **fields))

    def breaks(self, *nodes: str, clean: bool = False) -> None:
        for node in nodes:
            self.silent.add(node)
            self.fold(NodeDisconnected(node, T0 + self.now, clean=clean))

    def dies(self, *nodes: str) -> None:
        """Nodes go with their workers, so that no step is finished any more."""
        self.training = False
        self.breaks(*nodes)

    def connects(self, node: str, incarnation: str | None = None) -> None:
        self.silent.discard(node)
        self.fold(NodeConnected(node, T0 + self.now, incarnation or f"{node}-a"))

    def xid(self, code: int, node: str = "n0", *, gpu: int = 0, text: str = "") -> None:
        line = text or f"NVRM: Xid (PCI:0000:{gpu:02x}:00): {code}, pid=1, something happened"
        self.fold(KernelLine(node, T0 + self.now, line, xid=code, pci=f"0000:{gpu:02x}:00", gpu=gpu))

    # ------------------------------------------------------------------ time

    def run(self, until: float, *, chance: random.Random | None = None) -> None:
        """Let time pass: clock ticks every 20 ms, beats and progress every 0.1 s, steps every `step_s`."""
        while self.now < until - 1e-9:
            self.now = round(self.now + 0.02, 6)
            if self.training and self.now >= self._next_step:
                self._step()
                jitter = chance.uniform(0.6, 1.8) if chance else 1.0
                self._next_step = self.now + self.step_s * jitter
            if self.now >= self._next_beat:
                self._next_beat = self.now + 0.1
                for node in self.names:
                    if node not in self.silent and (chance is None or chance.random() > 0.1):
                        self.beat(node)
            self.fold(ClockTick(T0 + self.now))

    def beat(self, node: str) -> None:
        self.fold(NodeBeat(node, T0 + self.now))
        self.fold(self.progress(node))

    def progress(self, node: str) -> RankProgress:
        ids = [rank for rank in self.ranks_of(node) if self.ranks[rank].alive]
        ranks = [self.ranks[rank] for rank in ids]
        for rank in ranks:
            rank.cpu_s += 0.0 if rank.state == "T" else rank.cpu * 0.1
        return RankProgress(
            node=node,
            at=T0 + self.now,
            job=self.job,
            generation=self.generation,
            rank=tuple(ids),
            step=tuple(rank.step for rank in ranks),
            phase=tuple(rank.phase for rank in ranks),
            phase_at=tuple(T0 + rank.phase_at for rank in ranks),
            process_state=tuple(rank.state for rank in ranks),
            cpu_s=tuple(rank.cpu_s for rank in ranks),
            collective_seq=tuple(rank.seq for rank in ranks),
        )

    def _step(self) -> None:
        for node in self.names:
            ids = self.ranks_of(node)
            for rank in ids:
                self.ranks[rank].step += 1
                self.ranks[rank].phase_at = self.now
            self.fold(self.columns(node, ids))

    def columns(self, node: str, ids: Iterable[int], loss: float = 1.0) -> StepColumns:
        ids = tuple(ids)
        n = len(ids)
        return StepColumns(
            node=node,
            at=T0 + self.now,
            job=self.job,
            generation=self.generation,
            rank=ids,
            step=tuple(self.ranks[rank].step for rank in ids),
            started_at=(T0 + self.now - self.step_s,) * n,
            ended_at=(T0 + self.now,) * n,
            data_s=(0.0,) * n,
            stall_s=(0.0,) * n,
            tokens=(100,) * n,
            loss=(loss,) * n,
            grad_norm=(1.0,) * n,
        )

    # ------------------------------------------------------------------ what was found

    def kinds(self) -> list[FindingKind]:
        return [finding.kind for finding in self.found]

    def only(self) -> Finding:
        assert len(self.found) == 1, [finding.summary for finding in self.found]
        return self.found[0]
