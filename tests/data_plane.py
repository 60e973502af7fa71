"""One node's end of the data plane in this process, for tests: tiers, a server and a client that sends to it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from holdfast.domain.generations import ShardKey, ShardSource
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.sharing import Arrivals
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.threads import Pace
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.tiers.warm import WarmFiles
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.transport.intake import Intake
from holdfast.replicator.transport.kept import SERVED_MAX, Served
from holdfast.replicator.transport.secure import Secure
from holdfast.replicator.transport.server import Server
from holdfast.replicator.view import Held, Tier
from holdfast.shards import ImageSet, Plan, Staged, TensorSpec

JOB, TOKEN = "llm", "token"
NBYTES = 33 << 20  # six spans
NO_LIMIT = Pace(0)


class Roomy(WarmFiles):
    """The file system that tests run on may be as full as it likes."""

    def has_room(self, size: int) -> bool:
        return True


class Here:
    """One node's tiers and its end of the data plane."""

    def __init__(
        self, root: Path, lanes_max: int = 3, secure: tuple[Secure, Secure] | None = None, served_max: int = SERVED_MAX
    ) -> None:
        """`secure`: of the node and of the client that sends to it."""
        here, there = secure or (Secure(), Secure())
        (root / "memory").mkdir(parents=True)
        self.warm = Roomy(root / "memory")
        self.memory = FileTier("memory", root / "memory", "staged", warm=self.warm)
        self.disk = FileTier("disk", root / "disk")
        self.arrived: list[tuple[ShardKey, Tier]] = []
        self.suspected: list[Held] = []
        self.limits = Limits(60, 60, lanes_max)
        self.client = Client(self.limits, OpenSockets(), there)
        self.takers = ThreadPoolExecutor(8)
        self.connections = 0
        self.token = TOKEN
        self.server = Server(
            self.limits, OpenSockets(), ((Tier.STAGED, self.memory), (Tier.DISK, self.disk)), Arrivals(0),
            Intake(self.memory, self.disk), self.takers, lambda job: self.token,
            lambda job, manifest, store: self.arrived.append((manifest.key, store)),
            lambda job, held: self.suspected.append(held), secure=here, served=Served(served_max),
        )  # fmt: skip

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """Meanwhile this node waits for a fifth of a second, where it waits for a minute else."""
        patient, self.server = self.server, replace(self.server, limits=Limits(60, 0.2))
        try:
            yield
        finally:
            self.server = patient

    @contextmanager
    def listening(self) -> Iterator[ShardSource]:
        with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(8) as pool:

            def accept() -> None:
                while True:
                    try:
                        sock, _ = door.accept()
                    except OSError:
                        return
                    self.connections += 1
                    pool.submit(self.server.serve, sock)

            thread = threading.Thread(target=accept)
            thread.start()
            try:
                yield ShardSource("b", f"127.0.0.1:{door.getsockname()[1]}")
            finally:
                door.shutdown(socket.SHUT_RDWR)
                thread.join()
                self.client.kept.close()
                self.restart()

    def restart(self) -> None:
        """Close all connections of this node's server."""
        self.server.sockets.close_all()
        self.server = replace(self.server, sockets=OpenSockets())


@contextmanager
def saved(root: Path, step: int, nbytes: int = NBYTES) -> Iterator[OpenShard]:
    """A committed image of one worker, open."""
    plan = Plan((TensorSpec("w", "uint8", (nbytes,), nbytes),))
    images = ImageSet(root / "memory" / JOB / "w0")
    staged = images.stage(
        plan, 1, step, 0, {"dp": 1}, lambda image: image.view("w").__setitem__(slice(None), os.urandom(nbytes)), b"e"
    )
    assert isinstance(staged, Staged)
    images.close()
    checksummer = Checksummer(1)
    tier = ImageTier(root / "memory", "a", checksummer, overflow=root / "disk")
    for seen in tier.scan(JOB):
        tier.commit(JOB, seen)
    checksummer.close()
    with tier.open(JOB, staged.key) as shard:
        yield shard


def whole(tier: FileTier, shard: OpenShard) -> bool:
    with tier.open(JOB, shard.manifest.key) as copy:
        return bytes(copy.data) == bytes(shard.data)
