from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import stored

from holdfast.domain.errors import IntegrityError, NotFound, OutOfSpace, Unavailable
from holdfast.domain.generations import ShardKey
from holdfast.shards import Manifest, Reader
from holdfast.shards.manifest import CHUNK_BYTES
from holdfast.stores import transfer
from holdfast.stores.layout import CheckpointManifest
from holdfast.stores.memory import InMemory


@pytest.fixture
def store() -> InMemory:
    return InMemory()


@pytest.fixture
def checkpoint(store: InMemory) -> CheckpointManifest:
    made = stored.save(store, 7)
    assert made is not None
    store.calls.clear()
    return made


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_fetched_shards_are_the_files_that_were_saved(
    store: InMemory, checkpoint: CheckpointManifest, tmp_path: Path
) -> None:
    done: list[int] = []
    paths = transfer.fetch(store, checkpoint, [0, 1, 2, 3], tmp_path, done.append)
    assert files_in(tmp_path) == [f"a1/s7/rank-{rank}.{kind}" for rank in range(4) for kind in ("json", "shard")]
    for rank, path in enumerate(paths):
        with Reader(path, expected=ShardKey(1, 7, rank)) as reader:
            assert bytes(reader.view("w")) == bytes([7 + rank % 2]) * stored.TENSOR_BYTES
            assert reader.extra == f"state of rank {rank}".encode()
        assert Manifest.read(path.with_suffix(".json")).rank == rank
    assert sum(done) == sum(entry.size for entry in checkpoint.ranks)


def test_what_replicas_share_is_downloaded_once(
    store: InMemory, checkpoint: CheckpointManifest, tmp_path: Path
) -> None:
    transfer.fetch(store, checkpoint, [0, 1, 2, 3], tmp_path)
    tensors = [key for operation, key in store.calls if operation == "read_into" and key.endswith(".tensors")]
    assert len(tensors) == len(set(tensors)) == 2


def test_large_shards_come_in_pieces(store: InMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 2 * CHUNK_BYTES)
    checkpoint = stored.save(store, 7, tensor_bytes=5 * CHUNK_BYTES + 17)
    assert checkpoint is not None
    data, _ = stored.shard(ShardKey(1, 7, 1), checkpoint.domain_mesh(), 8, tensor_bytes=5 * CHUNK_BYTES + 17)
    (path,) = transfer.fetch(store, checkpoint, [1], tmp_path)
    assert path.read_bytes() == data
    assert sum(key.endswith(".tensors") for operation, key in store.calls if operation == "read_into") == 3
    assert list(transfer.verify(store, checkpoint)) == []


def test_a_whole_checkpoint(store: InMemory, checkpoint: CheckpointManifest) -> None:
    done: list[int] = []
    assert list(transfer.verify(store, checkpoint, done.append)) == []
    assert sum(done) == transfer.bytes_to_verify(checkpoint)


def test_the_shares_of_all_ranks_are_the_whole_and_nothing_is_in_two(
    store: InMemory, checkpoint: CheckpointManifest
) -> None:
    done: list[int] = []
    for rank in range(4):
        assert list(transfer.verify(store, checkpoint, done.append, ranks={rank})) == []
    assert sum(done) == transfer.bytes_to_verify(checkpoint)
    store.rot(checkpoint.entry(3).tensors, 100)  # shared with rank 1
    assert [each.rank for rank in range(4) for each in transfer.verify(store, checkpoint, ranks={rank})] == [1]


@pytest.mark.parametrize("kind", ["tensors", "rest", "manifest"])
@pytest.mark.parametrize("harm", ["rot", "truncate", "delete"])
def test_damage_is_found_and_never_handed_out(
    store: InMemory, checkpoint: CheckpointManifest, tmp_path: Path, kind: str, harm: str
) -> None:
    key = str(getattr(checkpoint.entry(1), kind))
    match harm:
        case "rot":
            store.rot(key, 100)
        case "truncate":
            store.truncate(key, 99)
        case _:
            store.delete(key)
    damaged = list(transfer.verify(store, checkpoint))
    assert [each.key for each in damaged] == [key]
    with pytest.raises((IntegrityError, NotFound)):
        transfer.fetch(store, checkpoint, [1], tmp_path)
    assert files_in(tmp_path) == []


def test_every_byte_counts(store: InMemory, checkpoint: CheckpointManifest) -> None:
    """Also those between tensors, and the header's."""
    for key in (checkpoint.entry(0).tensors, checkpoint.entry(0).rest):
        info = store.stat(key)
        assert info is not None
        for offset in range(0, info.size, 997):
            store.rot(key, offset)
            assert [each.key for each in transfer.verify(store, checkpoint)] == [key]
            store.rot(key, offset)


def test_what_rots_on_the_way_is_read_again(store: InMemory, checkpoint: CheckpointManifest, tmp_path: Path) -> None:
    class Flipping(InMemory):
        flips = 2

        def read_into(self, key: str, target: memoryview, offset: int = 0) -> None:
            store.read_into(key, target, offset)
            if self.flips and key.endswith(".tensors"):
                self.flips -= 1
                target[5] ^= 1

        def read(self, key: str, size_max: int) -> bytes:
            return store.read(key, size_max)

    assert len(transfer.fetch(Flipping(), checkpoint, [0], tmp_path)) == 1


def test_a_store_that_goes_away_leaves_nothing(store: InMemory, checkpoint: CheckpointManifest, tmp_path: Path) -> None:
    store.fail(operation="read_into", key_part=".tensors")
    with pytest.raises(Unavailable):
        transfer.fetch(store, checkpoint, [0], tmp_path)
    assert files_in(tmp_path) == []


def test_a_full_disk(
    store: InMemory, checkpoint: CheckpointManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfSpace, match="rank-0"):
        transfer.fetch(store, checkpoint, [0], tmp_path)
    assert files_in(tmp_path) == []


def test_a_twin_that_changed_meanwhile_is_not_believed(
    store: InMemory, checkpoint: CheckpointManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = transfer._copied

    def harmed(twin: Path, piece: transfer.Piece, target: memoryview) -> bool:
        with twin.open("r+b") as file:
            file.seek(piece.at + 10)
            file.write(b"\xff\xff")
        return copied(twin, piece, target)

    monkeypatch.setattr(transfer, "_copied", harmed)
    _, path = transfer.fetch(store, checkpoint, [0, 2], tmp_path)
    data, _ = stored.shard(ShardKey(1, 7, 2), checkpoint.domain_mesh(), 7)
    assert path.read_bytes() == data
