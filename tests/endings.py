"""Worker endings as people have met them (tests/data/endings), from the agent's signal to the end of the job.

The real detectors, the real core and the default policy, in virtual time:

trial = Trial(spares=1)
trial.fails(ending, while_=lambda trial: True)
assert trial.job.phase is JobPhase.FAILED
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from fleet import JOB, Fleet, job

from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.job import HangSpec
from holdfast.domain.orders import Prepare
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    NodeConnected,
    Signal,
    StepColumns,
    WorkerError,
    WorkerExited,
)
from holdfast.supervisor.core import Job
from holdfast.supervisor.protocol import FindingArrived, JobPhase, StepsCompleted
from holdfast.supervisor.timers import RetryDue

DATA = Path(__file__).parent / "data" / "endings"
CATALOGUE = xid.load()
TRIES_MAX = 40  # of a trial; an outage of ten minutes takes about ten


@dataclass(frozen=True, slots=True)
class Ending:
    """One line of the corpus."""

    truth: str  # "user", "node" (one node's own environment) or "outage" (storage, a service)
    step: int  # the last one finished
    error: WorkerError
    origin: str
    missed: bool = False  # of the held-out half: known not to be judged rightly

    def __str__(self) -> str:
        return f"{self.truth}: {self.error.type}: {self.error.message[:60]}"


def load(half: str) -> list[Ending]:
    """`half`: "development" or "held_out"."""
    lines: list[dict[str, Any]] = yaml.safe_load((DATA / f"{half}.yaml").read_text(encoding="utf-8"))
    return [
        Ending(
            line["truth"],
            line["step"],
            WorkerError(line["error"][0], line["error"][1], tuple(line["error"][2:])),
            line["origin"],
            line.get("missed", False),
        )
        for line in lines
    ]


@dataclass
class Trial:
    """A job on three nodes, one rank each, whose worker ends in the same way again and again."""

    spares: int = 1
    nodes: int = 3
    failures: int = 0
    swaps: int = 0
    pauses_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet = Fleet(self.nodes + self.spares, snapshots=False)  # hundreds of trials are made
        self.engine = Engine(detectors.standard(CATALOGUE))
        self.fleet.submit(job(dp=self.nodes, interval=100))
        for index in range(self.nodes + self.spares):
            self._see(NodeConnected(f"n{index}", self.fleet.now, "a"))

    @property
    def job(self) -> Job:
        return self.fleet.job

    @property
    def failed(self) -> bool:
        return self.job.phase is JobPhase.FAILED

    def _see(self, signal: Signal) -> None:
        for finding in self.engine.fold(signal, self.fleet.now).findings:
            self.fleet.fold(FindingArrived(self.fleet.now, finding))

    def fails(self, ending: Ending, rank: int | None, while_: Callable[[Trial], bool]) -> None:
        """Every generation ends so on `rank` (None: on all) while the condition holds; then the job trains on."""
        while self.failures < TRIES_MAX and not self.failed:
            before = self.fleet.nodes()
            self._start(ending)
            if not while_(self):
                return
            for each in range(self.nodes) if rank is None else (rank,):
                self._ends(ending, each)
            for _ in range(25):  # a communication error waits for its root
                self.fleet.now += 0.02
                self._see(ClockTick(self.fleet.now))
            self.failures += 1
            began = self.fleet.now
            while self.job.phase is JobPhase.WAITING:
                self.fleet.answer_orders()  # its workers stop
                self.fleet.wait(max(0.0, self.fleet.state.timers[RetryDue(JOB)] - self.fleet.now))
            self.pauses_s.append(self.fleet.now - began)
            if not self.failed:
                assert self.fleet.orders(Prepare), "the next generation is on its way"
                self.swaps += self.fleet.nodes() != before

    def _start(self, ending: Ending) -> None:
        """The generation starts and reaches the step after which it ends."""
        fleet = self.fleet
        fleet.now += 5.0
        fleet.answer_orders()
        generation = fleet.job.generation
        assert generation is not None
        for placement in generation.placements:
            ranks = tuple(placement.ranks)
            self._see(
                GenerationStarted(placement.node, fleet.now, JOB, generation.number, generation.mesh, ranks, HangSpec())
            )
        fleet.now += 20.0
        if ending.step == 0:
            return
        fleet.step_all(generation.restore.step + 1)
        fleet.fold(StepsCompleted(fleet.now, JOB, generation.number, ending.step, fleet.now, 10, 0.1))
        for rank in range(self.nodes):
            one = (rank,), (ending.step,), (fleet.now - 1,), (fleet.now,), (0.0,), (0.0,), (1,), (1.0,), (1.0,)
            self._see(StepColumns(generation.node_of(rank), fleet.now, JOB, generation.number, *one))

    def _ends(self, ending: Ending, rank: int) -> None:
        fleet = self.fleet
        generation = fleet.job.running
        assert generation is not None
        node = generation.node_of(rank)
        self._see(
            WorkerExited(
                node, fleet.now, JOB, generation.number, rank, 100 + rank, 1, None, ending.step, False, ending.error
            )
        )
