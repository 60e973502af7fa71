"""A start of all ranks: what they agree on, and what each of them then has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from standalone_ranks import Ranks, end, key_of

from holdfast.domain.errors import Conflict
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.shards import Manifest
from holdfast.train.standalone.directory import Directory

DP2 = Mesh.of({"dp": 2})


def ranks(tmp: Path, *nodes: str, shared: bool = False) -> Ranks:
    return Ranks(tmp, nodes, Mesh.of({"dp": len(nodes)}), shared)


def restored(tmp: Path, *nodes: str, shared: bool = False) -> list[list[ShardKey]]:
    """Start once more, and say what each rank was given."""
    starts = ranks(tmp, *nodes, shared=shared).begin()
    end(starts)
    return [[key_of(path) for path in start.paths] for start in starts]


def test_every_start_is_a_new_attempt_of_the_same_run(tmp_path: Path) -> None:
    first = ranks(tmp_path, "a", "b").begin()
    end(first)
    second = ranks(tmp_path, "a", "b").begin()
    end(second)
    assert [start.attempt for start in first + second] == [1, 1, 2, 2]
    assert len({start.run for start in first + second}) == 1
    assert len({start.launch for start in first}) == 1
    assert [start.election.at for start in second] == [None, None]


@pytest.mark.parametrize("shared", [False, True])
def test_the_newest_step_on_disk_of_all_ranks_is_restored(tmp_path: Path, shared: bool) -> None:
    job = ranks(tmp_path, "a", "b", shared=shared)
    starts = job.begin()
    job.save(starts[0], 10)
    job.save(starts[0], 20)
    job.save(starts[0], 30, ranks=[0])
    end(starts)
    assert restored(tmp_path, "a", "b", shared=shared) == [[ShardKey(1, 20, 0)], [ShardKey(1, 20, 1)]]


@pytest.mark.parametrize(("shared", "listings"), [(True, 1), (False, 3)])
def test_a_directory_is_listed_once_however_many_nodes_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool, listings: int
) -> None:
    job = ranks(tmp_path, "a", "b", "c", "c", shared=shared)
    starts = job.begin()
    job.save(starts[0], 10)
    end(starts)
    listed: list[str] = []
    real = Directory.manifests

    def counted(self: Directory, run: str) -> Iterator[tuple[Manifest, Path]]:
        listed.append(run)
        return real(self, run)

    monkeypatch.setattr(Directory, "manifests", counted)
    again = ranks(tmp_path, "a", "c", "b", "b", shared=shared)  # some ranks run elsewhere now
    starts = again.begin()
    end(starts)
    assert [[key_of(path) for path in start.paths] for start in starts] == [
        [ShardKey(1, 10, rank)] for rank in range(4)
    ]
    assert len(listed) == listings
    assert (sum(exchange.sent for exchange in again.exchanges) == 0) == shared, "what is shared does not travel"


def test_images_in_memory_are_newer_than_the_disk_and_survive_a_permutation_of_ranks(tmp_path: Path) -> None:
    job = ranks(tmp_path, "a", "b")
    starts = job.begin()
    job.save(starts[0], 10)
    job.save(starts[0], 20, memory=True, disk=False)
    end(starts)
    assert restored(tmp_path, "b", "a") == [[ShardKey(1, 20, 0)], [ShardKey(1, 20, 1)]]


def test_a_replaced_node_gets_the_shard_from_another_one_that_holds_a_copy(tmp_path: Path) -> None:
    """Here node a has seen rank 1 before: it ran there once."""
    job = ranks(tmp_path, "a", "a")
    starts = job.begin()
    job.save(starts[0], 10)
    end(starts)
    again = ranks(tmp_path, "a", "new")
    starts = again.begin()
    end(starts)
    assert [key_of(path) for path in starts[1].paths] == [ShardKey(1, 10, 1)]
    assert starts[1].paths[0].is_relative_to(tmp_path / "disk" / "new")
    assert again.exchanges[0].sent > 0
    assert restored(tmp_path, "a", "new") == [[ShardKey(1, 10, 0)], [ShardKey(1, 10, 1)]]  # from its own disk now


def test_bytes_that_change_on_the_way_are_not_used(tmp_path: Path) -> None:
    job = ranks(tmp_path, "a", "a")
    starts = job.begin()
    job.save(starts[0], 10)
    end(starts)
    again = ranks(tmp_path, "a", "new")
    again.exchanges[0].spoil = lambda data: data if len(data) < 4000 else bytes([data[0] ^ 1]) + data[1:]
    starts = again.begin()
    end(starts)
    # What is left of the step is rank 0's own shard, which is the state of every replica.
    assert [key_of(path).rank for start in starts for path in start.paths] in ([0], [])
    assert not list((tmp_path / "disk" / "new").glob("a*/s*/*.shard"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "manifest"])
def test_a_damaged_copy_is_out_and_the_next_newest_is_taken(tmp_path: Path, damage: str) -> None:
    job = ranks(tmp_path, "a", "b")
    starts = job.begin()
    job.save(starts[0], 10)
    job.save(starts[0], 20)
    end(starts)
    shard = job.directory("b").path(ShardKey(1, 20, 1))
    match damage:
        case "flip":
            raw = bytearray(shard.read_bytes())
            raw[-len(raw) // 4] ^= 1
            shard.write_bytes(raw)
        case "truncate":
            shard.write_bytes(shard.read_bytes()[:-1])
        case _:
            manifest = shard.with_suffix(".json")
            manifest.write_bytes(manifest.read_bytes().replace(b'"step":20', b'"step":21'))
    assert restored(tmp_path, "a", "b") == [[ShardKey(1, 10, 0)], [ShardKey(1, 10, 1)]]


def test_a_good_image_is_taken_when_the_disk_copy_is_damaged(tmp_path: Path) -> None:
    job = ranks(tmp_path, "a")
    starts = job.begin()
    job.save(starts[0], 20, memory=True)
    end(starts)
    shard = job.directory("a").path(ShardKey(1, 20, 0))
    shard.write_bytes(bytes(shard.stat().st_size))
    starts = ranks(tmp_path, "a").begin()
    end(starts)
    assert starts[0].paths[0].is_relative_to(tmp_path / "memory")


def test_a_second_launch_is_refused_on_all_its_ranks_while_the_first_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.train.standalone.directory.LOCK_WAIT_S", 0.0)
    monkeypatch.setattr("holdfast.train.standalone.directory.Lock.__init__.__defaults__", (0.0,))
    first = ranks(tmp_path, "a", "b").begin()
    with pytest.raises(Conflict, match="another run is using"):
        ranks(tmp_path, "c", "b").begin()
    end(first)
    end(ranks(tmp_path, "c", "b").begin())


def test_directories_of_different_runs_are_not_mixed(tmp_path: Path) -> None:
    end(ranks(tmp_path, "a").begin())
    end(ranks(tmp_path, "b").begin())
    with pytest.raises(Conflict, match="belong to different runs"):
        ranks(tmp_path, "a", "b").begin()


def test_an_emptied_directory_starts_from_scratch_whatever_memory_holds(tmp_path: Path) -> None:
    job = ranks(tmp_path, "a")
    starts = job.begin()
    job.save(starts[0], 10, memory=True, disk=False)
    end(starts)
    for path in (tmp_path / "disk" / "a").iterdir():
        path.unlink()
    assert restored(tmp_path, "a") == [[]]


def test_a_resize_restores_every_rank_from_a_replica_or_from_all_parts(tmp_path: Path) -> None:
    job = ranks(tmp_path, "a", "a")
    starts = job.begin()
    job.save(starts[0], 10)
    end(starts)
    assert restored(tmp_path, "a", "a", "b") == [[ShardKey(1, 10, 0)], [ShardKey(1, 10, 1)], [ShardKey(1, 10, 0)]]
