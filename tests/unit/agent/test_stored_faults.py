"""A full disk and a flipped bit, for real: a small file system that is filled, and a shard whose checksums find the bit."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import anyio.lowlevel
import pytest
from stored import shard
from waiting import wait_until_async

from holdfast.agent.injection.faults import Faults
from holdfast.agent.injection.stored_faults import FILLER, fill, flip_bit, remove_filler, require_fillable
from holdfast.agent.workers.pool import WorkerPool
from holdfast.domain.errors import Conflict, IntegrityError
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Inject
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.tiers.files import FileTier
from holdfast.shards import Manifest

MIB = 2**20
MESH = Mesh.of({"dp": 2})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", path], check=True)


def free(disk: Path) -> int:
    return shutil.disk_usage(disk).free


@asynccontextmanager
async def agent(disk: Path, *, fill_bytes_max: int = 16 * MIB) -> AsyncIterator[Faults]:
    generation = SimpleNamespace(order=SimpleNamespace(chaos=True), workers={1: SimpleNamespace(pid=77, alive=True)})
    pool = cast(WorkerPool, SimpleNamespace(running_generation=lambda job, number: generation))
    faults = Faults(
        pool, disk / "kmsg", disk_dir=disk, memory_dir=disk / "memory", agent_dir=disk, fill_bytes_max=fill_bytes_max
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(faults.run)
        await anyio.lowlevel.checkpoint()
        yield faults
        tasks.cancel_scope.cancel()


def order(kind: str, for_s: float = 60.0) -> Inject:
    return Inject("gpt", 3, kind, 1, for_s, 0, time.time() + 60.0, "op-1")


# ---------------------------------------------------------------- a full disk


@pytest.mark.anyio
async def test_the_disk_is_full_until_the_time_is_over(disk: Path) -> None:
    async with agent(disk) as faults:
        assert await faults.inject(order("disk_full", 3.0)) == f"{disk} is full for 3 s"
        await wait_until_async(lambda: free(disk) < 4096, description="the disk is full")
        with pytest.raises(OSError, match="No space left"):
            (disk / "shard").write_bytes(b"x" * 4096)
        with pytest.raises(Conflict, match="is being filled by another injected fault"):
            await faults.inject(order("disk_full"))
        await wait_until_async(lambda: not (disk / FILLER).exists(), description="room is made again")
    assert free(disk) > 7 * MIB


@pytest.mark.anyio
async def test_it_stays_full_when_others_delete_files(disk: Path) -> None:
    (disk / "old").write_bytes(b"x" * MIB)
    async with agent(disk) as faults:
        await faults.inject(order("disk_full"))
        await wait_until_async(lambda: free(disk) < 4096, description="the disk is full")
        (disk / "old").unlink()
        assert free(disk) >= MIB
        await wait_until_async(lambda: free(disk) < 4096, description="it is full again")


@pytest.mark.anyio
async def test_it_ends_with_the_agent_and_at_the_start_of_the_next_one(disk: Path) -> None:
    async with agent(disk) as faults:
        await faults.inject(order("disk_full"))
        await wait_until_async(lambda: free(disk) < 4096, description="the disk is full")
    assert not (disk / FILLER).exists()
    fill(disk, 16 * MIB)  # by an agent that was killed
    assert free(disk) < 4096
    async with agent(disk):
        await wait_until_async(lambda: not (disk / FILLER).exists(), description="room is made at the start")


@pytest.mark.anyio
async def test_more_than_the_bound_is_not_filled(disk: Path) -> None:
    async with agent(disk, fill_bytes_max=4 * MIB) as faults:
        with pytest.raises(Conflict, match=r"GiB are free .*HOLDFAST_FAULT_FILL_GIB_MAX"):
            await faults.inject(order("disk_full"))
        assert not (disk / FILLER).exists()
    assert fill(disk, 4 * MIB) <= 4 * MIB
    assert remove_filler(disk)
    assert not remove_filler(disk)
    with pytest.raises(Conflict, match="cannot be filled"):
        require_fillable(disk / "missing", MIB)


# ---------------------------------------------------------------- a flipped bit


def store(tier: FileTier, *keys: ShardKey) -> None:
    for key in keys:
        data, manifest = shard(key, MESH, 7)
        with tier.receive("gpt", manifest) as incoming:
            incoming.write_all(
                iter([memoryview(data)[span.offset : span.offset + span.size] for span in manifest.spans])
            )
            incoming.commit()


def broken(tier: FileTier, root: Path) -> list[ShardKey]:
    """Shards that do not pass the verification of a restore."""
    found = []
    with closing(Checksummer(1)) as checksummer:
        for path in sorted(root.rglob("rank-*.shard")):
            manifest = Manifest.read(path.with_suffix(".json"))
            try:
                with tier.open("gpt", manifest.key) as opened:
                    checksummer.verify(opened.manifest, opened.data)
            except IntegrityError:
                found.append(manifest.key)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_checksums_find_the_bit_in_the_newest_shard_of_the_rank(tmp_path: Path, seed: int) -> None:
    tier = FileTier("disk", tmp_path / "disk")
    keys = [ShardKey(1, 10, 0), ShardKey(1, 10, 1), ShardKey(1, 20, 0), ShardKey(1, 20, 1)]
    store(tier, *keys)
    did = flip_bit(tmp_path / "disk", tmp_path / "memory", "gpt", 1, random.Random(seed))
    assert "flipped" in did
    assert str(tier.path("gpt", ShardKey(1, 20, 1))) in did
    assert broken(tier, tmp_path) == [ShardKey(1, 20, 1)]


def test_a_copy_in_memory_is_taken_where_the_disk_has_none(tmp_path: Path) -> None:
    tier = FileTier("memory", tmp_path / "memory", "staged")
    store(tier, ShardKey(1, 10, 0))
    flip_bit(tmp_path / "disk", tmp_path / "memory", "gpt", 1, random.Random(1))
    assert broken(tier, tmp_path) == [ShardKey(1, 10, 0)]


def test_without_a_stored_shard_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="no checkpoint of gpt is stored on this node yet"):
        flip_bit(tmp_path / "disk", tmp_path / "memory", "gpt", 1, random.Random(1))
