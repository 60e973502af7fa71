"""What was opened for a restore is handed out or let go of, whoever gives up and when; a leaked lock costs saves."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, HoldfastError, Unavailable, Unrestorable
from holdfast.domain.generations import RankRestore, ShardKey, ShardSource
from holdfast.domain.mesh import Mesh
from holdfast.domain.replication import Configure, Stage, TroubleKind
from holdfast.replicator import engine as engine_module
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.engine import Engine, Tiers
from holdfast.replicator.sharing import Arrivals
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.stager import Stager
from holdfast.replicator.store_sync import OpenStores, StoreSync
from holdfast.replicator.threads import Pace, Threads
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.tiers.warm import WarmFiles
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.frames import Limits
from holdfast.shards import Image, ImageSet, Plan, Skipped, Staged, TensorSpec

pytestmark = pytest.mark.anyio

JOB, NBYTES = "llm", 64 << 10
PLAN = Plan((TensorSpec("w", "uint8", (NBYTES,), NBYTES),))
OLD, NEW = ShardKey(1, 10, 0), ShardKey(1, 20, 0)
OTHER = ShardKey(1, 20, 1)


def nothing(image: Image) -> None:
    pass


def save(images: ImageSet, key: ShardKey) -> Staged | Skipped:
    return images.stage(PLAN, key.attempt, key.step, key.rank, {"dp": 2}, nothing, b"")


class SlowImages(ImageTier):
    """Opening takes until `go` is set; `opening` says that somebody is at it."""

    def __init__(self, root: Path, checksummer: Checksummer) -> None:
        super().__init__(root / "memory", "a", checksummer, overflow=root / "disk")
        self.opening, self.go = threading.Event(), threading.Event()
        self.go.set()

    def open(self, job: str, key: ShardKey) -> OpenShard:
        shard = super().open(job, key)
        self.opening.set()
        assert self.go.wait(60)
        return shard


class Node:
    """Two ranks; rank 0 has saved steps 10 and 20, rank 1 step 20. Generation 1 is configured."""

    def __init__(self, root: Path, threads: Threads) -> None:
        self.root = root
        checksummer = Checksummer(1)
        self.slow = SlowImages(root, checksummer)
        staged = FileTier("memory", root / "memory", "staged", warm=WarmFiles(root / "memory"))
        self.engine = Engine(Tiers(self.slow, staged, FileTier("disk", root / "disk")), root / "disk", threads)
        client = Client(Limits(60, 60, 1), OpenSockets())
        store_sync = StoreSync(self.engine, OpenStores(), Pace(0), client, "a", Arrivals(1.0))
        self.stager = Stager(self.engine, client, store_sync, checksummer, "a")
        self.images = ImageSet(root / "memory" / JOB / "w0")
        for key in (OLD, NEW):
            save(self.images, key)
        other = ImageSet(root / "memory" / JOB / "w1")
        save(other, OTHER)
        other.close()

    @property
    def config(self) -> Configure:
        return Configure(JOB, 1, 1, Mesh.of({"dp": 2}), (0, 1), (), 2, "secret")

    async def configure(self, generation: int) -> None:
        await self.engine.configure(Configure(JOB, generation, generation, Mesh.of({"dp": 2}), (0, 1), (), 2, "secret"))

    async def stage(self, *keys: ShardKey) -> None:
        restores = tuple(RankRestore(key.rank, key, "", ()) for key in keys)
        await self.stager.stage(Stage(JOB, restores, 60.0))

    def locked(self) -> list[Path]:
        return [path for path in sorted((self.root / "memory" / JOB).glob("w*/*.image")) if not is_free(path)]


def is_free(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


@asynccontextmanager
async def a_node(root: Path) -> AsyncIterator[Node]:
    threads = Threads(urgent=2, transfers=1, background=1)
    try:
        node = Node(root, threads)
        await node.configure(1)
        yield node
        node.images.close()
    finally:
        threads.close()


@pytest.fixture(params=["by the server", "by a scope"])
def by_server(request: pytest.FixtureRequest) -> bool:
    """A gRPC server cancels the task of a call whose client has given up; our own code cancels scopes."""
    return bool(request.param == "by the server")


async def test_a_call_that_is_given_up_while_a_shard_is_opened_leaves_no_lock(tmp_path: Path, by_server: bool) -> None:
    async with a_node(tmp_path) as node:
        node.slow.go.clear()
        scope = anyio.CancelScope()

        async def call() -> None:
            with scope:
                await node.stage(NEW)

        task = asyncio.create_task(call())
        await asyncio.to_thread(node.slow.opening.wait)
        task.cancel() if by_server else scope.cancel()
        await asyncio.sleep(0)
        task.cancel() if by_server else scope.cancel()  # more than once
        node.slow.go.set()
        with suppress(asyncio.CancelledError):
            await task
        assert node.locked() == []
        assert node.engine.jobs[JOB].pins == {}
        assert not node.engine.jobs[JOB].wanted


async def test_a_call_may_be_given_up_at_any_moment(tmp_path: Path, by_server: bool) -> None:
    """After n turns of the loop, for every n until it is through."""
    async with a_node(tmp_path) as node:
        await node.engine.refresh(node.engine.jobs[JOB])  # its threads look at images by themselves
        through, turns = 0, 0
        while through < 3:
            scope = anyio.CancelScope()

            async def call(scope: anyio.CancelScope = scope) -> bool:
                with scope:
                    await node.stage(NEW, OTHER)
                    return True
                return False

            task = asyncio.create_task(call())
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.done():
                through += 1
            task.cancel() if by_server else scope.cancel()
            done = False
            with suppress(asyncio.CancelledError):
                done = await task
            pinned = {pin.path for pin in node.engine.jobs[JOB].pins.values()}
            assert set(node.locked()) == pinned, f"after {turns} turns"
            assert bool(pinned) == done
            node.engine.jobs[JOB].release_pins()
            turns += 1


async def test_what_an_overtaken_call_opens_is_not_held_against_the_newer_generation(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        node.slow.go.clear()
        task = asyncio.create_task(node.stage(OLD))
        await asyncio.to_thread(node.slow.opening.wait)
        await node.configure(2)
        node.slow.go.set()
        with pytest.raises(Conflict, match="overtaken"):
            await task
        await node.stage(NEW)
        assert [path.name for path in node.locked()] == ["b.image"], "of the newer generation's step only"
        assert node.engine.jobs[JOB].restored == (1, 20)


async def test_a_restore_that_fails_keeps_nothing_locked(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        with pytest.raises(Unrestorable):
            await node.stage(NEW, ShardKey(1, 20, 7))
        assert node.locked() == []


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EMFILE, Unavailable),
        (errno.EROFS, Unavailable),
        (errno.ECONNRESET, Unrestorable),
        (errno.EIO, Unrestorable),
    ],
)
async def test_a_node_that_cannot_restore_anything_does_not_blame_the_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[HoldfastError]
) -> None:
    """Seen in a soak: a node without descriptors had the job passed over eleven good steps, one after the other."""

    def fetch(*_: object) -> Path:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise Unavailable(f"b: {error}") from error

    async with a_node(tmp_path) as node:
        monkeypatch.setattr(Client, "fetch", fetch)
        key = ShardKey(1, 20, 7)
        restore = RankRestore(7, key, "", (ShardSource("b", "127.0.0.1:1", ""),))
        with pytest.raises(Unavailable, match=os.strerror(number)) as raised:
            await node.stager.stage(Stage(JOB, (restore,), 60.0))
        assert type(raised.value) is kind


async def test_a_second_answer_lets_go_of_the_step_of_the_first(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        await node.stage(OLD)
        await node.stage(NEW)
        assert [path.name for path in node.locked()] == ["b.image"]


async def test_ranks_that_try_to_save_have_restored_and_get_their_images_back(tmp_path: Path) -> None:
    """Else a rank whose only other image is locked never saves, and what is locked waits for its save."""
    async with a_node(tmp_path) as node:
        node.images.close()
        await node.stage(NEW, OTHER)
        node.engine.jobs[JOB].pin({})
        images = ImageSet(tmp_path / "memory" / JOB / "w0", restored=CheckpointId(1, 20))
        with node.slow.open(JOB, OLD):  # somebody else reads the other one
            assert isinstance(save(images, ShardKey(2, 30, 0)), Skipped)
        node.engine.missed(JOB, 1, 0)
        assert len(node.locked()) == 2, "rank 1 may still be restoring"
        node.engine.missed(JOB, 0, 1)  # of another generation
        assert len(node.locked()) == 2
        node.engine.missed(JOB, 1, 1)
        assert node.locked() == []
        assert isinstance(save(images, ShardKey(2, 40, 0)), Staged)
        images.close()


async def test_a_lock_is_not_old_because_nobody_looked(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        await node.stage(OTHER)
        job = node.engine.jobs[JOB]
        with node.slow.open(JOB, OLD):
            await node.engine._look_at_locks(job)
            (since,) = job.locked.values()
            job.locked = dict.fromkeys(job.locked, since - 600.0)
            node.engine.unwatched()
            await node.engine._look_at_locks(job)
            assert job.troubles.all() == ()


async def test_an_image_that_stays_locked_without_a_restore_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "LOCKED_MAX_S", 0.0)
    async with a_node(tmp_path) as node, anyio.create_task_group() as tasks:
        job = node.engine.jobs[JOB]

        async def until(named: int) -> None:
            while len(job.troubles.all()) != named:
                await node.engine.changed.wait()

        await node.stage(OTHER)
        tasks.start_soon(node.engine.watch_locks, 0.001)
        shard = node.slow.open(JOB, OLD)
        with anyio.fail_after(60):
            await until(1)
        (trouble,) = job.troubles.all()
        assert (trouble.kind, Path(trouble.place).name) == (TroubleKind.IMAGE_LOCKED, "a.image")
        assert f"this replicator (pid {os.getpid()})" in trouble.reason
        shard.close()
        with anyio.fail_after(60):
            await until(0)
        tasks.cancel_scope.cancel()
