"""Real checkpoint-replicator processes, with the agent's requests to them: configure, stage, watch the inventory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from benchmarks.checkpoint.scratch import Scratch
from holdfast.domain import worker
from holdfast.domain.generations import RankRestore, ShardKey, ShardRecord, ShardSource
from holdfast.domain.mesh import Mesh
from holdfast.domain.replication import CommonCheckpoint, Configure, Stage, StagedShard
from holdfast.v1 import replicator_pb2 as pb
from holdfast.v1 import replicator_pb2_grpc as rpc
from holdfast.wire import shards as wire
from holdfast.wire.retention import encode_retain

JOB = "bench"
TOKEN = "secret-of-bench"
MESH = Mesh.of({"dp": 2})  # rank 0 trains; rank 1, on the other node, exists only so that there is a peer
ATTEMPT = 1
READY_TIMEOUT_S = 20.0
STAGE_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.005


class Replicator:
    """One node's replicator, a context manager. `unlimited` disables the rate limits, because rates are measured. `settings`:
    further settings."""

    def __init__(
        self, node: str, place: Scratch, *, unlimited: bool = False, settings: Mapping[str, str] | None = None
    ) -> None:
        self.node = node
        self.memory = place.memory / node
        self.disk = place.disk / node
        self.notes = place.sockets / f"{node}.notes"
        self._rpc = place.sockets / f"{node}.rpc"
        self._ready = place.sockets / f"{node}.json"
        self._log = place.sockets / f"{node}.log"
        rates = ("HOLDFAST_REPLICATOR_DISK_BYTES_PER_S_MAX", "HOLDFAST_REPLICATOR_PEER_BYTES_PER_S_MAX")
        self._settings = {**(dict.fromkeys(rates, "0") if unlimited else {}), **(settings or {})}
        self._generation = 0

    def __enter__(self) -> Replicator:
        self._ready.unlink(missing_ok=True)  # of an earlier one of this name
        env = {
            **os.environ,
            "HOLDFAST_NODE": self.node,
            "HOLDFAST_MEMORY_DIR": str(self.memory),
            "HOLDFAST_DISK_DIR": str(self.disk),
            "HOLDFAST_REPLICATOR_SOCKET": str(self._rpc),
            "HOLDFAST_REPLICATOR_NOTES": str(self.notes),
            "HOLDFAST_READY_FILE": str(self._ready),
            **self._settings,
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([sys.executable, "-m", "holdfast.replicator"], env=env, stderr=log)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"the replicator of {self.node} does not serve: {self._log.read_text()[-2000:]}")
            time.sleep(POLL_S)
        self.source = ShardSource(self.node, json.loads(self._ready.read_text())["endpoint"])
        self._channel = grpc.insecure_channel(f"unix:{self._rpc}")
        self._stub: Any = rpc.ReplicatorStub(self._channel)  # type: ignore[arg-type]  # the stubs are typed for asyncio only
        return self

    def __exit__(self, *error: object) -> None:
        if hasattr(self, "_channel"):
            self._channel.close()
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def images(self) -> Path:
        """The directory of the images of this node's worker."""
        return self.memory / JOB / "w0"

    def worker_environment(self) -> dict[str, str]:
        """Return the environment that the agent would give a worker."""
        return {
            worker.ENV_JOB: JOB,
            worker.ENV_GENERATION: "1",
            worker.ENV_ATTEMPT: str(ATTEMPT),
            worker.ENV_IMAGES: str(self.images),
            worker.ENV_REPLICATOR: str(self.notes),
        }

    # ------------------------------------------------------------ requests of the agent

    def configure(self, ranks: tuple[int, ...], *peers: Replicator, mesh: Mesh = MESH) -> None:
        self._generation += 1
        sources = tuple(peer.source for peer in peers)
        request = Configure(JOB, self._generation, ATTEMPT, mesh, ranks, sources, 2, TOKEN)
        self._stub.Configure(wire.encode_configure(request), timeout=STAGE_TIMEOUT_S)

    def stage(self, key: ShardKey, *sources: Replicator) -> StagedShard:
        restore = RankRestore(key.rank, key, "", tuple(source.source for source in sources))
        request = wire.encode_stage(Stage(JOB, (restore,), STAGE_TIMEOUT_S))
        (staged,) = wire.decode_staged(self._stub.Stage(request, timeout=STAGE_TIMEOUT_S))
        return staged

    def retain(self, key: ShardKey) -> None:
        """Allow the deletion of older checkpoints, as the supervisor does when every node has a step."""
        with suppress(ValueError):  # this process has closed the channel
            self._stub.Retain(encode_retain(CommonCheckpoint(JOB, key.attempt, key.step)), timeout=STAGE_TIMEOUT_S)

    def forget(self) -> None:
        self._stub.Forget(pb.ForgetRequest(job=JOB), timeout=STAGE_TIMEOUT_S)

    def watch(self, on_record: Callable[[ShardRecord, float], None]) -> None:
        """Call `on_record(record, time.monotonic())` in a thread for every new record of the inventory, until the end."""
        call = self._stub.WatchInventory(pb.WatchInventoryRequest(job=JOB))

        def follow() -> None:
            known: set[tuple[ShardKey, str]] = set()
            try:
                for message in call:
                    moment = time.monotonic()
                    records = wire.decode_inventory(message).shards
                    for record in records:
                        if (record.key, record.tier) not in known:
                            on_record(record, moment)
                    known = {(record.key, record.tier) for record in records}
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.CANCELLED:  # closed by this process
                    raise

        threading.Thread(target=follow, name=f"watch {self.node}", daemon=True).start()

    def newest(self, tier: str) -> ShardKey:
        """Return the newest shard in `tier`."""
        message = next(self._stub.WatchInventory(pb.WatchInventoryRequest(job=JOB), timeout=STAGE_TIMEOUT_S))
        keys = [record.key for record in wire.decode_inventory(message).shards if record.tier == tier]
        return max(keys, key=lambda key: (key.attempt, key.step))

    def wait_for(self, tier: str, key: ShardKey | None = None, timeout_s: float = STAGE_TIMEOUT_S) -> ShardRecord:
        """Wait for the record of `key`, or of any shard, in `tier`, and return it. Raises TimeoutError."""
        try:
            for message in self._stub.WatchInventory(pb.WatchInventoryRequest(job=JOB), timeout=timeout_s):
                for record in wire.decode_inventory(message).shards:
                    if record.tier == tier and key in (None, record.key):
                        return record
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        raise TimeoutError(f"{key or 'no shard'} was not in {tier} of {self.node} after {timeout_s:.0f} s")
