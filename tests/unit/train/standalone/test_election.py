"""What a launch adds to the rule (`tests/contract/test_restore_election.py`): what shards say of their lineage,
what did not verify, and directories that nodes share."""

from __future__ import annotations

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.train.standalone.election import Holding, Seat, attempts, elect

DP2 = Mesh.of({"dp": 2})
APART = (Seat("n0", "disk of n0"), Seat("n1", "disk of n1"))
SHARED = (Seat("n0", "disk of n0"), Seat("n1", "disk of n0"))


def held(
    attempt: int,
    step: int,
    rank: int,
    *,
    node: str = "n0",
    parent: CheckpointId | None = None,
    digest: str = "",
    tier: str = "disk",
) -> Holding:
    path = f"/{node}/{tier}/a{attempt}/s{step}/{rank}"
    place = node if tier == "memory" else f"disk of {node}"
    return Holding(ShardKey(attempt, step, rank), DP2, parent, digest, tier, path, place, int(node[1:]))


def both(attempt: int, step: int, parent: CheckpointId | None = None) -> list[Holding]:
    return [held(attempt, step, rank, node=f"n{rank}", parent=parent) for rank in (0, 1)]


def test_nothing_saved_is_a_start_from_scratch() -> None:
    elected = elect([], DP2, APART)
    assert (elected.at, elected.parts, elected.reason) == (None, (), "nothing is saved here")


def test_every_complete_step_of_the_lineage_is_named_for_those_who_remove_old_ones() -> None:
    given_up = [*both(1, 20), held(2, 15, 0, parent=CheckpointId(1, 10))]
    elected = elect([*both(1, 5), *both(1, 10), *given_up], DP2, APART)
    assert (elected.at, elected.complete) == ((1, 10), ((1, 5), (1, 10)))
    assert attempts(given_up) == 2


def test_a_copy_that_does_not_verify_is_out_and_its_node_takes_another() -> None:
    there = [*both(1, 10), held(1, 10, 1, node="n0"), held(1, 10, 1, node="n1", tier="memory")]
    memory = elect(there, DP2, APART).parts[1][0]
    disk = elect(there, DP2, APART, {memory.copy}).parts[1][0]
    peer = elect(there, DP2, APART, {memory.copy, disk.copy}).parts[1][0]
    assert [(part.place, part.tier) for part in (memory, disk, peer)] == [
        ("n1", "memory"),
        ("disk of n1", "disk"),
        ("disk of n0", "disk"),
    ]
    assert elect(there, DP2, APART, {copy.copy for copy in there}).reason == "no copy verifies"


def test_a_copy_that_does_not_verify_still_says_what_its_attempt_was_forked_from() -> None:
    """Step 20 was given up when attempt 2 was forked from step 10, even if nothing of attempt 2 can be restored any more."""
    of_attempt_2 = held(2, 15, 0, parent=CheckpointId(1, 10))
    there = [*both(1, 10), *both(1, 20), of_attempt_2]
    assert elect(there, DP2, APART, {of_attempt_2.copy}).at == (1, 10)


def test_two_reports_of_one_shard_elect_the_same_whatever_came_first() -> None:
    """One of the two reporters has not read its digest yet."""
    plain, read = held(1, 10, 1), held(1, 10, 1, digest="x")
    other = [held(1, 10, 0)]
    forth, back = elect([*other, plain, read], DP2, APART), elect([*other, read, plain], DP2, APART)
    assert forth == back
    assert forth.parts[1] == (read,)


def test_what_lies_in_a_shared_directory_is_at_hand_on_every_node_that_shares_it() -> None:
    """Rank 1 reads it itself; the image in the memory of rank 0's node would have to travel."""
    there = [held(1, 10, 0), held(1, 10, 1), held(1, 10, 1, tier="memory")]
    elected = elect(there, DP2, SHARED)
    assert [part.place for (part,) in elected.parts] == ["disk of n0", "disk of n0"]
    assert all(seat.reads(part) for seat, (part,) in zip(SHARED, elected.parts, strict=True))
    own = elect([*there, held(1, 10, 1, node="n1", tier="memory")], DP2, SHARED)
    assert own.parts[1][0].place == "n1", "its own memory is nearer still"
    assert [part.place for (part,) in elect(there, DP2, APART).parts] == ["disk of n0", "n0"]
