"""CPU time that a replicator spends on a save of small shards, whose bytes cost nothing: plans, threads, messages, connections.

* `alone`: the workers of one node save `SAVES` times, each time when the last save is on disk. CPU time of the replicator's
  process per save.
* `peer`, `peer_tls`: the same with a peer, each time when the last save is on the peer's disk. CPU time of the sender's
  process; that of the peer is `received`, `received_tls`.

`8_alone` and so on: for nodes with 8 ranks instead of one. After each save, the replicators hear that all nodes have it, and
their inventories are watched, as in a run.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

from benchmarks.checkpoint.protection import DIGESTS, TLS, pair
from benchmarks.checkpoint.protocol import Request
from benchmarks.checkpoint.replicators import ATTEMPT, JOB, Replicator
from benchmarks.checkpoint.results import Measured, TrialFailed
from benchmarks.checkpoint.scratch import Scratch
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.mesh import Mesh
from holdfast.domain.notes import SavedNote, Sender, encode
from holdfast.runtime.trust.authority import Authority
from holdfast.shards import Image, ImageSet, Plan, Staged, TensorSpec

SAVES = 60
WARM_SAVES = 12  # then as many steps are retained as later
RANKS = (1, 8)  # of a node
SAVE_TIMEOUT_S = 30.0
SHARD_BYTES = 1 << 16
PLAN = Plan((TensorSpec("w", "uint8", (SHARD_BYTES,), SHARD_BYTES),))


def measure(request: Request, place: Scratch) -> Measured:
    """Measure one round. Raises TrialFailed."""
    found: Measured = []
    authority = Authority.create(place.sockets / "ca", "bench", 10)
    for ranks in RANKS:
        prefix = "" if ranks == 1 else f"{ranks}_"
        for protection, suffix in ((DIGESTS, ""), (TLS, "_tls")):
            with pair(place, authority, protection, unlimited=True) as (holder, other):
                if not suffix:
                    (alone,) = _spent_ms(ranks, holder)
                    found.append(("save_cpu_ms", f"{prefix}alone", alone))
                    holder.forget()
                sent, received = _spent_ms(ranks, holder, other)
                found.append(("save_cpu_ms", f"{prefix}peer{suffix}", sent))
                found.append(("save_cpu_ms", f"{prefix}received{suffix}", received))
    return found


def _spent_ms(ranks: int, holder: Replicator, *others: Replicator) -> list[float]:
    """Let the workers of `holder` save, and return the CPU time per save of each replicator, in ms."""
    mesh = Mesh.of({"dp": 2 * ranks})
    nodes = (holder, *others)
    for other in others:
        other.configure(tuple(range(ranks, 2 * ranks)), mesh=mesh)
    holder.configure(tuple(range(ranks)), *others, mesh=mesh)
    with closing(_Saves(holder, ranks, mesh, nodes)) as saves:
        for step in range(1, WARM_SAVES + 1):
            saves.save(step)
        before = [_cpu_s(each) for each in nodes]
        for step in range(WARM_SAVES + 1, WARM_SAVES + SAVES + 1):
            saves.save(step)
        return [(_cpu_s(each) - spent_s) * 1e3 / SAVES for each, spent_s in zip(nodes, before, strict=True)]


class _Saves:
    """The workers of a node, and the records of the nodes."""

    def __init__(self, holder: Replicator, ranks: int, mesh: Mesh, nodes: tuple[Replicator, ...]) -> None:
        self._holder, self._mesh, self._nodes = holder, mesh, nodes
        self._images = [ImageSet(holder.images.with_name(f"w{rank}")) for rank in range(ranks)]
        for images in self._images:
            images.prepare(PLAN)
        self._on_disk: set[tuple[str, ShardKey]] = set()
        self._changed = threading.Condition()
        self._notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notes.connect(str(holder.notes))
        for node in nodes:
            node.watch(lambda record, _, name=node.node: self._seen(name, record))  # type: ignore[misc]

    def _seen(self, node: str, record: ShardRecord) -> None:
        if record.tier == "disk":
            with self._changed:
                self._on_disk.add((node, record.key))
                self._changed.notify_all()

    def save(self, step: int) -> None:
        """Save once, and wait until the save is on the last node's disk. Raises TrialFailed."""
        keys = [ShardKey(ATTEMPT, step, rank) for rank in range(len(self._images))]
        for key, images in zip(keys, self._images, strict=True):
            staged = images.stage(PLAN, ATTEMPT, step, key.rank, self._mesh, _fill, b"", wait_s=SAVE_TIMEOUT_S)
            if not isinstance(staged, Staged):
                raise TrialFailed(f"step {step} of rank {key.rank} was not saved: {staged}")
            self._notes.send(encode(SavedNote(Sender(JOB, 1, key.rank), step, ATTEMPT)))
        due = {(node.node, key) for node in self._nodes for key in keys}
        with self._changed:
            if not self._changed.wait_for(lambda: due <= self._on_disk, SAVE_TIMEOUT_S):
                raise TrialFailed(f"{due - self._on_disk} not on disk after {SAVE_TIMEOUT_S:g} s")
        for node in self._nodes:
            node.retain(keys[0])

    def close(self) -> None:
        self._notes.close()
        for images in self._images:
            images.close()


def _cpu_s(node: Replicator) -> float:
    """CPU time of a process with all of its threads."""
    return time.clock_gettime(~node.pid << 3 | 2)


def _fill(image: Image) -> None:
    image.view("w")[:] = bytes(SHARD_BYTES)
