"""Reports that come together: what several nodes say at the same time comes to what it does when it is folded one by one."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.evolve import evolve
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import Inventory, OrderDone, Prepare, RanksStepping, Report, WorkersChanged
from holdfast.supervisor.core import Batch, State
from holdfast.supervisor.core.model.indexing import index_of
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.protocol import JobPhase, NodeReported


class Recording(Fleet):
    """Keeps what nodes report, to be folded later."""

    def __init__(self, of: Fleet) -> None:
        self.__dict__.update(of.__dict__)
        self.kept: list[NodeReported] = []

    def report(self, node: str, report: Report) -> None:
        self.seq[node] += 1
        incarnation = f"{node}-{self.life[node]}"
        self.kept.append(NodeReported(self.now, node, incarnation, self.seq[node], report, self.session))

    def together(self, seed: int) -> None:
        """Fold what was kept in one turn, the nodes in random order, and compare with one by one in another order."""
        orders = [_shuffled(self.kept, random.Random(seed + each)) for each in range(2)]
        states = []
        for reports, at_once in zip(orders, (True, False), strict=True):
            batch = Batch(self.state)
            for part in [reports] if at_once else [[each] for each in reports]:
                batch.reports(self.now, part)
            states.append(batch.state)
            assert snapshot.changes(self.state, states[-1], batch.written) == snapshot.changes(self.state, states[-1])
            assert states[-1].index == index_of(states[-1])
        assert _settled(states[0]) == _settled(states[1])
        self.state, self.kept = states[0], []


def _shuffled(events: list[NodeReported], rng: random.Random) -> list[NodeReported]:
    places = [event.node for event in events]
    rng.shuffle(places)
    rest = {node: iter([event for event in events if event.node == node]) for node in places}
    return [next(rest[node]) for node in places]


class Noisy(Recording):
    """Besides, the nodes send reports that have no effect: repeated, late, and of others' ranks and orders."""

    def __init__(self, of: Fleet, rng: random.Random) -> None:
        super().__init__(of)
        self.rng = rng
        self.session = 2  # there was another one
        self.state = replace(
            self.state, nodes={name: replace(node, session=2) for name, node in self.state.nodes.items()}
        )

    def report(self, node: str, report: Report) -> None:
        super().report(node, report)
        newest = self.kept[-1]
        noise: list[Report] = [
            RanksStepping(JOB, self.job.number - 1, (0,), 9, self.now),
            RanksStepping(JOB, self.job.number, (0, 1, 2), 9, self.now),  # some are of others
            OrderDone("c-0-0-1.abcdef/3", True, "", "n9:1", self.now),  # an order that is withdrawn
            *(OrderDone(send.command_id, True, at=self.now) for send in self.state.sends() if send.node != node),
        ]
        copies = [
            newest,
            replace(newest, session=1, seq=10**6),
            replace(newest, incarnation="before", seq=10**6),
        ]
        for each in self.rng.sample([*noise, *copies], self.rng.randrange(4)):
            if isinstance(each, NodeReported):
                self.kept.append(each)
            else:
                super().report(node, each)


def _settled(state: State) -> State:
    """Without the count of what may have changed for other jobs, and without the notes of answers to others' orders: whether
    these are late depends on the order of the reports."""
    nodes = {name: replace(node, refused_at=0.0) for name, node in state.nodes.items()}
    return replace(state, uses=0, nodes=nodes)


@pytest.mark.parametrize("noisy", [False, True], ids=["alone", "with reports that have no effect"])
@pytest.mark.parametrize("seed", range(5))
def test_answers_workers_steps_and_inventories(seed: int, noisy: bool) -> None:
    fleet = running(job(dp=24), spares=1)
    fleet.lose("n3")
    fleet.expect(JobPhase.PREPARING)
    world = Noisy(fleet, random.Random(seed)) if noisy else Recording(fleet)
    number = fleet.job.number
    for node, order in fleet.orders(Prepare).items():
        assert isinstance(order, Prepare)
        [send] = [each for each in fleet.sent if each.node == node and each.order == order]
        rank = place = order.placement.first_rank
        workers = (RunningWorker(JOB, number, rank, 100 + rank, fleet.now),)
        phases = (("stop", place / 100), ("fork", 0.01))
        master = "n0:29500" if rank == 0 else ""
        at = fleet.now + place / 1000
        version = 7 if place % 2 else 0  # the others' agents are of an earlier version
        done = OrderDone(
            send.command_id, True, "", master, at, phases, workers, (("memory", 1),), False, (("memory", 9),), version
        )
        world.report(send.node, done)
        if not version:
            world.report(send.node, WorkersChanged(7, workers))
    world.together(seed)
    world.expect(JobPhase.STARTING)
    assert world.job.change is not None
    assert {world.state.nodes[node].workers_version for node in world.nodes()} == {7}
    assert (world.job.change.restored_from, world.job.change.restored_bytes) == ({"memory": 24}, {"memory": 216})
    assert len(world.job.change.shares) == 16, "the last ones"
    generation = world.job.generation
    assert generation is not None
    for send in list(world.state.sends()):
        world.report(send.node, OrderDone(send.command_id, True, at=world.now))
    world.together(seed)
    assert not list(world.state.sends())
    for placement in generation.placements:
        at = world.now + placement.slot / 1000
        world.report(placement.node, RanksStepping(JOB, number, tuple(placement.ranks), 1 + placement.slot % 2, at))
    world.together(seed)
    world.expect(JobPhase.RUNNING)
    for placement in generation.placements:
        key = ShardKey(generation.attempt, 5, placement.first_rank)
        shard = ShardRecord(key, generation.mesh, "memory", 1, "d", placement.node)
        world.report(placement.node, Inventory(JOB, (shard,)))
    world.together(seed)
    assert world.job.checkpoints.step == 5


@pytest.mark.parametrize("seed", range(5))
def test_answers_to_the_broadcasts_of_two_jobs(seed: int) -> None:
    """Each answer counts for the order that its node was given, whichever broadcast the answer before it belongs to."""
    fleet = Fleet(16)
    fleet.submit(job(dp=8))
    fleet.submit(job(dp=8, name="other"))
    world, rng = Recording(fleet), random.Random(seed)
    sends = list(world.state.sends())
    # One node of each job does not answer: the last answer of a job leads to further orders, whose ids depend on the order.
    silent = {send.order.job: send.node for send in sends}
    for send in sends:
        if rng.random() < 0.5:  # it answers another node's order first
            other = rng.choice([each for each in sends if each is not send])
            world.report(send.node, OrderDone(other.command_id, True, at=world.now))
        if send.node not in silent.values():
            world.report(send.node, OrderDone(send.command_id, True, at=world.now))
    world.together(seed)
    left = {send.order.job: send.node for send in world.state.sends()}
    assert left == silent


def test_a_copy_of_a_node_is_as_small_as_a_dictionary_of_its_fields_can_be() -> None:
    """With one field more, it takes twice the memory, and an incident of a large job copies each of its nodes several times."""
    node = running(job(dp=2)).state.nodes["n0"]
    copied = evolve(node, connected=True)
    assert len(vars(node)) <= 42
    assert sys.getsizeof(vars(copied)) == sys.getsizeof(dict(vars(node)))
    assert sys.getsizeof(vars(evolve(copied, connected=True))) == sys.getsizeof(vars(copied))
