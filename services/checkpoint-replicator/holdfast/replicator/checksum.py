"""Checksums and digests of shards: one pass over the bytes computes those of every span, of the tensors and of the file.

CRC-32C because object stores verify it and processors support it. The library releases the GIL, so several threads check a
large shard. Checksums of adjacent spans are combined arithmetically, without reading the bytes again.

A checksum finds damage by accident, and is compared wherever bytes are read. A digest (BLAKE3) also finds bytes that somebody
has changed deliberately. It is compared when bytes arrive from another machine or, for copies in memory that came over an
encrypted connection, when they are copied to disk or restored (`tiers.incoming`). It takes a few times as long as the checksum:
about 0.25 s per GB and thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from holdfast.domain.errors import IntegrityError
from holdfast.replicator.threads import be_nice
from holdfast.shards import Manifest, Span, spans_of
from holdfast.shards.crc import summarise
from holdfast.stores.checksum import crc32c

S = TypeVar("S")
T = TypeVar("T")

Prefault = Callable[[int, int], None]  # offset, size
_PARALLEL_BYTES_MIN = 32 << 20  # smaller shards are not faster with threads


def require_consistent(manifest: Manifest) -> None:
    """Raises IntegrityError if the manifest's digest and file checksum do not follow from its spans. A digest from the
    supervisor therefore covers every span of the tensors."""
    if (manifest.digest, manifest.crc32c) != summarise(manifest.spans, manifest.span_crc32c, manifest.tensors_end):
        raise IntegrityError(f"the manifest of {manifest.key} contradicts itself: its checksums do not combine")


@dataclass(frozen=True, slots=True)
class Sums:
    """What one pass over a shard has computed. `crc32c` is parallel to `spans`; `blake3` has the digests of all spans, or is
    empty."""

    spans: tuple[Span, ...]
    crc32c: tuple[int, ...]
    blake3: bytes = b""


class Checksummer:
    """Computes and verifies checksums, with `threads` threads for large shards. Must not be called from its own threads.

    `nice`: at low priority, to slow training as little as possible. `digests`: `sums` computes digests as well.
    """

    def __init__(self, threads: int, *, nice: bool = False, digests: bool = True) -> None:
        self._digests = digests
        self._pool = ThreadPoolExecutor(threads, "checksum", initializer=be_nice if nice else None)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def sums(self, data: memoryview, tensors_end: int, prefault: Prefault | None = None) -> Sums:
        """Compute the checksums of a shard and, unless they are switched off, its digests."""
        spans = spans_of(len(data), tensors_end)

        def both(span: Span) -> tuple[int, bytes]:
            content = _content(data, span, prefault)
            return crc32c(content), blake3(content).digest() if self._digests else b""

        found = self._each(both, spans, len(data))
        return Sums(spans, tuple(crc for crc, _ in found), b"".join(digest for _, digest in found))

    def verify(
        self, manifest: Manifest, data: memoryview, prefault: Prefault | None = None, *, digests: bool = False
    ) -> None:
        """Raises IntegrityError that names the first span that does not match the manifest. `prefault`: `Reader.prefault` where
        `data` is a mapped file. `digests`: compare them as well."""
        if len(data) != manifest.size:
            raise IntegrityError(f"{manifest.key} has {len(data)} bytes, but its manifest states {manifest.size}")
        require_consistent(manifest)
        digests &= bool(manifest.span_blake3)

        def look(numbered: tuple[int, Span]) -> str:
            number, span = numbered
            content, expected = _content(data, span, prefault), manifest.span_crc32c[number]
            if (found := crc32c(content)) != expected:
                return f"checksum {found:08x} instead of {expected:08x}"
            if digests and blake3(content).digest() != manifest.blake3_of(number):
                return "the right checksum and a wrong digest: somebody has changed the bytes"
            return ""

        spans = manifest.spans
        for span, wrong in zip(spans, self._each(look, tuple(enumerate(spans)), len(data)), strict=True):
            if wrong:
                raise IntegrityError(
                    f"{manifest.key} is corrupt in bytes {span.offset} to {span.offset + span.size}: {wrong}"
                )

    def _each(self, compute: Callable[[S], T], spans: Sequence[S], nbytes: int) -> list[T]:
        return list(map(compute, spans) if nbytes < _PARALLEL_BYTES_MIN else self._pool.map(compute, spans))


def _content(data: memoryview, span: Span, prefault: Prefault | None) -> memoryview:
    if prefault is not None:
        prefault(span.offset, span.size)
    return data[span.offset : span.offset + span.size]
