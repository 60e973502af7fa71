"""The agent's replicator dies: what was asked of it is asked of its successor, and what it held is there again, or is not."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import psutil
import pytest
from waiting import wait_until_async

from holdfast.agent import replicator as module
from holdfast.agent.replicator import LocalReplicator, ReplicatorPlaces
from holdfast.domain.generations import RankRestore, ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Inventory
from holdfast.domain.replication import Configure, Stage
from holdfast.shards import Image, ImageSet, Plan, Staged, TensorSpec

pytestmark = pytest.mark.anyio

JOB, KEY = "llm", ShardKey(1, 10, 0)
PLAN = Plan((TensorSpec("w", "uint8", (4096,), 4096),))


def nothing(image: Image) -> None:
    pass


def kill(root: Path) -> None:
    """The replicator of `running(root)`. That of an earlier test may still be ending."""

    def is_it(child: psutil.Process) -> bool:
        try:
            return child.environ().get("HOLDFAST_DISK_DIR") == str(root / "disk")
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            return False

    (child,) = (each for each in psutil.Process().children() if is_it(each))
    child.kill()


def places_in(root: Path) -> ReplicatorPlaces:
    return ReplicatorPlaces(
        node="a", agent_dir=root / "agent", memory_dir=root / "memory", disk_dir=root / "disk", listen="127.0.0.1:0"
    )


@asynccontextmanager
async def running(root: Path, heard: Callable[[Inventory], None]) -> AsyncIterator[LocalReplicator]:
    images = ImageSet(root / "memory" / JOB / "w0")
    assert isinstance(images.stage(PLAN, 1, 10, 0, {"dp": 1}, nothing, b""), Staged)
    images.close()
    root.joinpath("agent").mkdir()
    replicator = LocalReplicator(places_in(root), os.environ, heard, lambda job, trouble: None)
    async with anyio.create_task_group() as tasks:
        await tasks.start(replicator.run)
        tasks.start_soon(replicator.withdraw_when_away)
        await replicator.configure(Configure(JOB, 1, 1, Mesh.of({"dp": 1}), (0,), (), 2, "secret"))
        await wait_until_async(lambda: bool(replicator.inventories), description="what it holds")
        yield replicator
        tasks.cancel_scope.cancel()


async def test_what_is_asked_while_it_dies_is_answered_by_its_successor(tmp_path: Path) -> None:
    async with running(tmp_path, lambda inventory: None) as replicator:
        for _ in range(2):
            kill(tmp_path)
            (staged,) = await replicator.stage(Stage(JOB, (RankRestore(0, KEY, "", ()),), 60.0))
            assert staged.shard == KEY
        assert replicator.inventories, "a short absence changes nothing"
        assert replicator.inventories[0].shards


async def test_it_has_started_when_it_has_told_what_it_holds_of_every_job(tmp_path: Path) -> None:
    """The agent's first session announces these jobs, and the supervisor waits for no other."""
    heard: list[str] = []
    names = {f"ended-{number}" for number in range(8)}
    for name in names:
        with closing(ImageSet(tmp_path / "memory" / name / "w0")) as images:
            assert isinstance(images.stage(PLAN, 1, 10, 0, {"dp": 1}, nothing, b""), Staged)
    (tmp_path / "agent").mkdir()
    replicator = LocalReplicator(
        places_in(tmp_path), os.environ, lambda inventory: heard.append(inventory.job), lambda job, trouble: None
    )
    before = replicator.inventories
    assert before is None
    async with anyio.create_task_group() as tasks:
        await tasks.start(replicator.run)
        assert replicator.inventories is not None
        assert {each.job for each in replicator.inventories} == names
        assert set(heard) == names
        tasks.cancel_scope.cancel()


async def test_what_it_holds_is_withdrawn_while_it_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Inventory] = []
    async with running(tmp_path, reported.append) as replicator:
        monkeypatch.setattr(module, "AWAY_S", 0.0)
        kill(tmp_path)
        await wait_until_async(lambda: Inventory(JOB, ()) in reported, description="nothing to be held")
        assert replicator.inventories is None or reported[-1].shards, "a session that begins now announces nothing"
        await wait_until_async(lambda: reported[-1].shards, description="it to be back")
        await wait_until_async(lambda: replicator.inventories, description="all that it holds")
        assert replicator.inventories == (reported[-1],)
