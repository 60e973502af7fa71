"""Whole faults with everything that follows them, in hostile order: one fault, one culprit, every time."""

from __future__ import annotations

import random
from dataclasses import replace

from diagnosing import BUG, COLLECTIVE, Fleet
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.domain.findings import Finding, FindingKind
from holdfast.domain.signals import WorkerExited

WORKER_KINDS = {FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION}


def standing(fleet: Fleet) -> list[Finding]:
    """What is left when corrections have been applied."""
    corrected = {finding.evidence.get("supersedes") for finding in fleet.found}
    return [finding for finding in fleet.found if finding.id not in corrected]


def deliver(fleet: Fleet, exits: list[WorkerExited], chance: random.Random, *, within_s: float) -> None:
    """In any order, some twice, over `within_s`."""
    exits = exits + chance.sample(exits, k=len(exits) // 2)
    chance.shuffle(exits)
    for exit_ in exits:
        fleet.fold(exit_)
        fleet.run(until=fleet.now + chance.uniform(0.0, 2 * within_s / len(exits)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(2, 9), exception=st.booleans())
def test_a_failing_rank_among_its_echoes(seed: int, nodes: int, exception: bool) -> None:
    chance = random.Random(seed)
    fleet = Fleet(nodes=nodes, ranks_per_node=chance.choice([1, 2]))
    fleet.start()
    fleet.run(until=3.0)
    fleet.training = False
    victim = chance.choice(sorted(fleet.ranks))
    how: dict[str, object] = {"error": BUG} if exception else {"signal": 9}
    exits = [fleet.exit_of(victim, at=3.0, **how)]
    exits += [
        fleet.exit_of(rank, at=3.0 + chance.uniform(-0.03, 2.0), error=COLLECTIVE)
        for rank in fleet.ranks
        if rank != victim
    ]
    deliver(fleet, exits, chance, within_s=2.0)
    fleet.run(until=10.0)
    (root,) = standing(fleet)
    assert (root.kind in WORKER_KINDS, root.rank) == (True, victim)
    assert len(fleet.found) <= 2  # at most one doubtful answer before the right one


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(3, 9))
def test_a_lost_node_among_its_echoes(seed: int, nodes: int) -> None:
    chance = random.Random(seed)
    fleet = Fleet(nodes=nodes, ranks_per_node=2)
    fleet.start()
    fleet.run(until=3.0)
    fleet.training = False
    lost = chance.choice(fleet.names)
    exits = [fleet.exit_of(r, error=COLLECTIVE) for r in fleet.ranks if fleet.node_of(r) != lost]
    early = chance.sample(exits, k=chance.randint(0, len(exits)))
    for exit_ in early:
        fleet.fold(exit_)
    fleet.run(until=3.0 + chance.uniform(0.0, 0.2))
    fleet.breaks(lost)
    deliver(fleet, exits, chance, within_s=1.0)
    fleet.run(until=10.0)
    (root,) = standing(fleet)
    assert (root.kind, root.node) == (FindingKind.NODE_LOST, lost)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_streams_that_break_and_return_are_never_a_fault(seed: int) -> None:
    chance = random.Random(seed)
    fleet = Fleet(nodes=6)
    fleet.start()
    for _ in range(30):
        gone = chance.sample(fleet.names, k=chance.randint(1, 6))
        fleet.breaks(*gone)
        fleet.run(until=fleet.now + chance.uniform(0.0, 0.34))
        for node in gone:
            fleet.connects(node)
            fleet.fold(replace(fleet.started(node), at=fleet.started(node).at - fleet.now))  # as announced at first
        fleet.run(until=fleet.now + chance.uniform(0.1, 1.0))
    assert fleet.found == []


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_same_signals_give_the_same_findings(seed: int) -> None:
    def story() -> list[Finding]:
        chance = random.Random(seed)
        fleet = Fleet(nodes=5)
        fleet.start()
        for _ in range(12):
            match chance.randrange(5):
                case 0:
                    fleet.exits(chance.randrange(5), signal=9)
                case 1:
                    fleet.exits(chance.randrange(5), error=COLLECTIVE)
                case 2:
                    fleet.breaks(chance.choice(fleet.names))
                case 3:
                    fleet.xid(chance.choice([13, 48, 79, 154]), chance.choice(fleet.names))
                case _:
                    fleet.stop()
                    fleet.start(fleet.generation + 1, connect=False)
            fleet.run(until=fleet.now + chance.uniform(0.0, 1.0))
        return fleet.found

    assert story() == story()


def test_steps_continue_when_the_generation_is_reported_to_a_restarted_diagnostics() -> None:
    fleet = Fleet(nodes=2)
    fleet.start()
    announced = [fleet.started(node) for node in fleet.names]
    fleet.run(until=2.0)
    after = Fleet(nodes=2)
    after.ranks, after.now = fleet.ranks, fleet.now
    for node, started in zip(after.names, announced, strict=True):
        after.connects(node)
        after.fold(started)
    after.run(until=4.0)
    assert [record.step for record in after.records] == list(range(5, 5 + len(after.records)))
    assert after.records
