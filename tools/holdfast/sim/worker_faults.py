"""Faults of workers and nodes in a simulation: what happens on the node, and what diagnostics can observe of it."""

from __future__ import annotations

from random import Random

from holdfast.domain.findings import FindingKind
from holdfast.domain.signals import WorkerError
from holdfast.sim.agent import Agent
from holdfast.sim.diagnostics import Diagnostics
from holdfast.sim.telemetry import CASCADING, KILLED, Ending
from holdfast.sim.truth import Truth
from holdfast.sim.world import World

OFF_THE_BUS = (79, "pid=1, name=python, GPU has fallen off the bus.")
NEED_RESET = ((119, "Timeout waiting for RPC from GSP!"), (110, "Security fault"), (143, "GPU initialization failed"))
REMAPPED = (63, "Row Remapper: New row marked for remapping, reset gpu to activate.")
OF_THEIR_OWN = (11, 7, 4, 8)  # SIGSEGV, SIGBUS, SIGILL, SIGFPE
EXIT_CODES = range(2, 120)
HOLDS_S = (0.05, 2.0)  # from a failure until the collectives of the other ranks fail


class WorkerFaults:
    """Each fault of a job ends in another way, because the same end at the same step is a bug of its script."""

    def __init__(self, world: World, diagnostics: Diagnostics, truth: Truth) -> None:
        self._world, self._diagnostics, self._truth = world, diagnostics, truth
        self._chance = Random(f"faults of workers of {world.seed}")
        self._count = 0
        self._announced: set[tuple[str, str, str, float | None]] = set()

    def crash(self, agent: Agent, rank: int) -> None:
        """Let a rank be killed, exit, or raise an error of its device. In some cases the collectives of other ranks fail."""
        by_device = self._device_error()
        self._end(agent, rank, self._chance.choice((KILLED, self._exit_code(), by_device)))
        if self._chance.random() < 0.4:
            self._cascade(agent)

    def crash_on_device(self, agent: Agent, rank: int) -> None:
        """Let a rank raise an error of its device."""
        self._end(agent, rank, self._device_error())

    def crash_by_signal(self, agent: Agent, rank: int) -> None:
        """End a rank by a signal that makes its node a suspect."""
        self._count += 1
        self._end(agent, rank, Ending(signal=OF_THEIR_OWN[self._count % len(OF_THEIR_OWN)]))

    def fails_with_another(self, agent: Agent, rank: int) -> None:
        """Let a rank fail in a collective, because another rank or node has ended."""
        self._truth.drags(agent, rank)
        self._diagnostics.ends(agent, rank, CASCADING)
        agent.crashed(rank)

    def hang(self, agent: Agent, rank: int) -> None:
        """Let a rank sleep for ever, or stop its process."""
        assert agent.workers is not None
        self._truth.begins(FindingKind.HANG, agent, rank)
        agent.workers.hung.add(rank)
        if self._chance.random() < 0.5:
            self._diagnostics.freezes(agent, rank)
        agent.around.workers_changed(agent)

    def off_the_bus(self, agent: Agent) -> None:
        """Let a GPU fall off the bus, so that its node cannot be used any more."""
        self._xid(agent, *OFF_THE_BUS)

    def needs_reset(self, agent: Agent, *, later: bool) -> None:
        """Let a GPU need a reset: at once, or at the job's next boundary."""
        if agent.alive:
            self._xid(agent, *(REMAPPED if later else self._chance.choice(NEED_RESET)))

    def announced(self, agent: Agent, source: str, event: str, starts_at: float | None, incarnation: str = "") -> None:
        """Let the owner of a machine announce that it will take the machine."""
        starts_at = None if starts_at is None else starts_at + agent.clock.ahead_s
        second = None if starts_at is None else round(starts_at)
        known = (agent.name, source, event, second) in self._announced  # announced again, it is the same finding
        self._announced.add((agent.name, source, event, second))
        self._truth.begins(FindingKind.MAINTENANCE, agent, expected=not known)
        self._diagnostics.notice(agent, source, event, starts_at, incarnation)

    def _xid(self, agent: Agent, code: int, text: str) -> None:
        self._truth.begins(FindingKind.GPU_ERROR, agent)
        self._diagnostics.xid(agent, code, text)

    def _device_error(self) -> Ending:
        self._count += 1
        frames = (f"/train.py:{self._count} step",)
        return Ending(exit_code=1, error=WorkerError("RuntimeError", "CUDA error: unspecified launch failure", frames))

    def _exit_code(self) -> Ending:
        return Ending(exit_code=EXIT_CODES[self._count % len(EXIT_CODES)])

    def _end(self, agent: Agent, rank: int, ending: Ending) -> None:
        assert agent.workers is not None
        if rank not in agent.workers.dead | agent.workers.done:
            self._truth.begins(FindingKind.WORKER_CRASH, agent, rank)
        self._diagnostics.ends(agent, rank, ending)
        agent.crashed(rank)

    def _cascade(self, agent: Agent) -> None:
        assert agent.workers is not None
        order = agent.workers.order
        for other in self._diagnostics.agents.values():
            workers = other.workers
            if (
                other is agent
                or workers is None
                or (workers.order.job, workers.order.generation) != (order.job, order.generation)
            ):
                continue
            for rank in other.ranks:
                self._world.after(
                    self._chance.uniform(*HOLDS_S),
                    lambda node=other, failed=rank, its=workers: self._fail(node, failed, its),  # type: ignore[misc]
                )

    def _fail(self, agent: Agent, rank: int, workers: object) -> None:
        if agent.alive and agent.workers is not None and agent.workers is workers and rank in agent.workers.living:
            self.fails_with_another(agent, rank)
