"""Election: the newest complete step on the lineage, and never a torn, mixed or given-up one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import (
    OBJECT_STORE,
    Placement,
    RestorePoint,
    ShardKey,
    ShardRecord,
    ShardSource,
    StoredStep,
)
from holdfast.domain.mesh import Mesh
from holdfast.domain.runs import ShardRun
from holdfast.supervisor.core.rules.election import (
    SHARING_MAX,
    Election,
    Holder,
    Knowledge,
    ObjectStore,
    Origin,
    Segment,
    Trusted,
    branch,
    elect,
    replicas_differ,
)

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
    election = elect(LINEAGE, holders, smaller, PLACEMENTS[:2], Knowledge(sharded=False))
    assert [restore.shard.rank for restore in election.ranks] == [2, 3]
    unknown = elect(LINEAGE, holders, smaller, PLACEMENTS[:2])
    assert "too few of its shards are known" in unknown.restore.reason, "half a state must not be taken for all of it"
    holders.append(holder("s1", shard(10, 1)))  # two replicas agree at position 1
    assert elect(LINEAGE, holders, smaller, PLACEMENTS[:2]).restore.step == 10
    larger = MESH.resized(3)
    six = tuple(Placement(slot, f"n{slot}", slot, 1) for slot in range(6))
    assert elect(LINEAGE, saved(10), larger, six).restore.step == 10


SHARDED = [holder(f"n{rank}", shard(10, rank, digest=f"part {rank}")) for rank in range(4)]


def parts(election: Election) -> list[tuple[int, int]]:
    return [(restore.rank, restore.shard.rank) for restore in election.ranks]


def test_state_sharded_over_dp_is_put_together_from_the_parts_of_every_replica() -> None:
    smaller = elect(LINEAGE, SHARDED, MESH.resized(1), PLACEMENTS[:2])
    assert parts(smaller) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    assert "those of 2 replicas" in smaller.restore.reason
    six = tuple(Placement(slot, f"n{slot}", slot, 1) for slot in range(6))
    larger = elect(LINEAGE, SHARDED, MESH.resized(3), six)
    assert parts(larger) == [(rank, part) for rank in range(6) for part in (rank % 2, rank % 2 + 2)]
    assert parts(elect(LINEAGE, SHARDED, MESH, PLACEMENTS)) == [(rank, rank) for rank in range(4)]


def test_a_part_that_nobody_holds_leaves_the_step_out() -> None:
    election = elect(LINEAGE, SHARDED[:3], MESH.resized(1), PLACEMENTS[:2], Knowledge(sharded=True))
    assert election.restore.step == 0
    assert "no connected node holds the shard of rank 3" in election.restore.reason


INSIDE = Mesh.of({"pp": 2, "dp": 2})  # ranks 0 and 1 are stage 0, ranks 2 and 3 stage 1


def test_with_dp_inside_a_rank_is_found_by_its_coordinates() -> None:
    everyone = [holder(f"n{rank}", shard(10, rank, mesh=INSIDE)) for rank in range(4)]
    second = (Placement(0, "n1", 0, 1), Placement(1, "n3", 1, 1))  # the first replica's nodes are gone
    election = elect(LINEAGE, everyone[1::2], INSIDE.resized(1), second, Knowledge(sharded=False))
    assert parts(election) == [(0, 1), (1, 3)]
    six = tuple(Placement(slot, f"n{slot}", slot, 1) for slot in range(6))
    kept = [Placement(rank, node, rank, 1) for rank, node in enumerate(("n0", "n1", "s0", "n2", "n3", "s1"))]
    grown = elect(LINEAGE, everyone, INSIDE.resized(3), kept)
    assert parts(grown) == [(0, 0), (1, 1), (2, 0), (3, 2), (4, 3), (5, 2)], "kept ones their own, whatever its number"
    in_parts = [holder(f"n{rank}", shard(10, rank, mesh=INSIDE, digest=f"part {rank}")) for rank in range(4)]
    assert parts(elect(LINEAGE, in_parts, INSIDE.resized(1), second)) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert parts(elect(LINEAGE, in_parts, INSIDE.resized(3), six))[6:8] == [(3, 2), (3, 3)]
    assert parts(elect(LINEAGE, in_parts, INSIDE, PLACEMENTS)) == [(rank, rank) for rank in range(4)]


def test_another_order_of_the_dimensions_is_another_mesh() -> None:
    election = elect(LINEAGE, saved(10), INSIDE, PLACEMENTS)
    assert election.restore.step == 0
    assert "it was saved by the mesh dp 2 × pp 2, and only the number of replicas may change" in election.restore.reason


def rooted(record: ShardRecord, root: str) -> ShardRecord:
    return replace(record, root=root)


def test_the_roots_that_any_copy_is_known_by_are_part_of_what_ranks_restore() -> None:
    mesh = Mesh.of({"dp": 4})
    placements = (Placement(0, "n0", 0, 2), Placement(1, "n1", 2, 2))
    first = [rooted(shard(10, rank, mesh=mesh), f"r{rank}") for rank in range(2)]
    holders = [
        holder("n0", *first),
        holder("n1", shard(10, 2, mesh=mesh), shard(10, 3, mesh=mesh), rooted(shard(10, 1, mesh=mesh), "r1")),
        holder("old", shard(10, 0, mesh=mesh)),  # a replicator of an earlier release has received a copy
    ]
    election = elect(LINEAGE, holders, mesh, placements)
    assert [restore.root for restore in election.ranks] == ["r0", "r1", "", ""]
    assert [run.roots for run in election.runs if run.rank == 2] == [()]


def test_copies_with_different_roots_are_of_different_shards() -> None:
    holders = [*saved(5), *saved(10), holder("s", rooted(shard(10, 1), "x")), holder("t", rooted(shard(10, 1), "y"))]
    election = elect(LINEAGE, holders, MESH, PLACEMENTS)
    assert election.restore.step == 5
    assert "2 different shards of rank 1 exist" in election.restore.reason


@given(
    st.permutations(["dp", "pp", "tp"]),
    st.lists(st.sampled_from("ab"), min_size=8, max_size=8),
    st.sets(st.integers(1, 7)),
)
def test_replicas_differ_where_two_ranks_of_a_position_do(names: list[str], digests: list[str], cuts: set[int]) -> None:
    mesh = Mesh.of(dict.fromkeys(names, 2))
    bounds = [0, *sorted(cuts), 8]
    runs = [
        ShardRun(1, 10, mesh, "memory", "n", begin, end - begin, (1,), ",".join(digests[begin:end]))
        for begin, end in pairwise(bounds)
    ]
    differ = any(digests[rank] != digests[mesh.ranks_at(mesh.position_of(rank))[0]] for rank in range(8))
    assert replicas_differ(runs) == differ


def stored(step: int, *, sharded: bool = False, attempt: int = 1) -> StoredStep:
    return StoredStep(attempt, step, MESH, sharded)


def store(*steps: StoredStep) -> Knowledge:
    return Knowledge(ObjectStore("gs://b/p", steps))


STORE = ShardSource(OBJECT_STORE, "gs://b/p")


def test_when_every_copy_is_gone_the_object_store_has_the_step() -> None:
    election = elect(LINEAGE, saved(10, range(2)), MESH, PLACEMENTS, store(stored(10)))
    assert [restore.sources for restore in election.ranks[2:]] == [(STORE,), (STORE,)]
    assert [restore.digest for restore in election.ranks] == ["10@0", "10@1", "", ""]
    assert [source.node for source in election.ranks[0].sources] == ["n0", OBJECT_STORE], "the store is the last resort"
    assert "2 from local memory, 2 from the object store" in election.restore.reason
    assert election.origin is Origin.STORE


def test_nodes_that_fetch_the_same_from_the_store_get_the_names_of_each_other() -> None:
    nodes = [holder(f"n{number}") for number in range(4)]

    def sharers(known: Knowledge, *holders: Holder) -> list[list[str]]:
        election = elect(LINEAGE, [*holders, *nodes[len(holders) :]], MESH, PLACEMENTS, known)
        return [[source.node for source in restore.sharing] for restore in election.ranks]

    assert sharers(store(stored(10))) == [["n0", "n2"], ["n1", "n3"], ["n0", "n2"], ["n1", "n3"]]
    assert sharers(store(stored(10)), *saved(10, range(2))) == [[], [], [], []], "one of each position is left"
    assert sharers(store(stored(10, sharded=True))) == [[], [], [], []], "everybody has his own"
    larger = tuple(Placement(slot, f"n{slot}", 2 * slot, 2) for slot in range(2))
    split = elect(LINEAGE, nodes, MESH.resized(1), larger[:1], store(stored(10, sharded=True)))
    assert {restore.sharing for restore in split.ranks} == {()}
    many = tuple(Placement(slot, f"n{slot}", slot, 1) for slot in range(2 * (SHARING_MAX + 1)))
    crowd = [holder(placement.node) for placement in many]
    grown = elect(LINEAGE, crowd, MESH.resized(SHARING_MAX + 1), many, store(stored(10)))
    assert [len(restore.sharing) for restore in grown.ranks] == [SHARING_MAX] * 2 * SHARING_MAX + [0, 0]


def test_a_newer_step_is_worth_a_farther_way() -> None:
    known = store(stored(20), stored(5))
    assert elect(LINEAGE, saved(10), MESH, PLACEMENTS, known).restore.step == 20
    assert elect(LINEAGE, [*saved(10), *saved(30, range(3))], MESH, PLACEMENTS, known).restore.step == 20


def test_the_store_of_another_number_of_replicas() -> None:
    whole = elect(LINEAGE, [], MESH.resized(1), PLACEMENTS[:2], store(stored(10)))
    assert parts(whole) == [(0, 0), (1, 1)]
    split = elect(LINEAGE, [], MESH.resized(1), PLACEMENTS[:2], store(stored(10, sharded=True)))
    assert parts(split) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    mixed = elect(LINEAGE, SHARDED[:2], MESH.resized(1), PLACEMENTS[:2], store(stored(10, sharded=True)))
    assert [restore.sources[0].node for restore in mixed.ranks] == ["n0", OBJECT_STORE, "n1", OBJECT_STORE]


def test_the_store_gives_nothing_back_that_was_given_up() -> None:
    lineage = branch(LINEAGE, 2, RestorePoint(1, 10), 64)
    assert elect(lineage, saved(10), MESH, PLACEMENTS, store(stored(20), stored(10))).restore.step == 10
    assert elect((Segment(3),), [], MESH, PLACEMENTS, store(stored(20))).restore == RestorePoint()


def test_a_doubtful_step_is_passed_over_with_its_reason() -> None:
    unread = elect(
        LINEAGE,
        [*saved(10), *saved(20)],
        MESH,
        PLACEMENTS,
        Knowledge(doubts={CheckpointId(1, 20): "no source answers"}),
    )
    assert unread.restore.step == 10
    assert "step 20 of attempt 1: no source answers" in unread.restore.reason
    known = Knowledge(trusted=Trusted(15, "n1 computes wrongly"))
    wrong = elect(LINEAGE, [*saved(10), *saved(20)], MESH, PLACEMENTS, known)
    assert wrong.restore.step == 10
    assert "after step 15, the last one that was verified (n1 computes wrongly)" in wrong.restore.reason


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
        h._replace(shards=tuple(replace(s, mesh=Mesh.of({"dp": 2, "tp": 2})) for s in h.shards)) for h in saved(10)
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


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8), st.sampled_from(["memory", "disk"])), max_size=8))
def test_runs_of_any_width_are_elected_as_their_shards_are_one_by_one(held: list[tuple[int, int, str]]) -> None:
    """Runs that are those of the placements take a shorter way."""
    mesh = Mesh.of({"dp": 2, "tp": 4})
    placements = tuple(Placement(slot, f"n{slot}", slot * 4, 4) for slot in range(2))
    holders = [
        holder(f"h{at}", *(shard(5, rank, mesh=mesh, tier=tier) for rank in range(first, min(8, first + width))))
        for at, (first, width, tier) in enumerate(held)
    ]
    split = [each._replace(shards=tuple(reversed(each.shards))) for each in holders]  # no two shards form a run
    assert _restored(elect(LINEAGE, holders, mesh, placements)) == _restored(elect(LINEAGE, split, mesh, placements))


def _restored(election: Election) -> list[object]:
    return [restore for run in election.runs for restore in run]
