"""The keeper: newest first, nothing older goes before the newer is complete, and nothing stops it for good."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standalone_ranks import stage
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported without saying so

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.train.standalone.board import Board
from holdfast.train.standalone.directory import Directory
from holdfast.train.standalone.keeper import UNFINISHED_MAX, Keeper, Place, Retention, settle

TIMEOUT_S = 30.0


def keeper(
    tmp: Path,
    board: Board,
    rank: int = 0,
    world_size: int = 1,
    keep: int = 2,
    others: frozenset[int] | None = frozenset(),
) -> Keeper:
    directory = Directory(tmp / "disk")
    directory.create()
    memory, staging = tmp / "memory" / f"rank-{rank}", tmp / "staging"
    place = Place(directory, "r", "n", world_size, memory, staging, prunes=(rank,), others=others)
    return Keeper(place, board, Retention(keep, []))


def save(mine: Keeper, step: int, rank: int = 0, world_size: int = 1) -> None:
    staged = stage(mine._place.memory, 1, step, rank, Mesh.of({"dp": world_size}))
    mine.offer(staged.key, staged.path)
    assert mine.drain(TIMEOUT_S)


def steps(tmp: Path) -> list[int]:
    return sorted({key.step for key in Directory(tmp / "disk").present()})


def test_the_newest_complete_steps_stay(tmp_path: Path) -> None:
    mine = keeper(tmp_path, Board(HashStore()))
    for step in (10, 20, 30, 40):
        save(mine, step)
    assert mine.close(TIMEOUT_S)
    assert steps(tmp_path) == [30, 40]


def test_nothing_goes_before_the_newer_step_is_complete_on_all_ranks(tmp_path: Path) -> None:
    board = Board(HashStore())
    pair = [keeper(tmp_path, board, rank, 2, keep=1) for rank in (0, 1)]
    for rank in (0, 1):
        save(pair[rank], 10, rank, 2)
    save(pair[0], 20, 0, 2)
    save(pair[0], 30, 0, 2)
    assert steps(tmp_path) == [10, 20, 30]
    save(pair[1], 30, 1, 2)  # it never had 20
    assert steps(tmp_path) == [30]
    for each in pair:
        assert each.close(TIMEOUT_S)


def test_nodes_that_share_a_directory_share_the_removal_of_what_is_old(tmp_path: Path) -> None:
    """Each removes its own ranks' shards; the one that speaks for the directory also those of a rank that has left."""
    board = Board(HashStore())
    speaks, other = keeper(tmp_path, board, 0, 2, 1, frozenset({1})), keeper(tmp_path, board, 1, 2, 1, None)
    left = keeper(tmp_path, Board(HashStore()), 2, 3, 1)
    save(left, 10, 2, 3)
    for step in (10, 20):
        save(other, step, 1, 2)
        save(speaks, step, 0, 2)
    present = Directory(tmp_path / "disk").present()
    assert sorted((key.step, key.rank) for key in present) == [(10, 1), (20, 0), (20, 1)]
    other.tidy()
    assert steps(tmp_path) == [20]
    for each in (speaks, other, left):
        assert each.close(TIMEOUT_S)


def test_steps_that_are_never_complete_do_not_pile_up(tmp_path: Path) -> None:
    board = Board(HashStore())
    mine = keeper(tmp_path, board, 0, 2)
    for step in range(1, 20):
        save(mine, step, 0, 2)
    assert steps(tmp_path) == list(range(20 - UNFINISHED_MAX, 20))
    assert board.count("stored/1/1") == 0  # so that a late rank cannot make it look complete
    other = keeper(tmp_path, board, 1, 2)
    save(other, 19, 1, 2)
    assert steps(tmp_path) == [19]
    for each in (mine, other):
        assert each.close(TIMEOUT_S)


def test_a_write_that_fails_costs_that_checkpoint_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = keeper(tmp_path, Board(HashStore()))
    real = Directory.store
    failures: list[Exception] = [OSError(errno.EIO, "Input/output error"), ZeroDivisionError("a bug")]

    def failing(self: Directory, *args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop(0)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Directory, "store", failing)
    for step in (10, 20, 30):
        save(mine, step)
    assert steps(tmp_path) == [30]
    assert "step 10 of rank 0 not written to disk" in caplog.text
    assert "a bug" in caplog.text
    assert mine.close(TIMEOUT_S)


def test_an_image_that_was_overwritten_before_its_turn_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = keeper(tmp_path, Board(HashStore()))
    staged = stage(mine._place.memory, 1, 10, 0, Mesh.of({"dp": 1}))
    mine.offer(ShardKey(1, 9, 0), staged.path)
    assert mine.drain(TIMEOUT_S)
    assert steps(tmp_path) == []
    assert "step 9 of rank 0 not written to disk" in caplog.text
    assert mine.close(TIMEOUT_S)


def test_memory_is_given_back_only_when_the_newest_save_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = keeper(tmp_path, Board(HashStore()))
    save(mine, 10)
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "store", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        save(mine, 20)
    mine.release_memory()
    assert list(mine._place.memory.iterdir())
    save(mine, 30)
    mine.release_memory()
    assert not mine._place.memory.exists()
    assert mine.close(TIMEOUT_S)


def test_at_the_end_everybody_learns_of_the_last_complete_step(tmp_path: Path) -> None:
    board = Board(HashStore())
    pair = [keeper(tmp_path, board, rank, 2, keep=1) for rank in (0, 1)]
    for step in (10, 20):
        for rank in (0, 1):
            save(pair[rank], step, rank, 2)
    enders = [threading.Thread(target=settle, args=(board, pair[rank], rank, 2, TIMEOUT_S)) for rank in (0, 1)]
    for each in pair:
        assert each.close(TIMEOUT_S)
    for ender in enders:
        ender.start()
    for ender in enders:
        ender.join(TIMEOUT_S)
    assert steps(tmp_path) == [20]


@given(
    st.lists(st.builds(CheckpointId, st.integers(1, 3), st.integers(1, 9)), max_size=12),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_retention_never_names_what_is_newer_than_the_oldest_kept(
    completed: list[CheckpointId], keep: int, floor: int
) -> None:
    retention = Retention(keep, [], floor=floor)
    keys = [ShardKey(attempt, step, 0) for attempt in range(1, 4) for step in range(1, 10)]
    for at in completed:
        retention.completed(at)
    kept = sorted(set(completed))[-keep:]
    victims = retention.victims(keys)
    assert all((key.attempt, key.step) < kept[0] and key.attempt >= floor for key in victims)
    assert bool(victims) <= bool(kept)
