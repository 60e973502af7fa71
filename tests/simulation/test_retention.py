"""Nodes whose disks are not equally fast: the real plan on each, the real core that tells what all have, and words that are
lost, late and repeated. Once there was a step that every node had, there always is one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from fleet import JOB, job, running

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import Generation, ShardKey, ShardRecord
from holdfast.domain.orders import Inventory
from holdfast.domain.replication import CommonCheckpoint
from holdfast.replicator.plan import BACKLOG_STEPS_MAX, plan
from holdfast.replicator.view import Copies, CopyToDisk, Delete, Held, Push, Tier, View, id_of
from holdfast.supervisor.protocol import SendNotification

NODES = 3
KEEP = 2
TICKS = 60
TICK_S = 1.0
SLOW_TICKS = 5  # how long the slow node's disk takes for one shard, in saves


@dataclass
class Node:
    name: str
    rank: int
    copy_ticks: int
    peer: Node | None = None
    images: list[ShardKey] = field(default_factory=list)
    disk: set[ShardKey] = field(default_factory=set)
    pushed: set[tuple[ShardKey, str]] = field(default_factory=set)
    copying: tuple[ShardKey, int] | None = None  # ticks left
    retain_from: CheckpointId | None = None

    def view(self, attempt: int) -> View:
        assert self.peer is not None
        held = [Held(Tier.IMAGE, key) for key in self.images] + [Held(Tier.DISK, key) for key in self.disk]
        return View(
            attempt=attempt,
            ranks=(self.rank,),
            world_size=NODES,
            keep=KEEP,
            peers=(self.peer.name,),
            held=Copies.of(held),
            pushed=frozenset(self.pushed),
            saved_by_all=self.retain_from,
        )

    def tick(self, attempt: int) -> None:
        if self.copying is not None:
            key, left = self.copying
            self.copying = (key, left - 1) if left > 1 else None
            if left == 1:
                self.disk.add(key)
        assert self.peer is not None
        for step in plan(self.view(attempt)):
            match step:
                case CopyToDisk(key) if self.copying is None:
                    self.copying = (key, self.copy_ticks)
                case Push(key):
                    self.peer.disk.add(key)
                    self.pushed.add((key, self.peer.name))
                case Delete(Tier.DISK, key):
                    self.disk.remove(key)
                case _:
                    pass

    def own(self) -> set[tuple[int, int]]:
        return {id_of(key) for key in self.disk if key.rank == self.rank}

    def inventory(self, generation: Generation) -> Inventory:
        tiers = [(key, "memory") for key in self.images] + [(key, "disk") for key in sorted(self.disk, key=str)]
        return Inventory(
            JOB, tuple(ShardRecord(key, generation.mesh, tier, 1, f"{key.step}", self.name) for key, tier in tiers)
        )


def live(seed: int, hears: bool, copy_ticks: tuple[int, ...]) -> list[set[tuple[int, int]]]:
    """The steps that all nodes have on their own disks, tick by tick."""
    chance = random.Random(seed)
    fleet = running(job(dp=NODES))
    generation = fleet.job.running
    assert generation is not None
    nodes = [Node(f"n{rank}", rank, ticks) for rank, ticks in enumerate(copy_ticks)]
    common = []
    for tick in range(1, TICKS + 1):
        for node in nodes:
            node.peer = nodes[(node.rank + 1) % NODES]
            node.images = [*node.images[-1:], ShardKey(generation.attempt, 10 * tick, node.rank)]
            node.tick(generation.attempt)
            assert len(node.own()) <= KEEP + BACKLOG_STEPS_MAX + 2, "bounded, whatever the others do"
        common.append(set.intersection(*(node.own() for node in nodes)))
        for node in nodes:
            if chance.random() < 0.7:
                fleet.report(node.name, node.inventory(generation))
        fleet.wait(TICK_S)
        if hears:
            _deliver(chance, fleet.said, nodes)
    return common


def _deliver(chance: random.Random, said: list[SendNotification], nodes: list[Node]) -> None:
    """Some of what was ever said, in any order; a replicator takes no older word for a newer one."""
    for tell in chance.sample(said, min(len(said), 6)):
        node = next(node for node in nodes if (node.name,) == tell.nodes)
        assert isinstance(tell.message, CommonCheckpoint)
        node.retain_from = max(node.retain_from or CheckpointId(0, 0), tell.message.checkpoint_id)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("hears", [True, False], ids=["words", "no word at all"])
@pytest.mark.parametrize("copy_ticks", [(1, 1, SLOW_TICKS), (1, 3, SLOW_TICKS)], ids=str)
def test_nodes_that_lag_each_other_share_a_step(seed: int, hears: bool, copy_ticks: tuple[int, ...]) -> None:
    common = live(seed, hears, copy_ticks)
    first = next(number for number, steps in enumerate(common) if steps)
    assert all(common[first:])
    newest = [max(steps) for steps in common[first:]]
    assert newest == sorted(newest) or not hears, "and never an older one than before"


def test_a_node_that_lags_far_behind_keeps_the_others_from_the_step_that_all_have() -> None:
    """Its disk takes longer for one shard than the others' backlog lasts: no newer step will be everybody's."""
    common = live(1, True, (1, 1, 3 * BACKLOG_STEPS_MAX))
    first = next(number for number, steps in enumerate(common) if steps)
    assert all(common[first:])
