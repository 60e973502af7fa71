"""A tier that takes nothing is skipped and said; the save goes on to the others."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from replicator_node import JOB, fill_up, small_tmpfs

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import OutOfSpace
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.domain.replication import Configure, TroubleKind
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.engine import Engine, Tiers
from holdfast.replicator.plan import plan
from holdfast.replicator.threads import Pace, Threads
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.tiers.warm import WarmFiles
from holdfast.replicator.troubles import QUIET_S, Troubles
from holdfast.replicator.view import Copies, CopyToDisk, Delete, Held, Push, Tier, View
from holdfast.shards import Image, ImageSet, Manifest, Plan, Skipped, Staged, TensorSpec
from holdfast.shards.manifest import temporary_of

NBYTES = 256 << 10
PLAN = Plan((TensorSpec("w", "uint8", (NBYTES,), NBYTES),))
KEY = ShardKey(1, 10, 0)


def nothing(image: Image) -> None:
    pass


def save(images: ImageSet, step: int) -> Staged | Skipped:
    return images.stage(PLAN, 1, step, 0, {"dp": 2}, nothing, b"rest")


@asynccontextmanager
async def an_engine(root: Path) -> AsyncIterator[Engine]:
    threads = Threads(urgent=1, transfers=1, background=1)
    try:
        images = ImageTier(root / "memory", "a", Checksummer(1), overflow=root / "disk")
        staged = FileTier("memory", root / "memory", "staged", warm=WarmFiles(root / "memory"))
        engine = Engine(Tiers(images, staged, FileTier("disk", root / "disk")), root / "disk", threads)
        await engine.configure(Configure(JOB, 1, 1, Mesh.of({"dp": 2}), (0,), (), 2, "secret"))
        yield engine
    finally:
        threads.close()


def refusing(monkeypatch: pytest.MonkeyPatch, code: int, which: Callable[[str], bool]) -> None:
    """A file layer that opens nothing for writing where `which` says so."""
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and which(str(path)):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)


def test_the_room_of_a_manifest_is_taken_with_the_image_and_lasts_for_every_save(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    with small_tmpfs(memory, "2m"):
        images = ImageSet(memory / JOB / "w0")
        assert images.prepare(PLAN) == ""
        filling = fill_up(memory)
        tier = ImageTier(memory, "a", Checksummer(1), overflow=tmp_path / "disk")
        for step in range(10, 70, 10):
            assert isinstance(save(images, step), Staged)
            (seen,) = (each for each in tier.scan(JOB) if each.header.stamp.key.step == step)
            manifest = tier.commit(JOB, seen)
            assert tier.unwritten(JOB) == {}
            assert Manifest.read(seen.path.with_name(f"{seen.path.name}.json")) == manifest
        images.close()
        filling.unlink()


def test_an_image_without_room_for_its_manifest_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, errno.ENOSPC, lambda path: path.endswith(".json.tmp"))
    images = ImageSet(tmp_path / "w0")
    saved = save(images, 10)
    assert isinstance(saved, Skipped)
    assert "no room for the manifest" in saved.reason
    assert list((tmp_path / "w0").iterdir()) == []


def test_a_shard_without_room_for_its_manifest_is_refused_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = ImageSet(tmp_path / "memory" / JOB / "w0")
    save(images, 10)
    tier = ImageTier(tmp_path / "memory", "a", Checksummer(1), overflow=tmp_path / "disk")
    (seen,) = tier.scan(JOB)
    tier.commit(JOB, seen)
    disk = FileTier("disk", tmp_path / "disk")
    refusing(monkeypatch, errno.ENOSPC, lambda path: path.endswith(".json.tmp"))
    paced: list[int] = []
    with tier.open(JOB, KEY) as shard, pytest.raises(OutOfSpace):
        disk.put(JOB, shard, paced.append)
    assert paced == []


def test_what_a_given_up_transfer_reserved_is_given_back(tmp_path: Path) -> None:
    images = ImageSet(tmp_path / "memory" / JOB / "w0")
    save(images, 10)
    tier = ImageTier(tmp_path / "memory", "a", Checksummer(1), overflow=tmp_path / "disk")
    (seen,) = tier.scan(JOB)
    manifest = tier.commit(JOB, seen)
    disk = FileTier("disk", tmp_path / "disk")
    disk.incoming(JOB, manifest).close()
    reserved = temporary_of(disk.path(JOB, KEY).with_suffix(".json"))
    assert reserved.stat().st_size > len(manifest.encode())
    disk.drop_unfinished(JOB, CheckpointId(1, 20))
    assert not reserved.exists()


@pytest.mark.anyio
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
async def test_a_save_goes_on_without_its_manifest_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    images = ImageSet(tmp_path / "memory" / JOB / "w0")
    save(images, 10)
    async with an_engine(tmp_path) as engine:
        job = engine.jobs[JOB]
        with monkeypatch.context() as broken:
            refusing(broken, code, lambda path: ".image.json" in path)
            await engine.refresh(job)
            assert set(job.held) == {Held(Tier.IMAGE, KEY)}
            with engine.tiers.images.open(JOB, KEY) as shard:
                engine.tiers.disk.put(JOB, shard, Pace(0))
            (trouble,) = job.troubles.all()
            assert (trouble.kind, trouble.place) == (TroubleKind.TIER_FAILS, "memory")
            assert os.strerror(code) in trouble.reason
        await engine.refresh(job)
        assert job.troubles.all() == ()
    images.close()
    async with an_engine(tmp_path) as engine:  # the next life
        await engine.start()
        assert {held.tier for held in engine.jobs[JOB].held} == {Tier.IMAGE, Tier.DISK}


@pytest.mark.parametrize("which", ["full", "failing"])
def test_a_disk_that_takes_nothing_is_skipped_for_the_peer(which: str) -> None:
    key, older = Held(Tier.IMAGE, KEY), Held(Tier.DISK, ShardKey(1, 5, 0))
    held = Copies.of((key, older))
    before = View(1, (0,), 2, 2, ("b",), held)
    assert [type(step) for step in plan(before)] == [CopyToDisk, Push]
    takes_nothing = View(1, (0,), 2, 2, ("b",), held, disk_full=which == "full", disk_fails=which == "failing")
    (step,) = plan(takes_nothing)
    assert isinstance(step, Push)
    assert step.key == KEY


def test_a_failing_disk_is_no_reason_to_delete() -> None:
    held = tuple(Held(Tier.DISK, ShardKey(1, step, 0)) for step in range(10, 60, 10))
    pushed = frozenset({(ShardKey(1, 50, 0), "b")})
    given = View(
        1, (0,), 2, 2, ("b",), Copies.of(held), pushed=pushed, saved_by_all=CheckpointId(1, 20), disk_fails=True
    )
    assert not [step for step in plan(given) if type(step) is not Push and "superseded" not in step.reason]
    deleted = {step.key.step for step in plan(given) if isinstance(step, Delete)}
    assert deleted == {10}


def test_a_trouble_that_comes_and_goes_is_said_once() -> None:
    now = [1000.0]
    troubles = Troubles(JOB, lambda: now[0])
    assert troubles.begin(TroubleKind.TIER_FAILS, "disk", "full")
    assert not troubles.begin(TroubleKind.TIER_FAILS, "disk", "full")
    (first,) = troubles.all()
    assert troubles.end(TroubleKind.TIER_FAILS, "disk")
    assert not troubles.end(TroubleKind.TIER_FAILS, "disk")
    now[0] += QUIET_S / 2
    assert troubles.begin(TroubleKind.TIER_FAILS, "disk", "full again")
    assert troubles.all() == (first,)
    troubles.end(TroubleKind.TIER_FAILS, "disk")
    now[0] += QUIET_S
    troubles.begin(TroubleKind.TIER_FAILS, "disk", "much later")
    assert troubles.all()[0].since == now[0]
