"""Dumps of hung jobs of which some are missing: who is provably stuck stays named, and whose dump is missing is not blamed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import fields
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from benchmarks.detection import collectives
from holdfast.diagnostics import flight_dumps
from holdfast.diagnostics.detectors.waiting import Standing, Waiting, find_blocking_ranks
from holdfast.domain.collectives import CollectiveRows
from holdfast.domain.mesh import Mesh

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
    verdict = without(case, (rank,), tmp_path).diagnosis()
    assert verdict is not None
    assert set(verdict.ranks) == truth(case) - {rank}


@pytest.mark.parametrize("missing", [*combinations(range(0, 16, 5), 2), (14, 15), (7, 8, 15)])
def test_more_are_missing(case: str, missing: tuple[int, ...], tmp_path: Path) -> None:
    verdict = without(case, missing, tmp_path).diagnosis()
    assert verdict is not None
    assert set(verdict.ranks) == truth(case) - set(missing)


def test_the_highest_ranks_are_known_from_the_others_groups(tmp_path: Path) -> None:
    """Both witnesses of the one that could be proven are missing: that is said, and neither they nor the network are blamed."""
    dumps = without("gpu_error_1st", (13, 14, 15), tmp_path)
    verdict = dumps.diagnosis()
    assert verdict is not None
    assert (verdict.standing, verdict.ranks, verdict.among) == (Standing.UNREACHABLE, (), (13, 14, 15))
    said = flight_dumps.describe(dumps)
    assert "3 without a dump (13-15)" in said
    assert "no rank is named: the dumps of ranks 13, 14, 15 are missing" in said


# ---------------------------------------------------------------- generated hangs

MESHES = (
    {"dp": 2, "pp": 1, "tp": 1}, {"dp": 1, "pp": 3, "tp": 1}, {"dp": 4, "pp": 1, "tp": 1}, {"dp": 2, "pp": 1, "tp": 2},
    {"dp": 3, "pp": 1, "tp": 2}, {"dp": 2, "pp": 2, "tp": 2},
)  # fmt: skip
SEEDS = range(5)


def hangs(way: str) -> Iterator[tuple[collectives.Stuck, int]]:
    """Generated hangs of this kind, each with the number of its ranks."""
    for sizes in MESHES:
        mesh = Mesh.of(sizes)
        for seed in SEEDS:
            stuck = collectives.stuck(way, mesh, np.random.default_rng(seed))
            if stuck is not None:
                yield stuck, mesh.world_size


def judged(stuck: collectives.Stuck, missing: tuple[int, ...]) -> Waiting | None:
    columns = (getattr(stuck.rows, each.name) for each in fields(CollectiveRows))
    kept = [row for row in zip(*columns, strict=True) if row[0] not in missing]
    left = CollectiveRows(*zip(*kept, strict=True)) if kept else CollectiveRows.of(())
    silent = dict.fromkeys(stuck.silent - set(missing), "its flight recorder does not answer")
    return find_blocking_ranks(left, silent, missing=missing)


@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("way", collectives.WAYS)
def test_nobody_is_blamed_for_a_dump_that_is_missing(way: str, many: int) -> None:
    """Every dump, and every pair of them, removed in turn. Who is named is a culprit whose dump is there."""
    for stuck, size in hangs(way):
        for missing in combinations(range(size), many):
            verdict = judged(stuck, missing)
            if verdict is not None:
                assert set(verdict.ranks) <= stuck.culprits - set(missing), (verdict, missing)


@pytest.mark.parametrize("way", collectives.WAYS)
def test_one_missing_dump_seldom_hides_the_culprit(way: str) -> None:
    """It does so only where it was the witness, and then the dump is said to be missing or nobody is inside anything."""
    found = cases = 0
    for stuck, size in hangs(way):
        for rank in set(range(size)) - stuck.culprits if stuck.culprits else ():
            verdict = judged(stuck, (rank,))
            cases += 1
            found += verdict is not None and set(verdict.ranks) == stuck.culprits
            if verdict is not None and not verdict.ranks:
                assert verdict.among == (rank,) or verdict.standing is Standing.MISMATCH, (verdict, rank)
                assert str(rank) in verdict.reason
    assert found >= 0.85 * cases


@pytest.mark.parametrize("way", ["network", "deadlock"])
def test_where_nobody_is_to_blame_the_missing_dump_is_a_fact(way: str) -> None:
    for stuck, size in hangs(way):
        for rank in range(size):
            verdict = judged(stuck, (rank,))
            assert verdict is not None
            if verdict.standing is Standing.UNREACHABLE:
                assert verdict.reason.startswith(f"the dump of rank {rank} is missing, and rank ")


def test_a_stalled_pair_whose_only_witness_is_missing() -> None:
    """Rank 1 lags in what rank 0 has finished; without rank 0 nothing shows it."""
    pair = (0, "tp", "0-1", 9, -1), (1, "tp", "0-1", 9, 9)
    found = find_blocking_ranks(rows(*pair))
    assert found is not None
    assert (found.standing, found.ranks) == (Standing.STALLED, (1,))
    found = find_blocking_ranks(rows(pair[1]), missing=(0,))
    assert found is not None
    assert (found.standing, found.ranks, found.among) == (Standing.UNREACHABLE, (), (0,))


def test_who_does_not_answer_is_suspected_and_not_whose_dump_is_missing() -> None:
    found = find_blocking_ranks(rows((0, "dp", "0-2", 9, 9)), {2: "its flight recorder does not answer"}, missing=(1,))
    assert found is not None
    assert (found.standing, found.ranks) == (Standing.UNREACHABLE, (2,))


def test_the_other_end_of_a_message_that_has_recorded_nothing_is_not_the_network() -> None:
    message = CollectiveRows((1,), ("pp",), ("",), ("recv",), ("",), (0,), (-1,), (3,))
    found = find_blocking_ranks(message)
    assert found is not None
    assert (found.standing, found.ranks) == (Standing.UNREACHABLE, (0,))
    assert found.reason == "its recorder shows no operation, and rank 1 is inside a recv of group pp with it"


def rows(*listed: tuple[int, str, str, int, int]) -> CollectiveRows:
    rank, group, members, entered, pending = zip(*listed, strict=True)
    kind = tuple("all_reduce" if each >= 0 else "" for each in pending)
    n = len(listed)
    return CollectiveRows(rank, group, members, kind, ("",) * n, (-1,) * n, entered, pending)


def test_a_stalled_rank_is_proven_by_any_peer_that_has_finished() -> None:
    """Rank 0 finished what rank 1 is still inside; rank 1 is in another group with rank 3, of which nothing is known."""
    found = find_blocking_ranks(
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
    found = find_blocking_ranks(rows((0, "0", "0-3", 9, -1), *((rank, "0", "0-3", 9, 9) for rank in (1, 2, 3))))
    assert found is not None
    assert (found.standing, found.ranks, found.among) == (Standing.UNDELIVERED, (), (1, 2, 3))
    assert "did not arrive" in found.reason


def test_with_a_node_out_of_sight_nobody_is_blamed_for_being_inside() -> None:
    """Seen with a node that was cut off from everybody: no row of its rank, and no word that its recorder is silent."""
    found = find_blocking_ranks(
        rows((0, "0", "0-3", 9, -1), (1, "0", "0-3", 9, 9), (2, "0", "0-3", 9, -1)), heard=(0, 1, 2)
    )
    assert found is not None
    assert (found.standing, found.ranks, found.among) == (Standing.UNDELIVERED, (), (1,))
    assert "the node of rank 3" in found.reason


def test_a_rank_out_of_sight_that_all_others_may_wait_for_is_suspected() -> None:
    found = find_blocking_ranks(rows(*((rank, "0", "0-3", 9, 9) for rank in (0, 1, 2))), heard=(0, 1, 2))
    assert found is not None
    assert (found.standing, found.ranks) == (Standing.UNREACHABLE, (3,))
    assert "its node sends no telemetry" in found.reason
