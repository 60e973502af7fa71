"""How often the mover plans, and what it does with steps that begin together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from data_plane import JOB, TOKEN, saved
from waiting import wait_until_async

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.domain.replication import Configure
from holdfast.replicator import mover as module
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.engine import Engine, Tiers
from holdfast.replicator.jobs import Job
from holdfast.replicator.mover import Mover
from holdfast.replicator.plan import plan
from holdfast.replicator.schedule import PAUSE_MAX_S
from holdfast.replicator.sharing import Arrivals
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.store_sync import OpenStores, StoreSync
from holdfast.replicator.threads import Pace, Threads
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.view import CopyToDisk, Held, Step, Tier, View

pytestmark = pytest.mark.anyio

STEPS = range(10, 70, 10)


@asynccontextmanager
async def moving(root: Path) -> AsyncIterator[tuple[Engine, Mover]]:
    """A node that has six steps on its disk and needs two of them."""
    memory, disk = root / "memory", root / "disk"
    checksummer, threads = Checksummer(1), Threads(urgent=2, transfers=1, background=4)
    images = ImageTier(memory, "a", checksummer, overflow=disk)
    tiers = Tiers(images=images, staged=FileTier("memory", memory, "staged"), disk=FileTier("disk", disk))
    for step in STEPS:
        with saved(root / f"saved-{step}", step, 1 << 12) as shard:
            tiers.disk.put(JOB, shard, Pace(0))
    engine, client = Engine(tiers, disk, threads), Client(Limits(), OpenSockets())
    store_sync = StoreSync(engine, OpenStores(), Pace(0), client, "a", Arrivals(0))
    await engine.start()
    try:
        yield engine, Mover(engine, client, checksummer, store_sync, disk_pace=Pace(0), peer_pace=Pace(0))
    finally:
        threads.close()
        checksummer.close()


async def configure(engine: Engine) -> None:
    await engine.configure(Configure(JOB, 1, 1, Mesh.of({"dp": 1}), (0,), (), 2, TOKEN))
    engine.jobs[JOB].saved_by_all = CheckpointId(1, STEPS[-1])


def counting(monkeypatch: pytest.MonkeyPatch) -> list[View]:
    plans: list[View] = []

    def counted(view: View) -> tuple[Step, ...]:
        plans.append(view)
        return plan(view)

    monkeypatch.setattr(module, "plan", counted)
    return plans


async def test_deletions_begin_together_and_one_that_fails_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, stuck = FileTier.delete, ShardKey(1, 20, 0)

    def delete(tier: FileTier, job: str, key: ShardKey) -> None:
        if key == stuck:
            raise OSError("a file of another user")
        real(tier, job, key)

    monkeypatch.setattr(FileTier, "delete", delete)
    plans = counting(monkeypatch)
    async with moving(tmp_path) as (engine, mover), anyio.create_task_group() as tasks:
        await configure(engine)
        tasks.start_soon(mover.run)
        left = {STEPS[-2], STEPS[-1], stuck.step}
        await wait_until_async(
            lambda: {each.step for each in engine.tiers.disk.shards(JOB)} == left, description="the deletions"
        )
        assert {held.key.step for held in engine.jobs[JOB].held} == {STEPS[-2], STEPS[-1]}
        await mover.idle(JOB)
        before = len(plans)
        tasks.cancel_scope.cancel()
    assert sum(1 for view in plans[:before] if len(view.held) > 2) == 1, "one plan has named all of them"


async def test_a_restore_that_begins_meanwhile_keeps_its_shard(tmp_path: Path) -> None:
    wanted = ShardKey(1, 20, 0)
    async with moving(tmp_path) as (engine, mover):
        await configure(engine)
        job = engine.jobs[JOB]
        steps = plan(job.view())
        with job.wanting([wanted]):  # after the plan
            lane, together = next(iter(mover._schedule.begin(JOB, steps).items()))
            await mover._carry_out(job, together, lane)
        assert {each.step for each in engine.tiers.disk.shards(JOB)} == {wanted.step, STEPS[-2], STEPS[-1]}
        assert Held(Tier.DISK, wanted) in job.held


async def test_there_is_no_plan_for_a_job_that_has_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = counting(monkeypatch)
    async with moving(tmp_path) as (engine, mover), anyio.create_task_group() as tasks:
        await configure(engine)
        other = engine.job("another")
        tasks.start_soon(mover.run)
        await wait_until_async(lambda: len(engine.jobs[JOB].held) == 2, description="the deletions")
        await mover.idle(JOB)
        for number in range(5):
            of_others = sum(1 for view in plans if not view.attempt)
            other.disk_full = not other.disk_full
            engine.notify()
            await wait_until_async(
                lambda of_others=of_others: sum(1 for view in plans if not view.attempt) > of_others,  # type: ignore[misc]
                description=f"plan {number} of the other job",
            )
        settled = [view for view in plans if view.attempt and len(view.held) == 2]
        assert len(settled) == 1
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("tier", [Tier.IMAGE, Tier.STAGED])
async def test_a_copy_whose_source_is_lost_is_planned_once(
    tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure or an operator may take files out of the memory tier of a replicator that runs on."""
    lost = ShardKey(1, 90, 0)
    tries: list[ShardKey] = []
    real = Mover._copy

    async def copy(mover: Mover, job: Job, key: ShardKey) -> None:
        tries.append(key)
        assert len(tries) < 5, "it is tried again and again"
        await real(mover, job, key)

    monkeypatch.setattr(Mover, "_copy", copy)
    async with moving(tmp_path) as (engine, mover), anyio.create_task_group() as tasks:
        await configure(engine)
        job = engine.jobs[JOB]
        with saved(tmp_path / "elsewhere", lost.step, 1 << 12) as shard:
            job.held[Held(tier, lost)] = shard.manifest
        tasks.start_soon(mover.run)
        await wait_until_async(lambda: Held(tier, lost) not in job.held, description="the loss is noticed")
        await mover.idle(JOB)
        assert tries == [lost]
        assert lost not in {record.key for record in job.inventory().shards}
        tasks.cancel_scope.cancel()


async def test_a_copy_whose_source_stays_locked_is_tried_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer may have been stopped for good."""
    pauses: list[float] = []
    held = Held(Tier.DISK, ShardKey(1, 60, 0))

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    def locked(tier: FileTier, job: str, key: ShardKey) -> OpenShard:
        raise Conflict("being written")

    async with moving(tmp_path) as (engine, mover):
        await configure(engine)
        job = engine.jobs[JOB]
        monkeypatch.setattr(FileTier, "open", locked)
        monkeypatch.setattr(anyio, "sleep", sleep)
        step = CopyToDisk(held.key, "a test")
        for _ in range(12):
            (lane,) = mover._schedule.begin(JOB, [step])
            await mover._carry_out(job, [step], lane)
        assert held in job.held, "a lock is no loss"
    assert pauses[0] == module.LOST_RACE_PAUSE_S
    assert sum(pauses) > 12
    assert max(pauses) <= PAUSE_MAX_S
