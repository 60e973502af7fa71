"""Copies on another node: after a save, nodes with separate directories exchange committed shards in pairs.

The keeper sends what it has just written, and a third thread receives the shards of this rank's peers. Both use a separate
gloo group, point to point, so a rank waits at most for its peer, and the training thread for no rank. An offer is counted on
the board before it is sent, so a receiver knows that its bytes are coming. If a peer exits, copying ends and training
continues; the launch is about to end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.domain.errors import HoldfastError, IntegrityError, Unavailable
from holdfast.domain.generations import ShardKey
from holdfast.shards import Manifest, Reader
from holdfast.train.standalone.board import Board, paced
from holdfast.train.standalone.directory import Directory
from holdfast.train.standalone.exchange import Exchange
from holdfast.train.standalone.transfer import receive_shard, send_shard

log = logging.getLogger("holdfast.train")

POLL_S: Final = 0.25
TRANSFER_TIMEOUT_S: Final = 600.0  # for one piece, including the wait for a peer that is busy with another rank


def targets(volumes: Sequence[int]) -> tuple[int | None, ...]:
    """Return, by rank, the rank that keeps its copy; None = there is no other directory. `volumes[rank]` identifies its
    directory.

    Directories form pairs, because pairs lose data in the fewest double faults; the last three of an odd number form a ring.
    The ranks of one directory are assigned to those of the other in turn.
    """
    order = sorted(set(volumes))
    if len(order) < 2:
        return (None,) * len(volumes)
    ring = order[-3:] if len(order) % 2 else []
    partner = {at: order[index ^ 1] for index, at in enumerate(order) if at not in ring}
    partner |= {at: ring[(index + 1) % 3] for index, at in enumerate(ring)}
    members: dict[int, list[int]] = {at: [] for at in order}
    place = []  # index of each rank among the ranks of its directory
    for rank, at in enumerate(volumes):
        place.append(len(members[at]))
        members[at].append(rank)
    theirs = [members[partner[at]] for at in volumes]
    return tuple(there[index % len(there)] for there, index in zip(theirs, place, strict=True))


class Peers:
    """One rank's part in the copying. Only the keeper calls `send`."""

    def __init__(
        self,
        exchange: Exchange,
        board: Board,
        directory: Directory,
        run: str,
        chosen: Sequence[int | None],
        copies_max: int,
    ) -> None:
        """`copies_max` limits the copies per rank if no checkpoint becomes complete."""
        self._exchange = exchange
        self._board = board
        self._directory = directory
        self._run = run
        self._to = chosen[exchange.rank]
        self._sources = [rank for rank, to in enumerate(chosen) if to == exchange.rank]
        self._taken = dict.fromkeys(self._sources, 0)
        self._kept: dict[int, deque[ShardKey]] = {source: deque() for source in self._sources}
        self._copies_max = copies_max
        self._broken = False
        self._thread = threading.Thread(target=self._run_receiver, name="holdfast-peers", daemon=True)
        self._thread.start()

    def send(self, key: ShardKey, pace: Callable[[int], None]) -> None:
        """Send a shard that has just been committed to the directory."""
        if self._to is None or self._broken:
            return
        try:
            path = self._directory.path(key)
            with Reader(path, key) as reader:
                manifest = Manifest.read(path.with_suffix(".json"))
                self._board.count(f"offers/{self._exchange.rank}", 1)
                send_shard(self._exchange, manifest, reader, self._to, pace)
        except (FileNotFoundError, IntegrityError) as error:
            log.warning("no peer copy of step %d of rank %d: %s", key.step, key.rank, error)
        except (RuntimeError, Unavailable) as error:  # gloo's own errors are RuntimeErrors
            self._break(f"rank {self._to} no longer accepts copies: {error}")

    def close(self, timeout_s: float) -> bool:
        """End sending and wait for shards that other ranks still send. Returns False on timeout."""
        try:
            self._board.count(f"silent/{self._exchange.rank}", 1)
        except Unavailable as error:
            self._break(str(error))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ the thread

    def _run_receiver(self) -> None:
        waiting = set(self._sources)
        try:
            while waiting and not self._broken:
                for source in sorted(waiting):
                    # Read before the offers, because no offer follows it.
                    silent = self._board.count(f"silent/{source}")
                    if self._board.count(f"offers/{source}") > self._taken[source]:
                        self._taken[source] += 1
                        self._receive(source)
                    elif silent:
                        waiting.discard(source)
                time.sleep(paced(POLL_S, self._exchange.size))
        except (RuntimeError, Unavailable) as error:
            self._break(f"copies are no longer received: {error}")

    def _receive(self, source: int) -> None:
        try:
            kept = self._kept[source]
            kept.append(receive_shard(self._exchange, self._directory, source, self._run))
            if len(kept) > self._copies_max:
                self._directory.delete(kept.popleft())
        except (HoldfastError, OSError) as error:  # the transfer has been read to its end; the next shard may fit
            if isinstance(error, Unavailable):
                raise
            log.warning("copy of rank %d not stored: %s", source, error)

    def _break(self, why: str) -> None:
        if not self._broken:
            self._broken = True
            log.warning("copying to other nodes stopped: %s", why)
