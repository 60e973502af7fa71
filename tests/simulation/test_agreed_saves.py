"""Saves are requested while the steps become much quicker: at the step of each save all nodes act, or none."""

from __future__ import annotations

import pytest
from worlds import require_found

from holdfast.domain.evolve import evolve
from holdfast.domain.orders import CheckpointNow, OrderDone, SaveStage
from holdfast.sim.agent import JOB
from holdfast.sim.hostility import Hostility
from holdfast.sim.scenario import Scenario
from holdfast.sim.watched import Step
from holdfast.supervisor.core import State, step
from holdfast.supervisor.protocol import CheckpointRequested, Command, Event, NodeReported, Send

SLOW_S, QUICK_S = 0.5, 0.02
SLOW_STEPS, QUICK_STEPS = 14, 40
STEPS = 20 * (SLOW_STEPS + QUICK_STEPS)
LOOK_S = 0.05
SEEDS = range(3, 6)


def pace(number: int) -> float:
    return SLOW_S if number % (SLOW_STEPS + QUICK_STEPS) < SLOW_STEPS else QUICK_S


class Quickening(Scenario):
    """No node fails. An operator requests a checkpoint each time the steps become quicker."""

    def __init__(self, seed: int, *, fold: Step) -> None:
        super().__init__(seed, fold=fold, hostility=Hostility())
        self.training.pace, self.training.target = pace, STEPS
        self.requested: set[int] = set()
        for agent in self.agents.values():
            agent.is_of_this_version = True

    def _plan_faults(self) -> None:
        self._request()

    def _request(self) -> None:
        """At the last slow step, or during it."""
        period, number = divmod(self.training.step + 1, SLOW_STEPS + QUICK_STEPS)
        if number == SLOW_STEPS and period not in self.requested:
            self.requested.add(period)
            self.world.soon(0.0, SLOW_S, lambda: self.supervisor.append(CheckpointRequested(self.world.now, JOB)))
        if not self.training.finished:
            self.world.after(LOOK_S, self._request)


def stages(seed: int) -> set[str]:
    """The stages of the orders to save that the supervisor has sent."""
    found: set[str] = set()

    def watch(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
        after, commands = step(state, event)
        orders = (command.order for command in commands if isinstance(command, Send))
        found.update(order.stage for order in orders if isinstance(order, CheckpointNow))
        return after, commands

    Quickening(seed, fold=watch).run()
    return found


@pytest.mark.timeout(300)
def test_all_nodes_act_at_the_step_or_none() -> None:
    found = stages(SEEDS[0])
    assert {SaveStage.PROPOSED, SaveStage.AGREED, SaveStage.VOID} <= found, "some come too late, and some do not"


def _hear_only_yes(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Planted: a node that cannot agree to a save is taken for one that does."""
    if isinstance(event, NodeReported) and isinstance(event.report, OrderDone) and not event.report.ok:
        event = evolve(event, report=evolve(event.report, ok=True))
    return step(state, event)


@pytest.mark.timeout(300)
def test_a_planted_bug_is_found() -> None:
    require_found("is saved as agreed on", SEEDS, lambda seed: Quickening(seed, fold=_hear_only_yes).run())
