"""Who the others wait for, from who is where in which process group."""

from __future__ import annotations

import tracemalloc

import pytest

from holdfast.diagnostics.detectors.waiting import Standing, Waiting, find_blocking_ranks
from holdfast.domain.collectives import CollectiveRows

# (rank, group, members, entered, pending, kind, sizes); a point-to-point row has a peer instead of a count
Row = tuple[int, str, str, int, int, str, str, int]


def at(rank: int, group: str, members: str, entered: int, pending: int = -1, kind: str = "", sizes: str = "") -> Row:
    return (rank, group, members, entered, pending, kind or ("all_reduce" if pending >= 0 else ""), sizes, -1)


def p2p(rank: int, group: str, members: str, direction: str, peer: int) -> Row:
    return (rank, group, members, -1, 7, direction, "", peer)


def rows(*listed: Row) -> CollectiveRows:
    rank, group, members, entered, pending, kind, sizes, peer = zip(*listed, strict=True)
    return CollectiveRows(rank, group, members, kind, sizes, peer, entered, pending)


def named(found: Waiting | None) -> tuple[Standing, tuple[int, ...]]:
    assert found is not None
    assert found.reason
    return found.standing, found.ranks


def test_nobody_inside_a_collective_explains_nothing() -> None:
    assert find_blocking_ranks(rows(at(0, "dp", "0-1", 5), at(1, "dp", "0-1", 4))) is None
    assert find_blocking_ranks(CollectiveRows.of(())) is None


def test_groups_that_no_job_has_explain_nothing_and_take_little_memory() -> None:
    listed = [at(rank, f"g{number}", "0-999999", 9, 9) for number in range(200) for rank in (0, 1)]
    tracemalloc.start()
    assert find_blocking_ranks(rows(*listed)) is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 << 20


def test_the_one_that_has_not_come_is_named_with_what_it_misses() -> None:
    found = find_blocking_ranks(rows(at(0, "dp", "0-2", 9, 9), at(1, "dp", "0-2", 8), at(2, "dp", "0-2", 9, 9)))
    assert named(found) == (Standing.ABSENT, (1,))
    assert found is not None
    assert "has not entered all_reduce #9 of group dp" in found.reason


def test_blame_goes_through_groups_to_the_root() -> None:
    """4 waits for 5 in its tensor group, so it is late for its data group, where 0 waits for it."""
    found = find_blocking_ranks(
        rows(
            at(0, "dp0", "0,4", 3, 3), at(4, "dp0", "0,4", 2),
            at(1, "dp1", "1,5", 3, 3), at(5, "dp1", "1,5", 2),
            at(0, "tp0", "0-1", 9), at(1, "tp0", "0-1", 9),
            at(4, "tp1", "4-5", 9, 9), at(5, "tp1", "4-5", 8),
        )
    )  # fmt: skip
    assert named(found) == (Standing.ABSENT, (5,))


def test_several_are_named_and_the_one_most_waited_for_first() -> None:
    listed = [at(rank, "dp", "0-7", 6 if rank in (2, 5) else 7, -1 if rank in (2, 5) else 7) for rank in range(8)]
    assert named(find_blocking_ranks(rows(*listed))) == (Standing.ABSENT, (2, 5))


def test_who_lags_in_what_its_peers_have_finished_stands_still_itself() -> None:
    listed = [at(0, "tp", "0-2", 12, 10), at(1, "tp", "0-2", 12, 12), at(2, "tp", "0-2", 12, 12)]
    assert named(find_blocking_ranks(rows(*listed))) == (Standing.STALLED, (0,))


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "gather", "scatter"])
def test_a_leaf_of_a_broadcast_may_be_slower_than_its_root(kind: str) -> None:
    found = find_blocking_ranks(rows(at(0, "tp", "0-1", 10), at(1, "tp", "0-1", 10, 10, kind)))
    assert named(found) == (Standing.IN_FLIGHT, ())


def test_everybody_in_the_same_operation_is_the_network() -> None:
    found = find_blocking_ranks(rows(*(at(rank, "dp", "0-3", 7, 7) for rank in range(4))))
    assert named(found) == (Standing.IN_FLIGHT, ())
    assert found is not None
    assert "the network" in found.reason
    assert found.among == (0, 1, 2, 3)


def test_two_that_wait_for_each_other_in_two_groups_are_a_deadlock() -> None:
    found = find_blocking_ranks(
        rows(at(0, "a", "0-1", 5, 5), at(1, "a", "0-1", 4), at(0, "b", "0-1", 2), at(1, "b", "0-1", 3, 3))
    )
    assert named(found) == (Standing.CYCLE, ())
    assert found is not None
    assert found.among == (0, 1)


def test_a_different_collective_or_size_is_a_mismatch_of_the_fewer() -> None:
    for odd in (at(2, "dp", "0-2", 9, 9, "broadcast"), at(2, "dp", "0-2", 9, 9, "all_reduce", "Float[8]")):
        found = find_blocking_ranks(
            rows(at(0, "dp", "0-2", 9, 9, sizes="Float[4]"), at(1, "dp", "0-2", 9, 9, sizes="Float[4]"), odd)
        )
        assert named(found) == (Standing.MISMATCH, (2,))
    found = find_blocking_ranks(rows(at(0, "dp", "0-1", 9, 9), at(1, "dp", "0-1", 9, 9, "broadcast")))
    assert named(found) == (Standing.MISMATCH, ())
    assert found is not None
    assert "rank 1 calls broadcast and rank 0 calls all_reduce, as #9 of group" in found.reason
    assert "dcp.async_save needs a process_group of its own" in found.reason


def test_sizes_may_differ_where_the_operation_allows_it() -> None:
    found = find_blocking_ranks(
        rows(at(0, "ep", "0-1", 9, 9, "all_to_all", "Float[3]"), at(1, "ep", "0-1", 9, 9, "all_to_all", "Float[5]"))
    )
    assert named(found) == (Standing.IN_FLIGHT, ())


def test_a_pipeline_stage_that_does_not_receive_or_send() -> None:
    found = find_blocking_ranks(
        rows(p2p(0, "pp", "0-2", "recv", 1), p2p(1, "pp", "0-2", "recv", 2), at(2, "pp", "0-2", 0))
    )
    assert named(found) == (Standing.ABSENT, (2,))


def test_a_message_under_way_blames_nobody() -> None:
    found = find_blocking_ranks(rows(p2p(0, "pp", "0-1", "recv", 1), p2p(1, "pp", "0-1", "send", 0)))
    assert named(found) == (Standing.IN_FLIGHT, ())


def test_a_recorder_that_does_not_answer_is_suspected_of_what_nobody_else_explains() -> None:
    inside = [at(rank, "dp", "0-3", 7, 7) for rank in (0, 1, 3)]
    found = find_blocking_ranks(rows(*inside), {2: "its flight recorder does not answer"})
    assert named(found) == (Standing.UNREACHABLE, (2,))
    with_absent = [*inside[:2], at(3, "dp", "0-3", 6)]
    assert named(find_blocking_ranks(rows(*with_absent), {2: "silent"})) == (Standing.ABSENT, (3,))


def test_an_idle_rank_whose_count_is_not_known_is_suspected() -> None:
    found = find_blocking_ranks(rows(at(0, "dp", "0-1", 7, 7), at(1, "tp", "1", 3)))
    assert named(found) == (Standing.UNREACHABLE, (1,))


def test_groups_of_one_name_with_other_members_are_different_groups() -> None:
    """Names made by some ranks only (`use_local_synchronization`) may be given twice."""
    inside, outside = [at(rank, "1", "0-1", 9, 9) for rank in (0, 1)], [at(rank, "1", "2-3", 4) for rank in (2, 3)]
    found = find_blocking_ranks(rows(*inside, *outside))
    assert named(found) == (Standing.IN_FLIGHT, ())


@pytest.mark.parametrize("ranks", [1_000, 8_000])
def test_the_cost_is_linear_in_ranks(ranks: int) -> None:
    listed = []
    for rank in range(ranks):
        late = rank == ranks // 2
        tp, dp = rank // 8 * 8, rank % 8
        listed.append(at(rank, f"tp{tp}", f"{tp}-{tp + 7}", 99 - late, -1 if late else 99))
        listed.append(at(rank, f"dp{dp}", f"{dp}-{ranks - 8 + dp}:8", 5))
    assert named(find_blocking_ranks(rows(*listed))) == (Standing.ABSENT, (ranks // 2,))
