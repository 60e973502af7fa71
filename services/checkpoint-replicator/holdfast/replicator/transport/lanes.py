"""The parallel connections of a transfer: their number, one thread for each, and their combined result."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from holdfast.domain.errors import IntegrityError
from holdfast.replicator.tiers.incoming import Incoming
from holdfast.replicator.transport.frames import fill
from holdfast.replicator.transport.sealed import encrypted
from holdfast.shards import CHUNK_BYTES

LANE_BYTES_MIN = 8 * CHUNK_BYTES  # per connection; for fewer bytes, another connection is not faster

L = TypeVar("L")
T = TypeVar("T")


def lanes_for(nbytes: int, lanes_max: int) -> int:
    """Return the number of connections for a transfer of `nbytes`."""
    return max(1, min(lanes_max, nbytes // LANE_BYTES_MIN))


def side_by_side(lanes: Sequence[L], work: Callable[[int, L], T]) -> list[T]:
    """Run `work(number, lane)` for each lane: the first in this thread, the others in new threads. All run to their end, even
    if one fails. Raises the first error, but an IntegrityError in preference to others."""
    if len(lanes) == 1:
        return [work(0, lanes[0])]
    with ThreadPoolExecutor(len(lanes), "lane") as pool:  # threads inherit the priority of the thread that starts them
        running = [pool.submit(work, number, lane) for number, lane in enumerate(lanes)]
        wait(running)
    errors = [error for each in running if (error := each.exception()) is not None]
    if errors:
        raise next((error for error in errors if isinstance(error, IntegrityError)), errors[0])
    return [each.result() for each in running]


def receive_spans(sock: socket.socket, incoming: Incoming, coming: Iterable[int], claimed: Iterable[int]) -> None:
    """Receive the `coming` spans. Those that are not `claimed` (an older peer sends more than requested) are read and
    discarded. Nobody can have changed what an encrypted connection delivers. Raises IntegrityError, OutOfSpace, Unavailable if
    the peer closes the connection, and TimeoutError."""
    mine, unchanged = set(claimed), encrypted(sock)
    for number in coming:
        if number in mine:
            incoming.arrive(number, lambda piece: fill(sock, piece), unchanged=unchanged)
        else:
            fill(sock, memoryview(bytearray(incoming.spans[number].size)))
