"""Several ranks of a run without services in one process: what they say to each other, and what they have saved."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.shards import ImageSet, Plan, Reader, Staged, TensorSpec
from holdfast.train.standalone.directory import Directory
from holdfast.train.standalone.start import Start, Starter

T = TypeVar("T")
TIMEOUT_S = 120.0
NBYTES = 4096


class _Hall:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size
        self.pipes: dict[tuple[int, int], queue.Queue[bytes]] = {
            (a, b): queue.Queue() for a in range(size) for b in range(size)
        }


@dataclass(slots=True)
class ThreadExchange:
    """An `Exchange` between threads. `spoil` is applied to what this rank sends."""

    hall: _Hall
    rank: int
    size: int
    spoil: Callable[[bytes], bytes] = bytes
    sent: int = 0
    timeout_s: float = TIMEOUT_S

    def gather(self, value: T) -> list[T]:
        self.hall.values[self.rank] = value
        self.hall.barrier.wait(TIMEOUT_S)
        values = list(self.hall.values)
        self.hall.barrier.wait(TIMEOUT_S)
        return values

    def send(self, data: memoryview, to: int) -> None:
        self.sent += len(data)
        self.hall.pipes[self.rank, to].put(self.spoil(bytes(data)))

    def receive(self, nbytes: int, sender: int) -> memoryview:
        try:
            data = self.hall.pipes[sender, self.rank].get(timeout=self.timeout_s)
        except queue.Empty:
            raise RuntimeError(f"rank {sender} sent nothing for {self.timeout_s} s") from None  # as gloo would
        assert len(data) == nbytes
        return memoryview(data)


@dataclass(slots=True)
class Ranks:
    """One launch: `nodes[rank]` names the node, each with a directory of its own unless `shared`."""

    tmp: Path
    nodes: Sequence[str]
    mesh: Mesh
    shared: bool = False
    exchanges: list[ThreadExchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        hall = _Hall(len(self.nodes))
        self.exchanges = [ThreadExchange(hall, rank, len(self.nodes)) for rank in range(len(self.nodes))]

    def directory(self, node: str) -> Directory:
        return Directory(self.tmp / "disk" / ("all" if self.shared else node))

    def memory(self, node: str, run: str) -> Path:
        return self.tmp / "memory" / node / run

    def begin(self) -> list[Start]:
        """Every rank's start, each on a thread. The first error comes out."""

        def one(rank: int) -> Start:
            node = self.nodes[rank]
            starter = Starter(
                self.exchanges[rank], self.directory(node), node, self.mesh, lambda run: self.memory(node, run)
            )
            return starter.begin()

        with ThreadPoolExecutor(len(self.nodes)) as pool:
            return list(pool.map(one, range(len(self.nodes))))

    def save(
        self, start: Start, step: int, *, memory: bool = False, disk: bool = True, ranks: Sequence[int] | None = None
    ) -> None:
        """`step` of every rank (or some): what stays in `memory`, what comes to `disk`."""
        for rank in range(len(self.nodes)) if ranks is None else ranks:
            node = self.nodes[rank]
            where = self.memory(node, start.run) / f"rank-{rank}"
            staged = stage(where, start.attempt, step, rank, self.mesh, start.election.at)
            if disk:
                with Reader(staged.path, staged.key) as reader:
                    self.directory(node).store(reader, run=start.run, node=node, pace=lambda _: None)
            if not memory:
                staged.path.unlink()


def end(starts: Sequence[Start]) -> None:
    for start in starts:
        start.lock.close()


def stage(where: Path, attempt: int, step: int, rank: int, mesh: Mesh, parent: CheckpointId | None = None) -> Staged:
    """An image of one tensor that depends on nothing but the step: replicas agree."""
    images = ImageSet(where, restored=parent)

    def fill(image: Any) -> None:
        image.view("w")[:] = bytes([step % 256]) * NBYTES

    plan = Plan((TensorSpec("w", "uint8", (NBYTES,), NBYTES),))
    staged = images.stage(plan, attempt, step, rank, mesh, fill, f"extra of rank {rank}".encode())
    images.close()
    assert isinstance(staged, Staged)
    return staged


def key_of(path: Path) -> ShardKey:
    with Reader(path) as reader:
        return reader.key
