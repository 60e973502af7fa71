"""Dumps of hung jobs of which some are missing: who is provably stuck stays named, and whose dump is missing is not blamed."""

from __future__ import annotations

import re
import shutil
from itertools import combinations
from pathlib import Path

import pytest

from holdfast.diagnostics import flight_dumps
from holdfast.diagnostics.detectors.waiting import Standing, who_is_waited_for
from holdfast.domain.collectives import CollectiveRows

CORPUS = Path(__file__).parents[2] / "data" / "flight_recorder"
CASES = sorted(path.parent.name for path in CORPUS.glob("*/fault_injection.log"))
RANKS = range(16)


def truth(case: str) -> set[int]:
    log = (CORPUS / case / "fault_injection.log").read_text(encoding="utf-8")
    return {int(rank) for rank in re.findall(r"^Rank (\d+),", log, re.MULTILINE)}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def without(case: str, missing: tuple[int, ...], directory: Path) -> flight_dumps.Dumps:
    for rank in set(RANKS) - set(missing):
        shutil.copy(CORPUS / case / f"_dump_{rank}", directory)
    return flight_dumps.read(directory)


@pytest.mark.parametrize("rank", RANKS)
def test_one_dump_is_missing(case: str, rank: int, tmp_path: Path) -> None:
    verdict = without(case, (rank,), tmp_path).verdict()
    assert verdict is not None
    assert set(verdict.ranks) == truth(case) - {rank}


@pytest.mark.parametrize("missing", [*combinations(range(0, 16, 5), 2), (14, 15), (7, 8, 15)])
def test_more_are_missing(case: str, missing: tuple[int, ...], tmp_path: Path) -> None:
    verdict = without(case, missing, tmp_path).verdict()
    assert verdict is not None
    assert set(verdict.ranks) == truth(case) - set(missing)


def test_the_highest_ranks_are_known_from_the_others_groups(tmp_path: Path) -> None:
    """Both witnesses of the one that could be proven are missing: it is not the network's fault."""
    verdict = without("gpu_error_1st", (13, 14, 15), tmp_path).verdict()
    assert verdict is not None
    assert (verdict.standing, verdict.ranks) == (Standing.UNREACHABLE, (13, 14, 15))


def rows(*listed: tuple[int, str, str, int, int]) -> CollectiveRows:
    rank, group, members, entered, pending = zip(*listed, strict=True)
    kind = tuple("all_reduce" if each >= 0 else "" for each in pending)
    n = len(listed)
    return CollectiveRows(rank, group, members, kind, ("",) * n, (-1,) * n, entered, pending)


def test_a_stalled_rank_is_proven_by_any_peer_that_has_finished() -> None:
    """Rank 0 finished what rank 1 is still inside; rank 1 is in another group with rank 3, of which nothing is known."""
    found = who_is_waited_for(
        rows(
            (0, "dp", "0-2,4", 9, -1),
            (1, "dp", "0-2,4", 9, 9),
            (2, "dp", "0-2,4", 9, 9),
            (4, "dp", "0-2,4", 9, -1),
            (1, "tp", "1,3", 4, 4),
        ),
        {3: "no dump"},
    )
    assert found is not None
    assert (found.standing, set(found.ranks)) == (Standing.STALLED, {1, 2})


def test_one_that_finished_before_all_others_blames_none_of_them() -> None:
    """Seen with a node whose packets to the others were lost: it was through, and they waited for what it had sent."""
    found = who_is_waited_for(rows((0, "0", "0-3", 9, -1), *((rank, "0", "0-3", 9, 9) for rank in (1, 2, 3))))
    assert found is not None
    assert (found.standing, found.ranks, found.among) == (Standing.UNDELIVERED, (), (1, 2, 3))
    assert "did not arrive" in found.reason


def test_with_a_node_out_of_sight_nobody_is_blamed_for_being_inside() -> None:
    """Seen with a node that was cut off from everybody: no row of its rank, and no word that its recorder is silent."""
    found = who_is_waited_for(rows((0, "0", "0-3", 9, -1), (1, "0", "0-3", 9, 9), (2, "0", "0-3", 9, -1)))
    assert found is not None
    assert (found.standing, found.ranks, found.among) == (Standing.UNDELIVERED, (), (1,))
    assert "the node of rank 3" in found.reason


def test_a_rank_out_of_sight_that_all_others_may_wait_for_is_suspected() -> None:
    found = who_is_waited_for(rows(*((rank, "0", "0-3", 9, 9) for rank in (0, 1, 2))))
    assert found is not None
    assert (found.standing, found.ranks) == (Standing.UNREACHABLE, (3,))
    assert "nothing is heard of its node" in found.reason
