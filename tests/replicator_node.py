"""A real replicator process for tests, with the worker's and the agent's side of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from ports import port_of, reserve_port
from waiting import TIMEOUT_S, wait_until
from warm_processes import WarmProcess, warm

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import OBJECT_STORE, RankRestore, ShardKey, ShardRecord, ShardSource, StoredStep
from holdfast.domain.links import LinkLimits, MeasureLink, OpenLink
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Inventory
from holdfast.domain.replication import (
    CommonCheckpoint,
    Configure,
    EndJob,
    PruneSteps,
    Stage,
    StagedShard,
    UploadNow,
)
from holdfast.domain.worker import encode
from holdfast.shards import Image, ImageSet, Plan, Staged, TensorSpec
from holdfast.v1 import replicator_pb2 as pb
from holdfast.v1 import replicator_pb2_grpc as rpc
from holdfast.wire import links as wire_links
from holdfast.wire import shards as wire
from holdfast.wire.retention import encode_end, encode_prune, encode_retain

JOB = "llm"
# Runs its arguments without the right of root to read and write everything (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH).
WITHOUT_OVERRIDE = """
import ctypes, os, sys
for capability in (1, 2):
    if os.geteuid() == 0 and ctypes.CDLL(None).prctl(24, capability, 0, 0, 0):
        sys.exit("the right to read everything cannot be given up")
os.execv(sys.argv[1], sys.argv[1:])
"""
TOKEN = "secret-of-llm"
TENSOR_BYTES = 3 << 20
PLAN = Plan(
    (TensorSpec("w", "uint8", (TENSOR_BYTES,), TENSOR_BYTES), TensorSpec("v", "uint8", (TENSOR_BYTES,), TENSOR_BYTES))
)


def fill(image: Image, value: int) -> None:
    for spec in PLAN.tensors:
        image.view(spec.fqn)[:] = bytes([value]) * spec.nbytes


class Node:
    """One replicator below `root`; `start` again after a kill finds the same directories."""

    def __init__(self, name: str, root: Path, **env: str) -> None:
        self.name = name
        self.root = root
        self.memory = root / "memory"
        self.disk = root / "disk"
        self.notes = root / "notes.sock"
        self._env = env
        self.asks_permission = False  # does not read what its user may not read, even if that is root; before `start`
        self._process: WarmProcess | subprocess.Popen[bytes] | None = None
        self.endpoint = ""
        self._reserved: socket.socket | None = None  # its port, also while it does not run
        self._channel: grpc.Channel | None = None
        root.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        ready = self.root / "ready.json"
        ready.unlink(missing_ok=True)
        self._reserved = self._reserved or reserve_port()
        env = {
            **os.environ,
            "HOLDFAST_NODE": self.name,
            "HOLDFAST_MEMORY_DIR": str(self.memory),
            "HOLDFAST_DISK_DIR": str(self.disk),
            "HOLDFAST_REPLICATOR_SOCKET": str(self.root / "rpc.sock"),
            "HOLDFAST_REPLICATOR_NOTES": str(self.notes),
            "HOLDFAST_REPLICATOR_LISTEN": f"127.0.0.1:{port_of(self._reserved)}",
            "HOLDFAST_READY_FILE": str(ready),
            "HOLDFAST_REPLICATOR_IO_TIMEOUT_S": "2",
            "HOLDFAST_REPLICATOR_RESCAN_INTERVAL_S": "0.5",  # what nobody tells of is found as surely, and sooner
            **self._env,
        }
        with (self.root / "log").open("ab") as log:
            process: WarmProcess | subprocess.Popen[bytes]
            if self.asks_permission:
                command = [sys.executable, "-c", WITHOUT_OVERRIDE, sys.executable, "-m", "holdfast.replicator"]
                process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            else:
                process = warm("holdfast.replicator").start([], Path.cwd(), env, log.fileno(), log.fileno())
        self._process = process
        wait_until(lambda: ready.exists() or process.poll() is not None, description="ready")
        assert ready.exists(), self.log
        self.endpoint = json.loads(ready.read_text())["endpoint"]
        self._channel = grpc.insecure_channel(f"unix:{self.root / 'rpc.sock'}")
        self._stub: Any = rpc.ReplicatorStub(self._channel)  # type: ignore[arg-type]  # the stubs are typed for asyncio

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.root / "log").read_text()

    @property
    def source(self) -> ShardSource:
        return ShardSource(self.name, self.endpoint)

    def close(self) -> None:
        """Stop it for good."""
        try:
            self.stop()
        finally:
            if self._reserved is not None:
                self._reserved.close()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End the process and return its exit code."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        if self._channel is not None:
            self._channel.close()
        process.send_signal(how)
        return process.wait(timeout=TIMEOUT_S)

    # ------------------------------------------------------------ the agent's side

    def configure(
        self, *, generation: int = 1, attempt: int = 1, ranks: tuple[int, ...] = (0,),
        peers: tuple[Node | ShardSource, ...] = (),
        keep: int = 2, token: str = TOKEN, world: int = 2, job: str = JOB,
        store: str = "", store_interval_s: float = 0.001, store_keep: int = 2, first_attempt: int = 0,
    ) -> None:  # fmt: skip
        sources = tuple(peer.source if isinstance(peer, Node) else peer for peer in peers)
        request = Configure(
            job, generation, attempt, Mesh.of({"dp": world}), ranks, sources, keep, token,
            store, store_interval_s, store_keep, first_attempt,
        )  # fmt: skip
        self._stub.Configure(wire.encode_configure(request), timeout=TIMEOUT_S)

    def stage(
        self, key: ShardKey, *sources: Node, digest: str = "", timeout_s: float = 10.0, rank: int | None = None,
        store: str = "",
    ) -> StagedShard:  # fmt: skip
        call = self.begin_stage(key, *sources, digest=digest, timeout_s=timeout_s, rank=rank, store=store)
        (staged,) = wire.decode_staged(call.result())
        return staged

    def begin_stage(
        self, key: ShardKey, *sources: Node, digest: str = "", timeout_s: float = 10.0, rank: int | None = None,
        store: str = "",
    ) -> Any:  # fmt: skip
        """The call, under way: its caller may lose patience and cancel it."""
        places = [source.source for source in sources] + ([ShardSource(OBJECT_STORE, store)] if store else [])
        restore = RankRestore(key.rank if rank is None else rank, key, digest, tuple(places))
        request = wire.encode_stage(Stage(JOB, (restore,), timeout_s))
        return self._stub.Stage.future(request, timeout=timeout_s + TIMEOUT_S)

    def archive(self, step: int, *, generation: int = 1) -> None:
        request = UploadNow(JOB, generation, step)
        self._stub.Archive(wire.encode_archive(request), timeout=TIMEOUT_S)

    def retain(self, step: int, *, attempt: int = 1) -> None:
        self._stub.Retain(encode_retain(CommonCheckpoint(JOB, attempt, step)), timeout=TIMEOUT_S)

    def end(self, *, generation: int = 1) -> None:
        self._stub.End(encode_end(EndJob(JOB, generation)), timeout=TIMEOUT_S)

    def prune(self, *steps: tuple[int, int]) -> None:
        self._stub.Prune(encode_prune(PruneSteps(JOB, tuple(CheckpointId(*step) for step in steps))), timeout=TIMEOUT_S)

    def forget(self, job: str = JOB) -> None:
        self._stub.Forget(pb.ForgetRequest(job=job), timeout=TIMEOUT_S)

    def stage_all(self, *restores: RankRestore, timeout_s: float = 10.0, job: str = JOB) -> tuple[StagedShard, ...]:
        answer = self._stub.Stage(wire.encode_stage(Stage(job, restores, timeout_s)), timeout=timeout_s + TIMEOUT_S)
        return wire.decode_staged(answer)

    def open_link(self, token: str, *, bytes_max: int = 8 << 20, seconds_max: float = 0.3, for_s: float = 30.0) -> None:
        request = OpenLink(token, LinkLimits(bytes_max, seconds_max), for_s)
        self._stub.OpenLink(wire_links.encode_open(request), timeout=TIMEOUT_S)

    def close_link(self) -> None:
        self._stub.CloseLink(pb.CloseLinkRequest(), timeout=TIMEOUT_S)

    def begin_link_test(
        self, endpoint: str, token: str, *, bytes_max: int = 8 << 20, seconds_max: float = 0.3, node: str = "other"
    ) -> Any:
        """The call, under way."""
        request = MeasureLink(node, endpoint, token, LinkLimits(bytes_max, seconds_max))
        return self._stub.MeasureLink.future(wire_links.encode_measure(request), timeout=TIMEOUT_S)

    def inventories(self, job: str = JOB) -> Iterator[Inventory]:
        for message in self._stub.WatchInventory(pb.WatchInventoryRequest(job=job), timeout=TIMEOUT_S):
            yield wire.decode_inventory(message)

    def watch(self, job: str = JOB) -> Iterator[Sequence[ShardRecord]]:
        for inventory in self.inventories(job):
            yield inventory.shards

    def wait_stored(self, *steps: int) -> tuple[StoredStep, ...]:
        """Follow the inventory until exactly these steps, newest first, are known complete in the object store."""
        for inventory in self.inventories():
            if tuple(stored.step for stored in inventory.stored) == steps:
                return inventory.stored
        raise AssertionError(f"the object store never had {steps}: {self.log}")

    def wait_for(self, key: ShardKey, tier: str) -> ShardRecord:
        """Follow the inventory until the shard is listed in this tier."""
        for shards in self.watch():
            for record in shards:
                if (record.key, record.tier) == (key, tier):
                    return record
        raise AssertionError(f"{key} never came to {tier} of {self.name}: {self.log}")

    def wait_without(self, key: ShardKey, tier: str) -> None:
        for shards in self.watch():
            if all((record.key, record.tier) != (key, tier) for record in shards):
                return

    def holdings(self) -> set[tuple[ShardKey, str]]:
        return {(record.key, record.tier) for record in next(self.watch())}

    # ------------------------------------------------------------ the worker's side

    def images(self, slot: int = 0, job: str = JOB, **options: object) -> ImageSet:
        return ImageSet(self.memory / job / f"w{slot}", **options)  # type: ignore[arg-type]

    def save(
        self,
        images: ImageSet,
        step: int,
        *,
        rank: int = 0,
        attempt: int = 1,
        note: bool = True,
        value: int | None = None,
    ) -> ShardKey:
        mark = step % 251 if value is None else value

        def stage() -> Staged | None:
            saved = images.stage(
                PLAN, attempt, step, rank, {"dp": 2}, lambda image: fill(image, mark), bytes([mark]) * 99
            )
            return saved if isinstance(saved, Staged) else None

        staged = wait_until(stage, description=f"an image to save step {step} in")
        if note:
            self.tell_saved(step, staged.path, rank=rank)
        return staged.key

    def tell_saved(self, step: int, image: Path, *, rank: int = 0) -> None:
        """The worker's note."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notes:
            raw = encode("saved", job=JOB, generation=1, rank=rank, step=step, image=str(image))
            notes.sendto(raw, str(self.notes))

    def shard_file(self, key: ShardKey, tier: str = "disk") -> Path:
        base = self.disk / JOB if tier == "disk" else self.memory / JOB / "staged"
        return base / f"a{key.attempt}" / f"s{key.step}" / f"rank-{key.rank}.shard"


@contextmanager
def nodes(root: Path, *names: str, **env: str) -> Iterator[list[Node]]:
    """Their memory is where memory is, with room for copies of peers, unless it is there already (`small_tmpfs`)."""
    made = [Node(name, root / name, **env) for name in names]
    with ExitStack() as stack:  # the others are stopped, too, when one does not stop in time
        memory = Path(stack.enter_context(TemporaryDirectory(dir="/dev/shm")))
        for node in made:
            node.memory = node.memory if node.memory.exists() else memory / node.name
            stack.callback(node.close)
            node.start()
        yield made


@contextmanager
def small_tmpfs(path: Path, size: str) -> Iterator[None]:
    path.mkdir(parents=True, exist_ok=True)
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=False).returncode
    ):
        pytest.skip("mounting a small tmpfs takes root and the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill_up(directory: Path) -> Path:
    """To the last page; the file that does it."""
    path = directory / "filling"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    assert os.statvfs(directory).f_bavail == 0
    return path
