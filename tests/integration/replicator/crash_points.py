"""Dies at every operation on files: `python crash_points.py SCENARIO DIRECTORY` forks a child for the n-th operation, for every
n, which is killed by SIGKILL right before it (and, for writes, half-way through it); then looks at what the next life finds.

A program of its own and not a test: it forks, and a test process has threads.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.domain.generations import ShardKey, ShardSource
from holdfast.replicator.bucket import Bucket
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.sharing import Arrivals
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.tiers.pending_commit import PendingCommit
from holdfast.replicator.tiers.warm import WarmFiles
from holdfast.replicator.transport import frames, lanes
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.transport.intake import Intake
from holdfast.replicator.transport.server import Server
from holdfast.replicator.view import Tier
from holdfast.replicator.wanted import Wanted
from holdfast.shards import ImageSet, Plan, Staged, TensorSpec
from holdfast.stores import layout, open_store, unpaced

JOB = "llm"
NBYTES = 256 << 10
PLAN = Plan((TensorSpec("w", "uint8", (NBYTES,), NBYTES),))
RANKS = (0, 1)
OPERATIONS = (
    "open", "write", "pwrite", "fsync", "posix_fallocate", "ftruncate", "rename", "unlink", "rmdir", "mkdir", "link",
)  # fmt: skip
HALVED = ("pwrite", "receive")  # the operations that a death can leave half done
POINTS_MAX = 500
TORN = ("copy", "through", "push", "push to disk", "fetch", "fetch again")


@dataclass(frozen=True, slots=True)
class World:
    """Step 10 of both ranks is whole everywhere; step 20 is in memory."""

    root: Path

    @property
    def images(self) -> ImageTier:
        return ImageTier(self.root / "memory", "a", Checksummer(1), overflow=self.root / "disk")

    @property
    def disk(self) -> FileTier:
        return FileTier("disk", self.root / "disk")

    @property
    def staged(self) -> FileTier:
        return self.in_memory(FileTier)

    def in_memory(self, kind: type[FileTier]) -> FileTier:
        return kind("memory", self.root / "memory", "staged", warm=WarmFiles(self.root / "memory"))

    @property
    def bucket(self) -> Bucket:
        return Bucket(open_store(f"file://{self.root / 'bucket'}"), JOB)

    def build(self) -> None:
        self.root.mkdir(parents=True)
        for rank in RANKS:
            images = ImageSet(self.root / "memory" / JOB / f"w{rank}")
            for step in (10, 20):
                staged = images.stage(PLAN, 1, step, rank, {"dp": 2}, partial(fill, step=step), bytes([rank]) * 99)
                assert isinstance(staged, Staged), staged
                if step == 10:
                    commit(self, step)
                    copy(self, step)
            images.close()
        for rank in RANKS:
            upload_rank(self, ShardKey(1, 10, rank))
        assert self.bucket.complete(1, 10, len(RANKS)) is not None

    def require_step_10(self) -> None:
        """Whatever has happened: the checkpoint before is whole on disk, and listed in the store."""
        for rank in RANKS:
            require_whole(self.disk, ShardKey(1, 10, rank))
        assert (1, 10) in layout.steps(self.bucket.store, JOB)

    def require_only_whole(self) -> None:
        """The next life: sweep, and then everything that is listed is what it says."""
        WarmFiles(self.root / "memory").sweep()
        for tier in (self.disk, self.staged):
            tier.sweep(JOB)
            for manifest in tier.shards(JOB):
                require_whole(tier, manifest.key)
        left = [path for pattern in ("*.part", ".*.tmp") for path in (self.root / "disk").rglob(pattern)]
        left += (self.root / "memory" / JOB / "staged").rglob(".*")
        left += (self.root / "memory").glob(".*")
        assert not left, f"half-written files are left: {left}"
        for checkpoint_id in layout.steps(self.bucket.store, JOB):
            for rank in RANKS:
                fetch_from_store(self, ShardKey(*checkpoint_id, rank))


def fill(image: Any, step: int) -> None:
    image.view("w")[:] = bytes([step]) * NBYTES


def require_whole(tier: FileTier | ImageTier, key: ShardKey) -> None:
    with tier.open(JOB, key) as shard:
        Checksummer(1).verify(shard.manifest, shard.data)
        assert bytes(shard.reader.view("w")) == bytes([key.step]) * NBYTES


# ---------------------------------------------------------------- what is interrupted


def commit(world: World, step: int = 20) -> None:
    for seen in world.images.scan(JOB):
        if seen.header.stamp.key.step == step:
            world.images.commit(JOB, seen)


def copy(world: World, step: int = 20) -> None:
    commit(world, step)
    for seen in world.images.scan(JOB):
        if seen.header.stamp.key.step == step:
            with world.images.open(JOB, seen.header.stamp.key) as shard:
                world.disk.put(JOB, shard, unpaced)


def through(world: World, step: int = 20) -> None:
    """Checksums and the way to the disk side by side, as a new save takes it."""
    for seen in world.images.scan(JOB):
        if seen.header.stamp.key.step == step:
            with ThreadPoolExecutor(1) as committer:
                fresh = PendingCommit(seen, committer.submit(world.images.commit, JOB, seen))
                world.disk.put_fresh(JOB, fresh, unpaced)


class FullMemory(FileTier):
    """Takes nothing that could as well go to the disk."""

    def has_room(self, size: int) -> bool:
        return False


def peer_copy(
    world: World, *, push: bool = False, memory: type[FileTier] = FileTier, into: FileTier | None = None
) -> None:
    """Over a real connection; the server's side runs in a thread and dies with us."""
    commit(world)
    key = ShardKey(1, 20, 0)
    server = Server(
        Limits(60, 60), OpenSockets(), ((Tier.IMAGE, world.images),), Arrivals(0), Intake(world.in_memory(memory), world.disk),
        ThreadPoolExecutor(1),
        lambda job: "token", lambda *_: None, lambda *_: None,
    )  # fmt: skip
    client = Client(Limits(60, 60), OpenSockets())
    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=lambda: server.serve(door.accept()[0]), daemon=True)
        thread.start()
        source = ShardSource("a", f"127.0.0.1:{door.getsockname()[1]}")
        if push:
            with world.images.open(JOB, key) as shard:
                client.push(source, JOB, "token", shard, unpaced)
            client.kept.close()
        else:
            client.fetch(source, JOB, "token", Wanted(key), into or world.staged)
        thread.join()


def fetch_again(world: World) -> None:
    """Into the pages of the one before."""
    staged = world.staged
    peer_copy(world, into=staged)
    staged.delete(JOB, ShardKey(1, 20, 0))
    peer_copy(world, into=staged)


def upload_rank(world: World, key: ShardKey) -> None:
    with world.disk.open(JOB, key) as shard:
        world.bucket.upload(shard, unpaced)


def upload(world: World) -> None:
    copy(world)
    for rank in RANKS:
        upload_rank(world, ShardKey(1, 20, rank))
        world.bucket.complete(1, 20, len(RANKS))


def fetch_from_store(world: World, key: ShardKey) -> None:
    bucket = world.bucket
    bucket.fetch(bucket.manifest_of(Wanted(key)), world.staged, None)
    require_whole(world.staged, key)
    world.staged.delete(JOB, key)


def prune(world: World) -> None:
    for rank in RANKS:
        world.disk.delete(JOB, ShardKey(1, 20, rank))


def discard(world: World) -> None:
    world.bucket.discard(1, 20)


def nothing(world: World) -> None:
    """No preparation."""


@dataclass(frozen=True, slots=True)
class Scenario:
    before: Callable[[World], None]
    work: Callable[[World], None]
    done: Callable[[World], bool]  # what holds once the work has been done after all


SCENARIOS = {
    "commit": Scenario(nothing, commit, lambda w: len(w.images.shards(JOB)) == 4),
    "copy": Scenario(commit, copy, lambda w: len(w.disk.shards(JOB)) == 4),
    "through": Scenario(nothing, through, lambda w: (len(w.images.shards(JOB)), len(w.disk.shards(JOB))) == (4, 4)),
    "push": Scenario(commit, lambda w: peer_copy(w, push=True), lambda w: len(w.staged.shards(JOB)) == 1),
    "push to disk": Scenario(
        commit, lambda w: peer_copy(w, push=True, memory=FullMemory), lambda w: len(w.disk.shards(JOB)) == 3
    ),
    "fetch": Scenario(commit, peer_copy, lambda w: len(w.staged.shards(JOB)) == 1),
    "fetch again": Scenario(commit, fetch_again, lambda w: len(w.staged.shards(JOB)) == 1),
    "upload": Scenario(copy, upload, lambda w: layout.steps(w.bucket.store, JOB) == [(1, 20), (1, 10)]),
    "retrieve": Scenario(upload, lambda w: fetch_from_store(w, ShardKey(1, 20, 1)), lambda w: not w.staged.shards(JOB)),
    "prune": Scenario(copy, prune, lambda w: len(w.disk.shards(JOB)) == 2),
    "discard": Scenario(upload, discard, lambda w: len(layout.survey(w.bucket.store, JOB)) == 1),
}


# ---------------------------------------------------------------- dying


def die_at(point: int, tell: Callable[[bytes], object], *, torn: bool) -> None:
    """From now on the `point`-th operation is this process's last, and `tell` is given its name; `torn`: half of a write is
    done."""
    lock, count = threading.Lock(), 0

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                if count == point:
                    tell(name.encode())
                    if torn and name == "pwrite":
                        real(args[0], args[1][: len(args[1]) // 2 // 4096 * 4096], args[2])
                    if torn and name == "receive":
                        real(args[0], args[1][: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(name, getattr(os, name)))
    setattr(lanes, "fill", counted("receive", frames.fill))  # noqa: B010  # into mapped memory: no call of `os` tells of it


def run_killed(work: Callable[[], None], point: int, *, torn: bool) -> str:
    """The operation before which the child was killed; nothing if the child came to its end."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            die_at(point, partial(os.write, writing), torn=torn)
            work()
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as reported:
        operation = reported.read().decode()
    ended = os.waitstatus_to_exitcode(status)
    assert ended == (-signal.SIGKILL if operation else 0), f"the child failed by itself at point {point}"
    return operation


def main(name: str, root: Path) -> None:
    scenario, origin = SCENARIOS[name], World(root / "origin")
    origin.build()
    scenario.before(origin)
    halved = 0
    for point in range(1, POINTS_MAX):
        operation = ""
        for torn in (False, True) if name in TORN else (False,):
            if torn and operation not in HALVED:
                continue  # it would be the same death again
            halved += torn
            world = World(root / f"{point}")
            shutil.copytree(origin.root, world.root, copy_function=shutil.copyfile)
            operation = run_killed(lambda: scenario.work(world), point, torn=torn)  # noqa: B023 - runs here and now
            world.require_step_10()
            world.require_only_whole()  # that of the store, too
            scenario.work(world)
            assert scenario.done(world), f"{name}: after a death at operation {point} the work cannot be done again"
            world.require_step_10()
            fetch_from_store(world, ShardKey(1, 10, 0))
            shutil.rmtree(world.root)
        if not operation:
            print(f"{name}: {point - 1} points, {halved} of them also half done")
            return
    raise AssertionError(f"{name} has more than {POINTS_MAX} operations")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
