"""Saves are requested, and the interval changes, while the steps become much quicker: at each step all nodes save, or none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from worlds import require_found

from holdfast.domain.evolve import evolve
from holdfast.domain.job import CheckpointSpec
from holdfast.domain.orders import CheckpointNow, OrderDone, SaveStage, SetInterval
from holdfast.sim.agent import JOB
from holdfast.sim.hostility import Hostility
from holdfast.sim.releases import Release
from holdfast.sim.scenario import Scenario
from holdfast.sim.training import AGREEMENT_WAIT_S
from holdfast.sim.watched import Step
from holdfast.supervisor.core import State, step
from holdfast.supervisor.core.rules.interval import SAVES_BETWEEN
from holdfast.supervisor.protocol import CheckpointRequested, Command, Event, NodeReported, Send, StepsCompleted

SLOW_S, QUICK_S = 0.5, 0.02
SLOW_STEPS, QUICK_STEPS = 14, 40
STEPS = 20 * (SLOW_STEPS + QUICK_STEPS)
LOOK_S = 0.05
SEEDS = range(3, 6)
ENDING_SEEDS = (3, 34)
FAULTS_MAX = 12


def pace(number: int) -> float:
    return SLOW_S if number % (SLOW_STEPS + QUICK_STEPS) < SLOW_STEPS else QUICK_S


def _measuring(fold: Step) -> Step:
    """In place of each request, saves are measured that take longer than those before, so that another interval is chosen."""
    stalls_s = (1e-7 * 10**number for number in itertools.count())

    def measured(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
        if isinstance(event, CheckpointRequested):
            job = state.jobs[JOB]
            event = StepsCompleted(
                event.at, JOB, job.number, job.progress.step, saves=SAVES_BETWEEN, stall_s=next(stalls_s)
            )
        return fold(state, event)

    return measured


class Quickening(Scenario):
    """No node fails. Each time the steps become quicker, an operator requests a checkpoint or, with `measuring`, the interval
    is chosen again."""

    def __init__(self, seed: int, *, fold: Step, measuring: bool = False) -> None:
        super().__init__(seed, fold=_measuring(fold) if measuring else fold, hostility=Hostility())
        if measuring:
            self.spec = replace(self.spec, checkpoint=CheckpointSpec(0, 2, 0.5, 60.0))
        self.training.pace, self.training.target = pace, STEPS
        self.requested: set[int] = set()
        for agent in self.agents.values():
            agent.release = Release.THIS

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


class Ending(Quickening):
    """The leader, an agent or a machine ends between two of the messages by which the ranks agree."""

    def __init__(self, seed: int, *, measuring: bool) -> None:
        self.ended = 0
        super().__init__(seed, fold=self._fold, measuring=measuring)

    def _fold(self, state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
        after, commands = step(state, event)
        orders = [command.order for command in commands if isinstance(command, Send)]
        proposed = any(isinstance(order, CheckpointNow) and order.stage == SaveStage.PROPOSED for order in orders)
        if proposed and self.ended < FAULTS_MAX:
            self.ended += 1
            others = [] if self.control_plane_only else [self.faults.restart_agent, self.faults.lose_node]
            crash = self.faults.crash_supervisor
            kinds: list[Callable[[], None]] = [crash, crash, self._lose_leader, *others]
            self.world.soon(0.0, 0.2, self.world.chance.choice(kinds))
        return after, commands

    def _lose_leader(self) -> None:
        """For longer than ranks wait for a result."""
        if self.supervisor.leading:
            self.supervisor.crash((AGREEMENT_WAIT_S, 2 * AGREEMENT_WAIT_S))


def stages(seed: int, *, measuring: bool = False) -> set[str]:
    """The stages of the orders to save that the supervisor has sent, and the names of its other orders."""
    found: set[str] = set()

    def watch(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
        after, commands = step(state, event)
        orders = (command.order for command in commands if isinstance(command, Send))
        found.update(order.stage if isinstance(order, CheckpointNow) else type(order).__name__ for order in orders)
        return after, commands

    Quickening(seed, fold=watch, measuring=measuring).run()
    return found


def test_all_nodes_act_at_the_step_or_none() -> None:
    found = stages(SEEDS[0])
    assert {SaveStage.PROPOSED, SaveStage.AGREED, SaveStage.VOID} <= found, "some come too late, and some do not"


def test_all_nodes_change_the_interval_at_the_same_step() -> None:
    found = stages(SEEDS[0], measuring=True)
    assert {SaveStage.PROPOSED, SaveStage.AGREED, SaveStage.VOID, SetInterval.__name__} <= found


def _hear_only_yes(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Planted: a node that cannot agree to a save is taken for one that does."""
    if isinstance(event, NodeReported) and isinstance(event.report, OrderDone) and not event.report.ok:
        event = evolve(event, report=evolve(event.report, ok=True))
    return step(state, event)


def test_a_planted_bug_is_found() -> None:
    require_found("is saved as agreed on", range(13, 19), lambda seed: Quickening(seed, fold=_hear_only_yes).run())


def _change_at_once(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Planted: the nodes get the interval without an agreement of their ranks."""
    after, commands = step(state, event)
    others = [each for each in commands if not (isinstance(each, Send) and isinstance(each.order, CheckpointNow))]
    proposed = [each for each in commands if each not in others and isinstance(each, Send)]
    for send in proposed:
        order, save = send.order, after.jobs[JOB].checkpoints.on_demand
        assert isinstance(order, CheckpointNow)
        if save is not None and save.interval_steps:
            interval = SetInterval(JOB, order.generation, order.at_step, save.interval_steps)
            others.append(Send(send.node, send.command_id, interval))
    return after, tuple(others)


def test_an_interval_without_an_agreement_is_found() -> None:
    require_found(
        r"is saved on ",
        range(1, 4),
        lambda seed: Quickening(seed, fold=_change_at_once, measuring=True).run(),
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("measuring", [False, True], ids=["requests", "intervals"])
def test_whoever_ends_between_two_messages_no_restore_gets_a_step_that_some_ranks_did_not_save(measuring: bool) -> None:
    """`Invariants` compares each restore with what was saved, and each step with what all nodes did."""
    alone = ended = 0
    for seed in ENDING_SEEDS:
        world = Ending(seed, measuring=measuring)
        world.run()
        alone, ended = alone + world.training.decided_alone, ended + world.ended
    assert ended > FAULTS_MAX // 2
    assert alone, "in some of these worlds ranks had to go on without the result"
