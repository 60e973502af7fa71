"""Saved steps that are known and elected, from inventories in every form that agents send, against a search of all shards."""

from __future__ import annotations

from typing import NamedTuple

from fleet import JOB, Fleet, job, running
from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.inventories import difference
from holdfast.domain.orders import Inventory
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.election import Trusted
from holdfast.supervisor.core.saves import saved
from holdfast.v1 import control_pb2 as pb
from holdfast.wire import types
from holdfast.wire.control import decode_report, encode_report

RANKS, PER_NODE = 4, 2
NODES = ("n0", "n1", "n2")  # the last one has no ranks


class Held(NamedTuple):
    step: int
    ranks: frozenset[int]
    tier: str
    digest: str


class Told(NamedTuple):
    node: str
    held: tuple[Held, ...]
    form: str


RANKS_HELD = st.sampled_from(
    [*map(frozenset, ({0, 1}, {2, 3}, {0, 1, 2, 3})), frozenset({1}), frozenset({0, 1, 2}), frozenset({1, 2})]
)
HELD = st.builds(
    Held, st.sampled_from([10, 20, 30]), RANKS_HELD, st.sampled_from(["memory", "disk"]), st.sampled_from("aaab")
)
TOLD = st.builds(
    Told,
    st.sampled_from(NODES),
    st.lists(HELD, max_size=6).map(tuple),
    st.sampled_from(["blocks", "rows", "difference"]),
)


def through_the_wire(inventory: Inventory, *, rows: bool = False) -> Inventory:
    """`rows`: a message for each shard, as the first agents wrote them."""
    message = encode_report(inventory, 1)
    if rows:
        shards = [types.SHARD_RECORD.encode(shard) for shard in inventory.shards]
        message = pb.AgentMessage(seq=1, inventory=pb.Inventory(job=inventory.job, shards=shards))
    arrived = decode_report(pb.AgentMessage.FromString(message.SerializeToString()))
    assert isinstance(arrived, Inventory)
    return arrived


def own_ranks(node: str) -> set[int]:
    first = NODES.index(node) * PER_NODE
    return {rank for rank in range(first, first + PER_NODE) if rank < RANKS}


@given(st.lists(TOLD, min_size=1, max_size=10), st.sampled_from([0, 10, 20, 30]))
def test_known_and_elected_steps_are_those_that_a_search_of_all_shards_finds(said: list[Told], verified: int) -> None:
    fleet: Fleet = running(job(dp=RANKS, nproc=PER_NODE), spares=1)
    fleet.snapshots = False
    generation = fleet.job.running
    assert generation is not None
    held: dict[str, tuple[ShardRecord, ...]] = dict.fromkeys(NODES, ())
    heard = dict.fromkeys(NODES, 0)  # number of the report with the node's shards
    newest = 0
    for node, what, form in said:
        new = {
            (each.step, rank, each.tier): ShardRecord(
                ShardKey(generation.attempt, each.step, rank), generation.mesh, each.tier, 1, each.digest, node
            )
            for each in what
            for rank in sorted(each.ranks)
        }
        report = Inventory(JOB, tuple(new.values()))
        if form == "difference" and heard[node] and held[node]:
            report = difference(Inventory(JOB, held[node]), report, heard[node])
        fleet.report(node, through_the_wire(report, rows=form == "rows"))
        held[node], heard[node] = tuple(new.values()), fleet.seq[node]
        assert set(fleet.state.nodes[node].inventory.get(JOB, ())) == set(held[node])
        saved_at_home = [
            step
            for step in (10, 20, 30)
            if all(own_ranks(each) <= {s.key.rank for s in held[each] if s.key.step == step} for each in NODES)
        ]
        newest = max(newest, *saved_at_home, 0)
        assert fleet.job.checkpoints.step == newest

    # What a node without ranks has beyond all others is not believed.
    newest = max(newest, *(shard.key.step for node in NODES[:2] for shard in held[node]), 0)
    believed = [shard for node in NODES for shard in held[node] if node != NODES[-1] or shard.key.step <= newest]
    complete = [
        step
        for step in (10, 20, 30)
        if all(
            len({shard.digest for shard in believed if (shard.key.step, shard.key.rank) == (step, rank)}) == 1
            for rank in range(RANKS)
        )
        and (not verified or step <= verified)
    ]
    turn = Turn(fleet.state, fleet.now)
    if verified:
        turn.put_checkpoints(JOB, trusted=Trusted(verified, "the check of the state"))
    elected = saved.elect_for(turn, turn.jobs[JOB], generation.mesh, generation.placements)
    assert elected.restore.step == max(complete, default=0)
    holds = {(node, shard.key) for node in NODES for shard in held[node]}
    assert all((source.node, rank.shard) in holds for rank in elected.ranks for source in rank.sources)
    assert len(elected.ranks) == (RANKS if complete else 0)
