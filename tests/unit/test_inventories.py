"""Inventories as differences: what arrives is what was held, however much of it was said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleet import JOB, Fleet, job, running
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.connection.reports import Numbered, Reports
from holdfast.domain.errors import MalformedMessage
from holdfast.domain.generations import ShardKey, ShardRecord, StoredStep
from holdfast.domain.inventories import changed, difference
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import NodeFacts
from holdfast.domain.orders import Hello, Inventory
from holdfast.domain.runs import PlaceRun, Places, Shards, _InRuns, shard_runs
from holdfast.supervisor.protocol import Command, NodeReported, RenewSession
from holdfast.v1.control_pb2 import AgentMessage
from holdfast.v1.types_pb2 import PlaceRun as PlaceRunMessage
from holdfast.v1.types_pb2 import ShardColumns, ShardShape, Tier
from holdfast.wire.control import decode_report, encode_report
from holdfast.wire.report_columns import decode_places, decode_shards

MESH = Mesh.of({"dp": 4})
HELLO = Hello(NodeFacts("n", "i", "h", "a", "z", 1, "", 1, "/d", "/k"))
STORED = (StoredStep(1, 10, MESH, False),)


def record(step: int, rank: int = 0, tier: str = "disk", digest: str = "d") -> ShardRecord:
    return ShardRecord(ShardKey(1, step, rank), MESH, tier, 100, digest, "n0")


def holding(*steps: int, stored: tuple[StoredStep, ...] = ()) -> Inventory:
    return Inventory(JOB, tuple(record(step, rank) for step in steps for rank in range(4)), stored)


shards = st.lists(
    st.builds(record, st.integers(1, 6), st.integers(0, 3), st.sampled_from(["memory", "disk"]), st.sampled_from("de")),
    max_size=20,
)


@given(shards, shards)
def test_a_difference_makes_the_new_inventory_of_the_old_one(old: list[ShardRecord], new: list[ShardRecord]) -> None:
    before, after = Inventory(JOB, tuple(old)), Inventory(JOB, tuple(new))
    said = difference(before, after, base=7)
    arrived = changed(before.shards, said) if said.base else said
    assert set(arrived.shards) == set(new)
    assert len(said.shards) + len(said.gone) <= len(new)


def heard(report: Inventory) -> Inventory:
    """The report as it arrives."""
    message = encode_report(report, 1)
    arrived = decode_report(AgentMessage.FromString(message.SerializeToString()))
    assert isinstance(arrived, Inventory)
    return arrived


@given(shards, shards)
def test_differences_that_arrive_in_runs_are_those_that_were_sent(
    old: list[ShardRecord], new: list[ShardRecord]
) -> None:
    before, after = Inventory(JOB, tuple(old)), Inventory(JOB, tuple(new))
    said = difference(before, after, base=7)
    arrived = heard(said)
    assert arrived == said
    held = heard(before).shards
    assert set((changed(held, arrived) if arrived.base else arrived).shards) == set(new)


def test_a_difference_of_whole_runs_is_applied_without_a_record_of_each_shard() -> None:
    """At 12,500 nodes these records would take seconds per save."""
    said = heard(difference(holding(1, 2, 3), holding(2, 3, 4), base=7))
    assert isinstance(said.gone, Places)
    made = changed(held := heard(holding(1, 2, 3)).shards, said).shards
    assert [each._records for each in (held, said.shards, said.gone, made) if isinstance(each, _InRuns)] == [None] * 4
    assert made == holding(2, 3, 4).shards


def test_ranks_of_a_run_may_leave_or_change_alone() -> None:
    held = heard(holding(1, 2)).shards
    gone = Places([PlaceRun(1, 1, "disk", 0, 1), PlaceRun(1, 1, "disk", 2, 1), PlaceRun(1, 2, "memory", 0, 2**32 - 1)])
    new = Shards(shard_runs([record(2, 3, digest="new"), record(2, 4)]))
    made = changed(held, Inventory(JOB, new, base=7, gone=gone)).shards
    kept = [record(1, 1), record(1, 3), *(record(2, rank) for rank in range(3))]
    assert set(made) == {*kept, record(2, 3, digest="new"), record(2, 4)}
    assert len(made) == 7


def test_a_difference_of_many_runs_is_applied_in_time() -> None:
    """A node decides what it reports: comparing each run with each other one would take hours."""
    ranks = range(0, 100_000, 2)
    held = Shards(shard_runs([record(1, rank) for rank in ranks]))
    gone = Places([PlaceRun(1, 1, "disk", rank, 1) for rank in reversed(ranks[1:])])
    assert changed(held, Inventory(JOB, base=7, gone=gone)).shards == (record(1, 0),)


def test_equal_shapes_are_decoded_once() -> None:
    def of(node: str, first: int) -> Inventory:
        return Inventory(JOB, tuple(replace(record(3, first + rank), owner=node) for rank in range(4)))

    one, other = (shard_runs(heard(of(node, first)).shards)[0] for node, first in (("n0", 0), ("n1", 4)))
    assert (one.owner, other.owner, one.rank, other.rank) == ("n0", "n1", 0, 4)
    assert one.mesh is other.mesh
    assert one.sizes is other.sizes


def spoiled(**fields: Any) -> ShardColumns:
    """An inventory in blocks with these fields of its columns replaced."""
    message = encode_report(holding(1), 1).inventory.columns
    for name in fields:
        message.ClearField(name)
    message.MergeFrom(ShardColumns(**fields))
    return message


def shape(**run: Any) -> bytes:
    known: dict[str, Any] = {"tier": Tier.TIER_DISK, "width": 4, "sizes": [1]}
    return ShardShape(meshes=[{"dims": [{"name": "dp", "size": 4}]}], runs=[known | run]).SerializeToString()


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"shape": b"\xff"}, "ShardShape"),
        ({"shape": shape() * 3}, "more than 2 runs share a block"),
        ({"shape": shape(block=1)}, "1 is not a place among 1 blocks"),
        ({"shape": shape(mesh=1)}, "a mesh or a tier"),
        ({"shape": shape(tier=99)}, "a mesh or a tier"),
        ({"shape": shape(width=5)}, "has not 5 values"),
        ({"shape": shape(sizes=[1, 2])}, "2 sizes for 4 ranks"),
        ({"ranks": [0, 4]}, "1 owners, 1 digests, 1 roots for 2"),
        ({"digests": ["a,b"]}, "has not 4 values"),
        ({"roots": ["a,b"]}, "has not 4 values"),
        ({"shape": b""}, "entries for 1"),  # a reader that knows no shapes must not find an empty inventory
    ],
)
def test_blocks_that_no_agent_sends_are_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(MalformedMessage, match=problem):
        decode_shards(spoiled(**wrong))


@pytest.mark.parametrize("run", [{"tier": 99, "width": 1}, {"tier": Tier.TIER_DISK}])
def test_places_that_no_agent_sends_are_refused(run: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage, match="gone_runs"):
        decode_places([PlaceRunMessage(**run)])


def take(reports: Reports) -> list[Numbered]:
    taken = []
    while (numbered := reports.take()) is not None:
        taken.append(numbered)
    return taken


def test_an_agent_says_what_has_changed_and_everything_on_a_new_session() -> None:
    reports = Reports()
    reports.greet(HELLO, [holding(1, 2, 3, stored=STORED)])
    assert take(reports)[-1] == Numbered(2, holding(1, 2, 3, stored=STORED)), "the first of a session is complete"
    reports.add(holding(2, 3, 4, stored=STORED))
    [said] = take(reports)
    assert (said.seq, said.report) == (3, difference(holding(1, 2, 3), holding(2, 3, 4), base=2))
    assert len(str(said.report)) < len(str(holding(2, 3, 4))), "4 new, 4 gone, and nothing of the store"
    reports.greet(HELLO)
    assert [each.report for each in take(reports)] == [HELLO, holding(2, 3, 4, stored=STORED)], "not acknowledged"


def say(fleet: Fleet, inventory: Inventory, seq: int) -> tuple[Command, ...]:
    return fleet.fold(
        NodeReported(fleet.now, "n0", fleet.state.nodes["n0"].facts.incarnation, seq, inventory, session=3)
    )


def known(fleet: Fleet) -> set[ShardRecord]:
    return set(fleet.state.nodes["n0"].inventory.get(JOB, ()))


def test_a_difference_that_was_lost_is_noticed_and_one_that_comes_twice_is_harmless() -> None:
    fleet = running(job(dp=2))
    seq = fleet.state.last_seq(fleet.state.nodes["n0"])
    say(fleet, holding(1, 2, 3), seq + 1)
    second = difference(holding(1, 2, 3), holding(2, 3, 4), base=seq + 1)
    say(fleet, second, seq + 2)
    assert known(fleet) == set(holding(2, 3, 4).shards)
    say(fleet, second, seq + 2)
    assert known(fleet) == set(holding(2, 3, 4).shards)
    lost = seq + 3
    commands = say(fleet, difference(holding(3, 4, 5), holding(4, 5, 6), base=lost), seq + 4)
    assert [(each.node, each.session) for each in commands if isinstance(each, RenewSession)] == [("n0", 3)]
    assert known(fleet) == set(holding(2, 3, 4).shards), "what is known stays until the node has said all of it"
    say(fleet, holding(4, 5, 6), seq + 5)
    assert known(fleet) == set(holding(4, 5, 6).shards)
    say(fleet, difference(holding(4, 5, 6), holding(5, 6, 7), base=seq + 5), seq + 6)
    assert known(fleet) == set(holding(5, 6, 7).shards)
    say(fleet, Inventory(JOB), seq + 7)
    assert known(fleet) == set()


def test_an_inventory_in_rows_is_what_its_records_are() -> None:
    records = holding(1, 2, 3).shards
    shards = Shards(shard_runs(records))
    assert shards == records
    assert records == shards == Shards(shard_runs(shards))
    assert shards != Shards(shard_runs(records[1:]))
    assert (len(shards), shards[0], shards[1:], hash(shards)) == (len(records), records[0], records[1:], hash(records))
    assert Inventory("gpt", shards) == Inventory("gpt", records)
