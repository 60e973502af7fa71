"""Suspects in a simulation, which test themselves while they prepare: the outcomes of the tests, and the promise about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from holdfast.domain.generations import Generation
from holdfast.domain.nodes import Check, Preflight
from holdfast.domain.orders import OrderDone, Start
from holdfast.sim.world import Violation
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import (
    Command,
    Event,
    GenerationChanged,
    GenerationStage,
    NodeCordonRequested,
    NodeRepaired,
    NodeReported,
    Publish,
    Send,
)

FAULTS_MAX = 3
FAILURES_MAX = 6  # failed tests in a run, because broken machines are repaired at some time


@dataclass(slots=True)
class SelfTests:
    """The tests of one seed. None by default: twelve of sixteen seeds give the same runs as before suspects were tested."""

    faults: int = 0
    share: float = 0.0  # fraction of the next tests that fail
    failures: int = 0  # remaining failures
    chance: Random = field(default_factory=Random, compare=False)

    @classmethod
    def of(cls, seed: int) -> SelfTests:
        if seed % 16 not in (2, 5, 6, 14):
            return cls()
        chance = Random(f"suspects of {seed}")
        share = chance.choice((0.2, 0.5, 0.8))
        return cls(chance.randint(1, FAULTS_MAX), share, chance.randint(1, FAILURES_MAX), chance)

    def calm(self) -> None:
        """Let no test fail from now on."""
        self.failures = 0

    def outcome(self, budget_s: float, now: float) -> tuple[float, Preflight]:
        """Return the duration of a node's tests, in seconds, and their result."""
        drawn = self.chance.random()
        if drawn < self.share and self.failures:
            self.failures -= 1
            duration_s, check = self.chance.uniform(0.05, budget_s), Check("devices", False, "cuda:0: CUDA error")
        elif drawn < self.share + 0.1:
            duration_s, check = budget_s, Check("products", None, f"not concluded within {budget_s:g} s")
        else:
            duration_s, check = self.chance.uniform(0.05, budget_s), Check("products", True, "90 exact products")
        return duration_s, Preflight(now + duration_s, duration_s, (check,))


@dataclass(slots=True)
class SuspectPromises:
    """A suspect that has failed its tests gets no ranks in the same change, nor in a later change before it has passed its
    tests after a hold-down, or an operator has returned it to service."""

    failed: dict[str, float] = field(default_factory=dict)  # node → time at which the supervisor received the result
    # (node, time of the failure), since answers may repeat
    counted: set[tuple[str, float]] = field(default_factory=set)
    started: set[str] = field(default_factory=set)  # ids of Start orders; unanswered ones are sent again

    def folded(self, before: State, event: Event, after: State, commands: tuple[Command, ...]) -> None:
        match event:
            case NodeRepaired(node=node) | NodeCordonRequested(node=node, cordoned=False):
                self.failed.pop(node, None)
            case NodeReported(report=OrderDone(tested=Preflight() as tested)) if tested.failures:
                known = before.nodes.get(event.node)
                is_heard = known is not None and known.facts.incarnation == event.incarnation
                if is_heard and event.seq > before.last_seq(before.nodes[event.node]):
                    self._failed(event.node, tested, event.at)
        for command in commands:
            match command:
                case Publish(record=GenerationChanged(stage=GenerationStage.PLANNED, generation=generation)):
                    self._no_ranks(generation, after, event.at)
                case Send(order=Start() as order, node=node, command_id=command_id) if command_id not in self.started:
                    self.started.add(command_id)
                    if node in self.failed:
                        raise Violation(
                            f"ranks of generation {order.generation} start on {node}, which failed its tests "
                            f"at {self.failed[node]:.3f}"
                        )

    def _failed(self, node: str, tested: Preflight, at: float) -> None:
        if (node, tested.at) not in self.counted:
            self.counted.add((node, tested.at))
            self.failed[node] = at

    def _no_ranks(self, generation: Generation, after: State, at: float) -> None:
        for name in generation.nodes:
            if name not in self.failed:
                continue
            node, since = after.nodes[name], self.failed[name]
            passed = node.preflight is not None and bool(node.preflight.at) and not node.unfit
            if not passed or node.unschedulable_reason or at < since + after.config.returns.hold_s:
                raise Violation(
                    f"generation {generation.number} takes {name}, which failed its tests at {since:.3f} and has not "
                    "come back from that"
                )
            del self.failed[name]

    def log_went_back(self, state: State) -> None:
        """Forget the results that the log has lost."""
        self.counted = {(name, at) for name, at in self.counted if _failed_at(state, name) == at}
        self.failed = {name: at for name, at in self.failed.items() if _is_out(state, name)}


def _failed_at(state: State, name: str) -> float:
    return state.nodes[name].failed_test_at if name in state.nodes else 0.0


def _is_out(state: State, name: str) -> bool:
    return name in state.nodes and bool(state.nodes[name].failed_test_at) and state.nodes[name].removal is not None
