"""A shard file that is being received: verified on arrival, resumable, visible only when complete.

From memory (`write_all`): source ──► check (caller's thread) ──► write (other threads), so that a span is checked while the
previous one is being written to disk.

From a network (`claim`, `arrive`): over several connections, with one thread each that processes one span after the other:
receive, check while it is in the processor's cache, store. In memory there is no separate store step: a span is received in
place. Each span belongs to one connection, so verified bytes are never written again.

A span is compared with its checksum and, if the manifest has digests, with its digest. Two kinds of bytes are compared with the
checksum alone: those of a shard that is open on this machine, and those of a copy for memory that come over an encrypted
connection, which nobody can have changed on their way. The digests of such a copy are compared when it is copied to disk or
restored (docs/adr/0075-digests-of-copies-in-memory.md)."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from holdfast.domain.errors import Conflict, IntegrityError
from holdfast.replicator.names import label
from holdfast.replicator.tiers.part import WRITERS, Part
from holdfast.replicator.tiers.warm import WarmFiles
from holdfast.shards import Manifest
from holdfast.stores.checksum import crc32c

WRITES_AHEAD = 2  # spans that are checked but not yet written
PIECE_BYTES = 1 << 20  # bytes that are received and checked at a time


class Incoming:
    """A shard that is being received. Spans arrive in any order and are verified; only a complete shard can be committed.

    Spans of an interrupted transfer of the same bytes are found, verified and kept. For `warm` see `Part`. `local`: the bytes
    come from a shard that is open on this machine, whose digests have been compared. `later`: digests of what nobody can
    have changed on its way are not compared on arrival. `uncompared` receives whether there are such, before the shard is
    listed.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        *,
        warm: WarmFiles | None = None,
        local: bool = False,
        later: bool = False,
        uncompared: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.manifest = manifest
        self._local = local
        self._later, self._uncompared = later, uncompared
        self._some_uncompared = False
        # The name contains the checksum, because only a transfer of the same bytes may resume.
        tag = f"{manifest.crc32c:08x}"
        self._part = Part(path, manifest.size, tag, what=label(manifest.key), warm=warm)
        self.spans = manifest.spans
        self._lock = threading.Lock()
        self._next = 0
        self._done: set[int] = set()
        self._claimed: set[int] = set()
        try:
            if self._part.found:
                self._find_verified()
        except BaseException:
            self.close()
            raise

    @property
    def next_span(self) -> int:
        """The number of the first missing span."""
        return self._next

    @property
    def whole(self) -> bool:
        """Whether all spans have arrived."""
        return self._next == len(self.spans)

    @property
    def arrived(self) -> int:
        """Number of verified spans."""
        return len(self._done)

    @property
    def missing_bytes(self) -> int:
        return self.manifest.size - sum(self.spans[number].size for number in self._done)

    def claim(self, lane: int, lanes: int) -> list[int]:
        """Assign missing spans to one of `lanes` connections exclusively. If the connection fails, another transfer receives
        them."""
        with self._lock:
            taken = self._done | self._claimed
            mine = [number for number in range(lane, len(self.spans), lanes) if number not in taken]
            self._claimed.update(mine)
        return mine

    def arrive(self, number: int, receive: Callable[[memoryview], None], *, unchanged: bool = False) -> None:
        """Receive a claimed span. `receive` fills the given buffer. `unchanged`: nobody can have changed the bytes on their
        way. Raises as `write` and `receive` do."""
        span, checksum = self.spans[number], 0
        later = unchanged and self._later
        digest = blake3() if self.manifest.span_blake3 and not later else None
        with self._part.place(span) as place:
            for at in range(0, span.size, PIECE_BYTES):
                piece = place[at : at + PIECE_BYTES]
                receive(piece)
                checksum = crc32c(piece, checksum)
                if digest is not None:
                    digest.update(piece)
            self._require(number, span.size, checksum, None if digest is None else digest.digest())
        self._count(number, uncompared=later)

    def has(self, first: int, end: int) -> bool:
        """Whether the spans from `first` to `end` (exclusive) have arrived."""
        return self._done.issuperset(range(first, end))

    def covers(self, offset: int, size: int) -> bool:
        """Whether these bytes of the file have arrived and are verified."""
        first, end = (bisect_left(self.spans, at, key=lambda span: span.offset) for at in (offset, offset + size))
        return self.has(first, end)

    def read(self, size: int, offset: int) -> bytes:
        return self._part.read(size, offset)

    def write(self, data: memoryview) -> None:
        """Write the next span. Raises IntegrityError if it does not match the manifest; the span is then not counted."""
        self.write_span(self.next_span, data)

    def write_span(self, number: int, data: memoryview) -> None:
        """Write a span. Raises as `write` does."""
        self._check(number, data)
        self._store_span(number, data)

    def write_all(self, contents: Iterable[memoryview]) -> None:
        """Write the next spans. Raises as `write` does; the spans before the failed one stay counted.

        Each buffer must stay unchanged until `WRITES_AHEAD` + 1 later ones have been requested.
        """
        waiting: deque[Future[None]] = deque()
        with ThreadPoolExecutor(WRITERS, "write") as writer:
            # Threads inherit the priority of the thread that starts them.
            for number, data in enumerate(contents, self.next_span):
                self._check(number, data)
                if len(waiting) == WRITES_AHEAD:
                    waiting.popleft().result()
                waiting.append(writer.submit(self._store_span, number, data))
            for write in waiting:
                write.result()

    def commit(self) -> Path:
        """Commit: fsync, rename, manifest. The shard is listed from now on."""
        if not self.whole:
            raise Conflict(f"{label(self.manifest.key)} is not complete and cannot be committed")
        self._uncompared(self._some_uncompared)
        return self._part.publish(self.manifest)

    def close(self) -> None:
        """Close the file. An incomplete one is kept for a resumption; a committed shard stays committed."""
        self._part.close()

    def _check(self, number: int, data: memoryview) -> None:
        self._require(number, len(data), crc32c(data), None if self._local else self._digest(data))

    def _digest(self, data: memoryview | bytes) -> bytes:
        return blake3(data).digest() if self.manifest.span_blake3 else b""

    def _require(self, number: int, size: int, checksum: int, digest: bytes | None) -> None:
        """`digest`: None = not compared."""
        span, expected = self.spans[number], self.manifest.span_crc32c[number]
        where = f"{label(self.manifest.key)}: bytes {span.offset} to {span.offset + span.size}"
        if (size, checksum) != (span.size, expected):
            raise IntegrityError(f"{where} arrived damaged")
        if digest is not None and digest != self.manifest.blake3_of(number):
            raise IntegrityError(f"{where} arrived with the right checksum and a wrong digest: somebody has changed it")

    def _store_span(self, number: int, data: memoryview) -> None:
        self._part.store(data, self.spans[number].offset)
        self._count(number)

    def _count(self, number: int, *, uncompared: bool = False) -> None:
        with self._lock:
            self._some_uncompared |= uncompared
            self._done.add(number)
            while self._next in self._done:
                self._next += 1

    def _find_verified(self) -> None:
        """Verify the spans that an interrupted transfer has left, whose bytes may have come from another machine."""
        for number, (span, expected) in enumerate(zip(self.spans, self.manifest.span_crc32c, strict=True)):
            found = self._part.read(span.size, span.offset)
            if crc32c(found) == expected and self._digest(found) == self.manifest.blake3_of(number):
                self._count(number)
