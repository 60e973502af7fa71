"""Which step a start restores: newest complete, never mixed, never given up, nearest copy first."""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.train.standalone.election import Holding, attempts, elect

DP2 = Mesh.of({"dp": 2})
NODES = ("n0", "n1")


def held(
    attempt: int,
    step: int,
    rank: int,
    *,
    node: str = "n0",
    mesh: Mesh = DP2,
    parent: tuple[int, int] | None = None,
    digest: str = "",
    tier: str = "disk",
) -> Holding:
    path = f"/{node}/{tier}/a{attempt}/s{step}/{rank}"
    return Holding(ShardKey(attempt, step, rank), mesh, parent, digest, tier, path, node, int(node[1:]))


def both(attempt: int, step: int, parent: tuple[int, int] | None = None) -> list[Holding]:
    return [held(attempt, step, rank, node=f"n{rank}", parent=parent) for rank in (0, 1)]


def test_nothing_saved_is_a_start_from_scratch() -> None:
    elected = elect([], DP2, NODES)
    assert (elected.at, elected.parts, elected.reason) == (None, (), "nothing is saved here")


def test_the_newest_step_that_every_rank_has_wins_and_the_reason_names_what_was_passed_over() -> None:
    elected = elect([*both(1, 10), *both(1, 20), held(1, 30, 0)], DP2, NODES)
    assert elected.at == (1, 20)
    assert "step 30 of attempt 1: the shard of rank 1 is missing" in elected.reason
    assert elected.complete == ((1, 10), (1, 20))


def test_memory_on_the_own_node_comes_before_disk_and_before_other_nodes() -> None:
    there = [
        held(1, 10, rank, node=node, tier=tier) for rank in (0, 1) for node in NODES for tier in ("disk", "memory")
    ]
    elected = elect(there, DP2, NODES)
    assert [(part.node, part.tier) for (part,) in elected.parts] == [("n0", "memory"), ("n1", "memory")]


def test_ranks_permuted_over_nodes_find_their_shards() -> None:
    there = [held(1, 10, 0, node="n1", tier="memory"), held(1, 10, 1, node="n0", tier="memory")]
    elected = elect(there, DP2, NODES)
    assert [(part.key.rank, part.node) for (part,) in elected.parts] == [(0, "n1"), (1, "n0")]


def test_steps_beyond_the_fork_were_given_up_even_if_they_are_complete_now() -> None:
    there = [*both(1, 10), *both(1, 20), held(2, 15, 0, parent=(1, 10))]
    assert elect(there, DP2, NODES).at == (1, 10)
    assert elect([*there, held(2, 15, 1, parent=(1, 10))], DP2, NODES).at == (2, 15)
    assert attempts(there) == 2


def test_an_attempt_that_started_from_scratch_gives_up_everything_before() -> None:
    assert elect([*both(1, 20), held(2, 5, 0)], DP2, NODES).at is None


def test_the_same_step_of_two_attempts_is_never_mixed() -> None:
    there = [held(1, 20, 0), held(2, 20, 1, parent=(1, 10)), *both(1, 10)]
    assert elect(there, DP2, NODES).at == (1, 10)


def test_two_different_shards_of_one_name_disqualify_the_step() -> None:
    there = [*both(1, 10), *both(1, 20), held(1, 20, 1, node="n0", digest="x"), held(1, 20, 1, node="n2", digest="y")]
    elected = elect(there, DP2, NODES)
    assert elected.at == (1, 10)
    assert "different shards claim to be that of rank 1" in elected.reason


def test_a_resize_takes_any_replica_of_the_position_if_the_replicas_agree() -> None:
    mesh = Mesh.of({"dp": 2, "pp": 2})
    there = [held(1, 10, rank, mesh=mesh, digest=f"stage {rank % 2}") for rank in range(4)]
    grown = elect(there, mesh.resized(3), ["n0"] * 6)
    assert [part.key.rank for (part,) in grown.parts] == [0, 1, 2, 3, 0, 1]  # its own shard, where there is one
    assert grown.mesh == mesh
    shrunk = elect(there[1:3], mesh.resized(1), ["n0"] * 2)
    assert [part.key.rank for (part,) in shrunk.parts] == [2, 1]


def test_a_resize_of_sharded_state_takes_every_part_or_nothing() -> None:
    there = [held(1, 10, rank, digest=f"half {rank}") for rank in (0, 1)]
    elected = elect(there, Mesh.of({"dp": 1}), ["n0"])
    assert [[part.key.rank for part in parts] for parts in elected.parts] == [[0, 1]]
    assert elect(there[:1], Mesh.of({"dp": 4}), ["n0"] * 4).at == (1, 10)  # one replica alone, as far as anybody knows
    # And nothing is known of what is in memory.
    assert elect([held(1, 10, 0)], Mesh.of({"dp": 4}), ["n0"] * 4).at is None


def test_another_replicas_state_is_only_taken_when_nothing_is_exact() -> None:
    newer = [held(1, 20, 0, digest="w")]
    assert elect([*both(1, 10), *newer], DP2, NODES).at == (1, 10)
    elected = elect(newer, DP2, NODES)
    assert elected.at == (1, 20)
    assert [part.key.rank for (part,) in elected.parts] == [0, 0]


def test_two_reports_of_one_shard_elect_the_same_whatever_came_first() -> None:
    """The file of a rank is reported by each rank of its node, and only one of them has read its digest yet."""
    plain, read = held(1, 10, 1), held(1, 10, 1, digest="x")
    other = [held(1, 10, 0)]
    forth, back = elect([*other, plain, read], DP2, NODES), elect([*other, read, plain], DP2, NODES)
    assert forth == back
    assert forth.parts[1] == (read,)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.integers(0, 2), st.sampled_from(["", "x", "y"])
        ),
        max_size=24,
    ),
    st.sampled_from([1, 2, 4]),
    st.randoms(use_true_random=False),
)
@example(
    [(1, 1, 0, 0, ""), (1, 1, 0, 0, ""), (1, 1, 0, 0, ""), (1, 2, 0, 2, ""), (1, 2, 0, 2, "x")], 4, random.Random(0)
)
def test_every_rank_elects_the_same_whatever_the_order(
    raw: list[tuple[int, int, int, int, str]], dp: int, shuffler: random.Random
) -> None:
    mesh = Mesh.of({"dp": 4})
    there = [
        held(
            attempt,
            step,
            rank,
            node=f"n{node}",
            mesh=mesh,
            digest=digest,
            parent=(attempt - 1, 2) if attempt > 1 else None,
        )
        for attempt, step, rank, node, digest in raw
    ]
    target = Mesh.of({"dp": dp})
    elected = elect(there, target, ["n0"] * dp)
    shuffled = list(there)
    shuffler.shuffle(shuffled)
    assert elect(shuffled, target, ["n0"] * dp) == elected
    if elected.at is not None:
        chosen = {part.at for parts in elected.parts for part in parts}
        assert chosen == {elected.at}  # one step of one attempt, for all
        assert len(elected.parts) == dp
