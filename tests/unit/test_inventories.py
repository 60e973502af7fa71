"""Inventories as differences: what arrives is what was held, however much of it was said."""

from __future__ import annotations

from fleet import JOB, Fleet, job, running
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.reports import Numbered, Reports
from holdfast.domain.generations import ShardKey, ShardRecord, StoredStep
from holdfast.domain.inventories import changed, difference
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import NodeFacts
from holdfast.domain.orders import Hello, Inventory
from holdfast.domain.runs import Shards, shard_runs
from holdfast.supervisor.protocol import Command, NodeReported, RenewSession

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


def take(reports: Reports) -> list[Numbered]:
    taken = []
    while (numbered := reports.take()) is not None:
        taken.append(numbered)
    return taken


def test_an_agent_says_what_has_changed_and_everything_on_a_new_session() -> None:
    reports = Reports()
    reports.greet(HELLO, [holding(1, 2, 3, stored=STORED)])
    reports.differences = True
    assert take(reports)[-1] == Numbered(2, holding(1, 2, 3, stored=STORED)), "the first of a session is complete"
    reports.add(holding(2, 3, 4, stored=STORED))
    [said] = take(reports)
    assert (said.seq, said.report) == (3, difference(holding(1, 2, 3), holding(2, 3, 4), base=2))
    assert len(str(said.report)) < len(str(holding(2, 3, 4))), "4 new, 4 gone, and nothing of the store"
    reports.greet(HELLO)
    assert [each.report for each in take(reports)] == [HELLO, holding(2, 3, 4, stored=STORED)], "not acknowledged"


def test_a_supervisor_that_knows_no_differences_gets_complete_inventories() -> None:
    reports = Reports()
    reports.greet(HELLO, [holding(1, 2, 3)])
    take(reports)
    reports.add(holding(2, 3, 4))
    assert [each.report for each in take(reports)] == [holding(2, 3, 4)]


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
