"""The parallel connections of a transfer: their number, one thread for each, and their combined result."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from holdfast.domain.errors import IntegrityError
from holdfast.replicator.tiers.incoming import Incoming
from holdfast.replicator.transport.frames import fill
from holdfast.shards import CHUNK_BYTES

LANE_BYTES_MIN = 8 * CHUNK_BYTES  # below, another connection costs more than it brings

L = TypeVar("L")
T = TypeVar("T")


def lanes_for(nbytes: int, lanes_max: int) -> int:
    """How many connections a transfer of so many bytes is worth."""
    return max(1, min(lanes_max, nbytes // LANE_BYTES_MIN))


def side_by_side(lanes: Sequence[L], work: Callable[[int, L], T]) -> list[T]:
    """`work(number, lane)` for each, the first one here, the others in threads of their own; each goes on to its end, whatever
    becomes of the others. Raises what the first failed with; damage before everything else."""
    if len(lanes) == 1:
        return [work(0, lanes[0])]
    with ThreadPoolExecutor(len(lanes), "lane") as pool:  # they have the priority of the thread that starts them
        running = [pool.submit(work, number, lane) for number, lane in enumerate(lanes)]
        wait(running)
    errors = [error for each in running if (error := each.exception()) is not None]
    if errors:
        raise next((error for error in errors if isinstance(error, IntegrityError)), errors[0])
    return [each.result() for each in running]


def receive_spans(sock: socket.socket, incoming: Incoming, coming: Iterable[int], claimed: Iterable[int]) -> None:
    """Receive the spans that are coming. What is not among the `claimed` (an older peer sends more than it is asked for) is
    read and thrown away. Raises IntegrityError, OutOfSpace, Unavailable when the peer hangs up, TimeoutError."""
    mine = set(claimed)
    for number in coming:
        if number in mine:
            incoming.arrive(number, lambda piece: fill(sock, piece))
        else:
            fill(sock, memoryview(bytearray(incoming.spans[number].size)))
