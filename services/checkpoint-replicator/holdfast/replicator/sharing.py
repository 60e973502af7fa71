"""Shared downloads: several nodes that need the same tensors from the object store each download a part and exchange the rest.

The supervisor sends the list of these nodes to each of them, in one order. Piece n of the tensors is downloaded by node n
modulo their number. Each node downloads its own pieces first and serves them as soon as they are verified, so that no node
waits for a waiting node. Pieces that a node does not serve in time, or serves corrupt, are downloaded from the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from holdfast.domain.errors import HoldfastError, NotFound
from holdfast.domain.generations import ShardSource
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.incoming import Incoming

ARRIVALS_MAX = 64  # downloads, with the completed ones that slower nodes may still read
FAILED_MAX = 2  # failed nodes; after that, every piece comes from the store, because each failure costs a timeout

log = structlog.get_logger("holdfast.replicator.sharing")


@dataclass(slots=True)
class _Arrival:
    job: str
    tier: FileTier
    incoming: Incoming
    through: bool = False


class Arrivals:
    """Downloads of this node from the object store that other nodes need as well. Thread-safe."""

    def __init__(self, wait_s: float) -> None:
        """`wait_s`: how long a request waits for a piece that has not arrived yet."""
        self._wait_s = wait_s
        self._progress = threading.Condition()
        self._arrivals: dict[tuple[str, str], _Arrival] = {}  # (job, digest of the tensors)

    @contextmanager
    def announcing(self, job: str, incoming: Incoming, tier: FileTier) -> Iterator[Callable[[], None]]:
        """Let other nodes read the tensors of `incoming` while it arrives and afterwards. Yields a callback for each arrived
        piece."""
        name = (job, incoming.manifest.digest)
        arrival = _Arrival(job, tier, incoming)
        with self._progress:
            self._arrivals.pop(name, None)
            self._arrivals[name] = arrival
            for oldest in list(self._arrivals)[:-ARRIVALS_MAX]:
                del self._arrivals[oldest]
        try:
            yield self._notify
        finally:
            with self._progress:
                arrival.through = True
                self._progress.notify_all()

    def read(self, job: str, digest: str, offset: int, size: int) -> bytes:
        """Return the piece of the tensors at `offset` of the shard file. Raises NotFound if it does not arrive in time."""

        def arrival() -> _Arrival | None:
            found = self._arrivals.get((job, digest))
            return found if found and (found.through or found.incoming.covers(offset, size)) else None

        with self._progress:
            found = self._progress.wait_for(arrival, self._wait_s)
            if found is not None and not found.through:
                return found.incoming.read(size, offset)  # under the lock, so that the file is not closed
        if found is None:
            raise NotFound(f"{size} bytes of the tensors {digest} did not arrive on this node in time")
        with found.tier.open(job, found.incoming.manifest.key) as shard:
            return bytes(shard.data[offset : offset + size])

    def _notify(self) -> None:
        with self._progress:
            self._progress.notify_all()


class Sharers:
    """The nodes that share one download, and which of them have failed. `read(node, offset, target)` requests a piece from
    `node`."""

    def __init__(
        self, nodes: tuple[ShardSource, ...], here: str, read: Callable[[ShardSource, int, memoryview], None]
    ) -> None:
        self._nodes = nodes
        self._place = next(place for place, node in enumerate(nodes) if node.node == here)
        self._read = read
        self._failed: set[str] = set()

    def turn(self, number: int) -> int:
        """Return the order of the pieces: this node's first, then those of the next node, and so on."""
        return (number - self._place) % len(self._nodes)

    def read(self, number: int, offset: int, target: memoryview) -> bool:
        """Fill `target` from the node that downloads this piece. Returns False if it must be downloaded from the store."""
        owner = self._nodes[number % len(self._nodes)]
        if self.turn(number) == 0 or owner.node in self._failed or len(self._failed) >= FAILED_MAX:
            return False
        try:
            self._read(owner, offset, target)
        except (HoldfastError, OSError) as error:
            self.give_up(number, str(error))
            return False
        return True

    def give_up(self, number: int, reason: str) -> None:
        """Record a failure of the node that downloads this piece."""
        owner = self._nodes[number % len(self._nodes)]
        if self.turn(number) and owner.node not in self._failed:
            self._failed.add(owner.node)
            log.info("shared download failed", peer=owner.node, reason=reason)
