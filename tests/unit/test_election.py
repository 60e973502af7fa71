"""Election: the newest complete step on the lineage, and never a torn, mixed or given-up one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.generations import Placement, RestorePoint, ShardKey, ShardRecord
from holdfast.domain.mesh import Mesh
from holdfast.supervisor.election import Holder, Segment, branch, elect

MESH = Mesh.of({"dp": 2, "pp": 2})
PLACEMENTS = tuple(Placement(slot, f"n{slot}", slot, 1) for slot in range(4))
LINEAGE = (Segment(1),)


def shard(
    step: int, rank: int, attempt: int = 1, mesh: Mesh = MESH, digest: str = "", tier: str = "memory"
) -> ShardRecord:
    return ShardRecord(ShardKey(attempt, step, rank), mesh, tier, 1, digest or f"{step}@{mesh.position_of(rank)}")


def holder(node: str, *shards: ShardRecord, zone: str = "") -> Holder:
    return Holder(node, f"{node}:1", zone, shards)


def saved(step: int, ranks: range = range(4), attempt: int = 1) -> list[Holder]:
    return [holder(f"n{rank}", shard(step, rank, attempt)) for rank in ranks]


def test_nothing_saved_starts_from_scratch() -> None:
    assert elect(LINEAGE, [], MESH, PLACEMENTS).restore == RestorePoint()


def test_a_torn_step_is_passed_over_with_the_reason() -> None:
    election = elect(LINEAGE, [*saved(10), *saved(20, range(3))], MESH, PLACEMENTS)
    assert election.restore.step == 10
    assert "step 20 of attempt 1: no connected node holds the shard of rank 3" in election.restore.reason


def test_a_peers_copy_counts_and_the_own_node_comes_first() -> None:
    holders = [
        holder("n0", shard(10, 0), zone="a"),
        holder("n1", shard(10, 1), shard(10, 0), zone="b"),
        holder("n2", shard(10, 2), shard(10, 3)),
        holder("s1", shard(10, 0), zone="a"),
    ]
    election = elect(LINEAGE, holders, MESH, PLACEMENTS)
    assert [source.node for source in election.ranks[0].sources] == ["n0", "s1", "n1"]
    assert [source.node for source in election.ranks[3].sources] == ["n2"]


def test_another_number_of_replicas_takes_any_replicas_shard_when_all_agree() -> None:
    smaller = MESH.resized(1)
    holders = [holder("n2", shard(10, 2)), holder("n3", shard(10, 3))]  # the first replica's nodes are gone
    election = elect(LINEAGE, holders, smaller, PLACEMENTS[:2])
    assert [restore.shard.rank for restore in election.ranks] == [2, 3]
    larger = MESH.resized(3)
    six = tuple(Placement(slot, f"n{slot}", slot, 1) for slot in range(6))
    assert elect(LINEAGE, saved(10), larger, six).restore.step == 10


def test_state_sharded_over_dp_is_refused_in_another_number_of_replicas() -> None:
    holders = [*saved(10, range(2)), holder("n2", shard(10, 2, digest="other")), holder("n3", shard(10, 3))]
    election = elect(LINEAGE, holders, MESH.resized(1), PLACEMENTS[:2])
    assert election.restore.step == 0
    assert "re-sharding is not available" in election.restore.reason


def test_in_the_same_mesh_only_the_ranks_own_shard_will_do() -> None:
    """Its random numbers are its own: another replica's shard would not continue bit for bit."""
    assert elect(LINEAGE, saved(10, range(1, 4)), MESH, PLACEMENTS).restore.step == 0


def test_steps_that_were_given_up_never_come_back() -> None:
    lineage = branch(LINEAGE, 2, RestorePoint(1, 10), 64)
    assert lineage == (Segment(2), Segment(1, 10))
    holders = [*saved(10), *saved(20)]
    assert elect(lineage, holders, MESH, PLACEMENTS).restore.step == 10
    further = branch(lineage, 3, RestorePoint(2, 30), 64)
    assert further == (Segment(3), Segment(2, 30), Segment(1, 10))
    assert branch(further, 4, RestorePoint(1, 5), 64) == (Segment(4), Segment(1, 5)), "attempts 2 and 3 were given up"


def test_a_fresh_start_forgets_everything() -> None:
    assert branch((Segment(2), Segment(1, 10)), 3, RestorePoint(), 64) == (Segment(3),)


def test_another_model_is_not_restored() -> None:
    holders = [
        replace(h, shards=tuple(replace(s, mesh=Mesh.of({"dp": 2, "tp": 2})) for s in h.shards)) for h in saved(10)
    ]
    assert "only the number of replicas may change" in elect(LINEAGE, holders, MESH, PLACEMENTS).restore.reason


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_whatever_is_held_the_elected_step_is_the_newest_complete_one_on_the_lineage(
    held: list[tuple[int, int, int, int]],
) -> None:
    lineage = (Segment(3), Segment(2, 4), Segment(1, 2))
    by_node: dict[int, set[ShardRecord]] = {}
    for attempt, step, rank, node in held:
        by_node.setdefault(node, set()).add(shard(step, rank, attempt))
    holders = [holder(f"n{node}", *sorted(shards, key=repr)) for node, shards in by_node.items()]
    until = {3: 6, 2: 4, 1: 2}
    complete = [
        (attempt, step)
        for attempt in until
        for step in range(1, until[attempt] + 1)
        if {rank for a, s, rank, _ in held if (a, s) == (attempt, step)} == {0, 1, 2, 3}
    ]
    election = elect(lineage, holders, MESH, PLACEMENTS)
    assert (election.restore.attempt, election.restore.step) == max(complete, default=(0, 0))
    for restore in election.ranks:
        assert restore.shard.rank == restore.rank
        for source in restore.sources:
            assert shard(restore.shard.step, restore.rank, restore.shard.attempt) in by_node[int(source.node[1:])]
