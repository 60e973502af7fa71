"""One question, two electors, one answer: which step all ranks restore, and from where."""

from __future__ import annotations

import cProfile
import pstats
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from restores import Asked, Copy, Elector, Fork, by_launch, by_supervisor

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import OBJECT_STORE, StoredStep
from holdfast.domain.mesh import Mesh
from holdfast.restore import Knowledge, ObjectStore, Trusted

MESH = Mesh.of({"dp": 2, "pp": 2})
NODES = ("n0", "n1", "n2", "n3")


@pytest.fixture(params=[by_supervisor, by_launch], ids=["supervisor", "launch"])
def elect(request: pytest.FixtureRequest) -> Elector:
    chosen: Elector = request.param
    return chosen


def saved(step: int, ranks: Sequence[int] = range(4), attempt: int = 1, *, digests: str = "") -> list[Copy]:
    """Each rank's shard on its own node. `digests`: "" = replicas hold the same, "own" = each rank's differs."""
    return [
        Copy(step, rank, f"n{rank}", attempt, digest=f"{step}/{rank}" if digests == "own" else digests)
        for rank in ranks
    ]


def asked(
    copies: Sequence[Copy],
    *,
    dp: int = 2,
    forks: dict[int, Fork] | None = None,
    known: Knowledge | None = None,
    nodes: Sequence[str] | None = None,
) -> Asked:
    ranks = [f"n{rank}" for rank in range(2 * dp)]
    return Asked(copies, MESH, nodes or ranks, MESH.resized(dp), forks or {}, known)


OWN = ((0,), (1,), (2,), (3,))


# ---------------------------------------------------------------- which step


def test_nothing_saved_is_a_start_from_scratch(elect: Elector) -> None:
    assert elect(asked([])).at is None


def test_the_newest_step_that_every_rank_can_reach_wins(elect: Elector) -> None:
    answer = elect(asked([*saved(10), *saved(20), *saved(30, [0, 1, 2])]))
    assert (answer.at, answer.shards) == ((1, 20), OWN)
    assert "step 30 of attempt 1: no connected node holds the shard of rank 3" in answer.reason


def test_a_step_that_only_some_hold_is_no_step(elect: Elector) -> None:
    answer = elect(asked(saved(30, [0, 1, 2], digests="own")))
    assert answer.at is None
    assert "no connected node holds the shard of rank 3" in answer.reason


def test_a_copy_on_a_peer_makes_a_step_complete(elect: Elector) -> None:
    answer = elect(asked([*saved(10), *saved(20, [0, 1, 2]), Copy(20, 3, "n1")]))
    assert (answer.at, answer.nearest[3]) == ((1, 20), ("n1",))


def test_a_replaced_node_takes_its_ranks_shards_from_a_peer(elect: Elector) -> None:
    answer = elect(asked([*saved(10, [0, 1, 2]), Copy(10, 3, "n0")], nodes=["n0", "n1", "n2", "new"]))
    assert (answer.shards, answer.nearest[3]) == (OWN, ("n0",))


def test_what_was_given_up_does_not_come_back_when_it_is_whole_again(elect: Elector) -> None:
    forked = [*saved(10), *saved(20), *saved(15, [0], attempt=2)]
    assert elect(asked(forked, forks={2: (1, 10)})).at == (1, 10)
    assert elect(asked([*forked, *saved(15, [1, 2, 3], attempt=2)], forks={2: (1, 10)})).at == (2, 15)


def test_a_branch_of_a_branch_counts_up_to_each_fork(elect: Elector) -> None:
    steps = [*saved(10), *saved(20), *saved(15, attempt=2), *saved(18, attempt=2), *saved(16, [0], attempt=3)]
    assert elect(asked(steps, forks={2: (1, 10), 3: (2, 15)})).at == (2, 15)
    assert elect(asked(steps, forks={2: (1, 10), 3: (1, 20)})).at == (1, 20), "attempt 2 was given up as a whole"


def test_an_attempt_from_step_0_gives_up_everything_before(elect: Elector) -> None:
    assert elect(asked([*saved(20), *saved(5, [0], attempt=2)])).at is None


def test_the_same_step_of_two_attempts_is_never_mixed(elect: Elector) -> None:
    mixed = [*saved(10), *saved(20, [0, 1]), *saved(20, [2, 3], attempt=2)]
    assert elect(asked(mixed, forks={2: (1, 10)})).at == (1, 10)


def test_a_newer_attempt_is_newer_whatever_its_steps(elect: Elector) -> None:
    assert elect(asked([*saved(90), *saved(50, attempt=2)], forks={2: (1, 90)})).at == (2, 50)


def test_copies_that_differ_disqualify_the_step(elect: Elector) -> None:
    answer = elect(asked([*saved(10), *saved(20), Copy(20, 3, "n1", digest="rotten")]))
    assert answer.at == (1, 10)
    assert "2 different shards of rank 3 exist" in answer.reason


def test_a_copy_that_nobody_has_read_yet_disputes_nothing(elect: Elector) -> None:
    answer = elect(asked([*saved(20), Copy(20, 3, "n1", tier="memory", digest="unknown")]))
    assert (answer.at, answer.nearest[3]) == ((1, 20), ("n3",))


def test_shards_of_two_meshes_are_never_mixed(elect: Elector) -> None:
    other = Copy(20, 3, "n3", mesh=MESH.resized(4))
    assert elect(asked([*saved(10), *saved(20, [0, 1, 2]), other])).at == (1, 10)


# ---------------------------------------------------------------- from where


def test_the_own_node_then_memory_then_the_first_name(elect: Elector) -> None:
    copies = [
        *saved(10),
        Copy(10, 0, "n0", tier="memory"),
        Copy(10, 0, "n1", tier="memory"),
        Copy(10, 3, "n2", tier="memory"),
    ]
    assert elect(asked(copies)).nearest == (("n0",), ("n1",), ("n2",), ("n3",))
    elsewhere = elect(asked(copies, nodes=["n9", "n1", "n2", "n9"]))
    assert elsewhere.nearest[0] == ("n0",), "memory on either: the first by name"
    assert elsewhere.nearest[3] == ("n2",), "memory before disk"


def test_ranks_permuted_over_nodes_find_their_shards(elect: Elector) -> None:
    answer = elect(asked(saved(10), nodes=NODES[::-1]))
    assert (answer.shards, answer.nearest) == (OWN, (("n0",), ("n1",), ("n2",), ("n3",)))


# ---------------------------------------------------------------- another number of replicas


def test_replicas_that_agree_stand_in_for_each_other(elect: Elector) -> None:
    grown = elect(asked(saved(10), dp=3))
    assert grown.shards == (*OWN, (0,), (1,))
    shrunk = elect(asked(saved(10), dp=1, nodes=["n2", "n3"]))
    assert shrunk.shards == ((2,), (3,)), "what is at hand, not what has to travel"


def test_replicas_that_differ_are_put_together_from_all_of_them_at_the_position(elect: Elector) -> None:
    assert elect(asked(saved(10, digests="own"), dp=1)).shards == ((0, 2), (1, 3))
    assert elect(asked(saved(10, digests="own"), dp=3)).shards == ((0, 2), (1, 3)) * 3
    assert elect(asked(saved(10, [0, 1, 2], digests="own"), dp=1)).at is None


def test_one_replica_alone_may_be_a_part_of_the_state(elect: Elector) -> None:
    answer = elect(asked(saved(10, [2, 3]), dp=1))
    assert answer.at is None
    assert "too few of its shards are known" in answer.reason


def test_one_replica_alone_will_do_when_its_attempt_has_shown_that_replicas_agree(elect: Elector) -> None:
    assert elect(asked([*saved(10, [0, 2]), *saved(20, [2, 3])], dp=1)).shards == ((2,), (3,))
    changed = [*saved(10), *saved(20, [2, 3], attempt=2)]
    assert elect(asked(changed, dp=1, forks={2: (1, 10)})).at == (1, 10), "the script of another attempt may be another"


def test_shards_of_which_nothing_is_known_are_taken_all_together(elect: Elector) -> None:
    assert elect(asked(saved(10, digests="unknown"), dp=1)).shards == ((0, 2), (1, 3))
    assert elect(asked(saved(10, [1, 2, 3], digests="unknown"), dp=1)).at is None


def test_fewer_replicas_restore_what_all_of_them_cannot(elect: Elector) -> None:
    """Rank 3 is lost in every tier. One replica less needs nothing of it, and does not start from step 0."""
    lost = [*saved(10, [0, 1, 2]), Copy(10, 1, "n2")]
    assert elect(asked(lost, dp=1)).at == (1, 10)
    assert elect(asked(lost, dp=1)).shards == ((0,), (1,))


# ---------------------------------------------------------------- what else is known


def stored(*steps: int, sharded: bool = False, damage: str = "", attempt: int = 1) -> ObjectStore:
    return ObjectStore("gs://b/p", tuple(StoredStep(attempt, step, MESH, sharded, damage) for step in steps))


def test_the_object_store_has_what_no_node_has_and_comes_last(elect: Elector) -> None:
    answer = elect(asked(saved(10, [0, 1]), known=Knowledge(stored(10))))
    assert (answer.shards, answer.nearest) == (OWN, (("n0",), ("n1",), (OBJECT_STORE,), (OBJECT_STORE,)))


def test_a_newer_step_is_worth_a_farther_way(elect: Elector) -> None:
    assert elect(asked(saved(10), known=Knowledge(stored(20, 5)))).at == (1, 20)
    assert elect(asked([*saved(10), *saved(30, [0])], known=Knowledge(stored(20)))).at == (1, 20)


def test_the_store_tells_whether_replicas_agree(elect: Elector) -> None:
    assert elect(asked([], dp=1, known=Knowledge(stored(10)))).shards == ((0,), (1,))
    assert elect(asked([], dp=1, known=Knowledge(stored(10, sharded=True)))).shards == ((0, 2), (1, 3))


def test_what_is_damaged_in_the_store_or_given_up_is_not_taken_from_there(elect: Elector) -> None:
    damaged = elect(asked(saved(10), known=Knowledge(stored(20, damage="a shard is gone"))))
    assert damaged.at == (1, 10)
    assert "in the object store, a shard is gone" in damaged.reason
    forked = [*saved(10), *saved(12, [0], attempt=2)]
    assert elect(asked(forked, forks={2: (1, 10)}, known=Knowledge(stored(20)))).at == (1, 10)


def test_nothing_after_the_last_verified_step_is_restored(elect: Elector) -> None:
    """Silent corruption: what was saved since is whole, and wrong."""
    known = Knowledge(stored(30), trusted=Trusted(15, "n1 computes wrongly"))
    answer = elect(asked([*saved(10), *saved(20)], known=known))
    assert answer.at == (1, 10)
    assert "step 20 of attempt 1: after step 15, the last one that was verified (n1 computes wrongly)" in answer.reason


def test_a_doubtful_step_is_passed_over(elect: Elector) -> None:
    known = Knowledge(doubts={CheckpointId(1, 20): "no source answers"})
    answer = elect(asked([*saved(10), *saved(20)], known=known))
    assert answer.at == (1, 10)
    assert "step 20 of attempt 1: no source answers" in answer.reason


# ---------------------------------------------------------------- where the terms differ


def test_a_lost_shard_in_the_same_mesh() -> None:
    """The supervisor waits, then goes on with fewer replicas; a launch has nobody to wait for and its mesh is given."""
    lost = asked(saved(20, [0, 1, 2]))
    assert by_supervisor(lost).at is None
    answer = by_launch(lost)
    assert (answer.at, answer.shards) == ((1, 20), ((0,), (1,), (2,), (1,)))
    assert "another replica's identical state stands in for 1 shard" in answer.reason
    assert by_launch(asked([*saved(10), *saved(20, [0, 1, 2])])).at == (1, 10), "exact before newest"
    assert by_launch(asked(saved(20, [0, 1]))).at is None, "one replica alone may be a part of the state"


def test_a_mesh_of_other_dimensions() -> None:
    """A launch puts the state together from every shard; a job's mesh changes in its replicas only."""
    other = Asked(saved(10), MESH, ("n0", "n1"), Mesh.of({"tp": 2}))
    assert "only the number of replicas may change" in by_supervisor(other).reason
    assert by_launch(other).shards == ((0, 1, 2, 3),) * 2
    assert by_launch(Asked(saved(10, [0, 1, 2]), MESH, ("n0", "n1"), Mesh.of({"tp": 2}))).at is None


# ---------------------------------------------------------------- whatever is held


COPIES = st.builds(
    Copy,
    step=st.integers(1, 4),
    rank=st.integers(0, 3),
    node=st.sampled_from(NODES),
    attempt=st.integers(1, 3),
    tier=st.sampled_from(["memory", "disk"]),
    digest=st.sampled_from(["", "", "", "unknown", "other"]),
)


@given(st.lists(COPIES, max_size=40), st.integers(1, 3), st.randoms(use_true_random=False))
def test_both_give_the_same_answer(copies: list[Copy], dp: int, shuffler: random.Random) -> None:
    copies = list({(copy.attempt, copy.step, copy.rank, copy.node, copy.tier): copy for copy in copies}.values())
    attempts = {
        copy.attempt for copy in copies
    }  # of one that nothing is left of, no shard says what it was forked from
    forks = {2: (1, 3), 3: (2, 2) if 2 in attempts else (1, 3)}
    question = asked(copies, dp=dp, forks=forks)
    answer, launched = by_supervisor(question), by_launch(question)
    shuffler.shuffle(copies)
    assert by_launch(asked(copies, dp=dp, forks=forks)) == launched, "whatever was reported first"
    assert by_supervisor(asked(copies, dp=dp, forks=forks)) == answer
    if answer.at is None:
        assert launched.at is None or dp == MESH.dp  # but for the last resort
    else:
        assert launched == answer
    if launched.at is not None:
        attempt, step = launched.at
        forked_at = {parent: at for child, (parent, at) in forks.items() if child in attempts}
        assert step <= forked_at.get(attempt, 4), "it was given up"
        held = {(copy.attempt, copy.step, copy.rank) for copy in copies}
        assert {(attempt, step, rank) for ranks in launched.shards for rank in ranks} <= held
        assert len(launched.shards) == 2 * dp


@pytest.mark.parametrize("dp_after", [0, -1, 1], ids=["same size", "one replica less", "one more"])
def test_the_work_grows_with_the_shards_and_no_faster(elect: Elector, dp_after: int) -> None:
    """Function calls, so that the machine's load does not matter. A walk over all replicas for each rank would be 8 × 8."""

    def calls(dp: int) -> int:
        mesh, node = MESH.resized(dp), [f"n{rank // 2:04}" for rank in range(2 * dp + 2)]
        own = [Copy(step, rank, node[rank], mesh=mesh) for step in (10, 20) for rank in range(2 * dp)]
        peers = [Copy(20, rank, node[rank ^ 2], mesh=mesh) for rank in range(2 * dp)]
        wanted = mesh.resized(dp + dp_after)
        question = Asked([*own, *peers], mesh, node[: wanted.world_size], wanted)
        with cProfile.Profile() as profile:
            answer = elect(question)
        assert answer.at == (1, 20)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert calls(512) < 8 * 1.2 * calls(64)
