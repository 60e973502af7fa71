"""The disk tier: whole or not there, whatever is cut off where."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standalone_ranks import stage

from holdfast.domain.errors import Conflict, IncompatibleVersion, IntegrityError, OutOfSpace
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.shards import Manifest, Reader
from holdfast.train.standalone import checksum
from holdfast.train.standalone.directory import Directory, Identity, Lock

KEY = ShardKey(1, 10, 0)


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    directory = Directory(tmp_path / "disk")
    directory.create()
    return directory


def store(directory: Directory, tmp_path: Path, step: int = 10) -> Manifest:
    staged = stage(tmp_path / "memory", 1, step, 0, Mesh.of({"dp": 1}))
    with Reader(staged.path, staged.key) as reader:
        return directory.store(reader, run="r", node="n", pace=lambda _: None)


def committed(directory: Directory) -> list[ShardKey]:
    return [manifest.key for manifest, _ in directory.manifests("r")]


def test_a_stored_shard_is_the_image_and_its_manifest_verifies(directory: Directory, tmp_path: Path) -> None:
    manifest = store(directory, tmp_path)
    assert committed(directory) == [KEY]
    assert Manifest.read(directory.path(KEY).with_suffix(".json")) == manifest
    with Reader(directory.path(KEY), KEY) as stored:
        checksum.verify(manifest, stored.data)
        assert stored.view("w") == bytes([10]) * 4096
    assert list(directory.manifests("another run")) == []


@pytest.mark.parametrize("victim", ["a1/s10", "a1"])
def test_a_step_that_another_rank_deletes_meanwhile_is_not_listed(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """Another rank's keeper removes the directory after it was found and before it is read."""
    for step in (10, 20):
        store(directory, tmp_path, step)
    listed = os.listdir

    def removed_first(path: Path) -> list[str]:
        if path == directory.root / victim:
            shutil.rmtree(path)
        return listed(path)

    monkeypatch.setattr(os, "listdir", removed_first)
    left = [20] if victim == "a1/s10" else []
    assert [key.step for key in committed(directory)] == left
    assert [key.step for key in directory.present()] == left
    assert directory.sweep() == 0


def every_call(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    """Every call that changes the disk goes by `before`."""
    for module, name in [(os, n) for n in ("open", "write", "fsync", "posix_fallocate", "posix_fadvise")] + [
        (Path, n) for n in ("rename", "mkdir", "unlink")
    ]:
        real = getattr(module, name)

        def wrapped(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            before(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapped)


def test_a_kill_before_any_write_leaves_the_checkpoint_before_and_nothing_half(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(directory, tmp_path, 5)
    killed = 0
    for kill_at in range(1, 100):
        calls = 0

        def before(name: str, kill_at: int = kill_at) -> None:
            nonlocal calls
            calls += 1
            if calls == kill_at:
                raise Killed(name)

        staged = stage(tmp_path / "memory", 1, 10, 0, Mesh.of({"dp": 1}))
        with Reader(staged.path, staged.key) as reader, monkeypatch.context() as patch:
            every_call(patch, before)
            try:
                directory.store(reader, run="r", node="n", pace=lambda _: None)
            except Killed:
                killed += 1
            else:
                break
        found = committed(directory)
        assert ShardKey(1, 5, 0) in found
        for manifest, path in directory.manifests("r"):
            with Reader(path, manifest.key) as shard:
                checksum.verify(manifest, shard.data)
        directory.sweep()
        assert not list(directory.root.rglob("*.part")) + list(directory.root.rglob("*.tmp"))
        assert {path.suffix for path in directory.path(KEY).parent.glob("*")} in (set(), {".json", ".shard"})
        directory.delete(KEY)
    assert killed > 8
    assert committed(directory) == [ShardKey(1, 5, 0), KEY] or committed(directory) == [KEY, ShardKey(1, 5, 0)]


def test_a_full_disk_says_so_and_leaves_nothing(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    staged = stage(tmp_path / "memory", 1, 10, 0, Mesh.of({"dp": 1}))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with Reader(staged.path) as reader, pytest.raises(OutOfSpace, match="no room for a shard of"):
        directory.store(reader, run="r", node="n", pace=lambda _: None)
    assert [path for path in directory.root.rglob("*") if path.is_file()] == []


def test_a_flipped_byte_is_found_by_either_checksum(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for algorithm in (checksum.best(), checksum.CRC32):
        monkeypatch.setattr(checksum, "best", lambda algorithm=algorithm: algorithm)
        manifest = store(directory, tmp_path)
        assert manifest.checksum == algorithm.name
        raw = bytearray(directory.path(KEY).read_bytes())
        checksum.verify(manifest, memoryview(raw))
        for at in (0, 4097, len(raw) - 1):
            raw[at] ^= 1
            with pytest.raises(IntegrityError, match="is corrupt in bytes"):
                checksum.verify(manifest, memoryview(raw))
            raw[at] ^= 1


def test_the_digest_is_what_the_services_compute(directory: Directory, tmp_path: Path) -> None:
    from holdfast.replicator.checksum import require_consistent

    assert checksum.best().name == "crc32c"
    require_consistent(store(directory, tmp_path))


def test_an_unknown_checksum_is_refused_by_name() -> None:
    with pytest.raises(IncompatibleVersion, match="blake3"):
        checksum.named("blake3")


def test_the_attempt_is_durable_before_it_saves_and_a_damaged_record_is_an_error(directory: Directory) -> None:
    assert directory.identity() is None
    directory.begin(Identity("r", 7))
    assert directory.identity() == Identity("r", 7)
    (directory.root / "run.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"run\.json is damaged"):
        directory.identity()


def test_the_lock_is_shared_by_one_launch_and_refused_to_another(directory: Directory) -> None:
    mine = [Lock(directory.root, "launch-1", 0.0) for _ in range(3)]
    with pytest.raises(Conflict, match="another run is using"):
        Lock(directory.root, "launch-2", 0.0)
    for lock in mine:
        lock.close()
    Lock(directory.root, "launch-2", 0.0).close()


def test_a_forked_child_does_not_keep_the_lock(directory: Directory) -> None:
    lock = Lock(directory.root, "launch-1", 0.0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # lives until the test is done with it
        os._exit(0)
    lock.close()
    Lock(directory.root, "launch-2", 1.0).close()
    os.close(write)
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
