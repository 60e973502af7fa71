"""CRC-32C of shards: one pass over the bytes computes the checksum of every span, of the tensors and of the file.

CRC-32C because object stores verify it and processors support it. The library releases the GIL, so several threads check a
large shard. Checksums of adjacent spans are combined arithmetically, without reading the bytes again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from holdfast.domain.errors import IntegrityError
from holdfast.replicator.threads import be_nice
from holdfast.shards import Manifest, Span, spans_of
from holdfast.shards.crc import summarise
from holdfast.stores.checksum import crc32c

Prefault = Callable[[int, int], None]  # offset, size
_PARALLEL_BYTES_MIN = 32 << 20  # smaller shards are not faster with threads


def require_consistent(manifest: Manifest) -> None:
    """Raises IntegrityError if the manifest's digest and file checksum do not follow from its spans. A digest from the
    supervisor therefore covers every span of the tensors."""
    if (manifest.digest, manifest.crc32c) != summarise(manifest.spans, manifest.span_crc32c, manifest.tensors_end):
        raise IntegrityError(f"the manifest of {manifest.key} contradicts itself: its checksums do not combine")


class Checksummer:
    """Computes and verifies checksums, with `threads` threads for large shards. Must not be called from its own threads.

    `nice`: at low priority, to slow training as little as possible.
    """

    def __init__(self, threads: int, *, nice: bool = False) -> None:
        self._pool = ThreadPoolExecutor(threads, "checksum", initializer=be_nice if nice else None)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def spans(
        self, data: memoryview, tensors_end: int, prefault: Prefault | None = None
    ) -> tuple[tuple[Span, ...], tuple[int, ...]]:
        spans = spans_of(len(data), tensors_end)
        return spans, self._sums(data, spans, prefault)

    def verify(self, manifest: Manifest, data: memoryview, prefault: Prefault | None = None) -> None:
        """Raises IntegrityError that names the first span that does not match the manifest. `prefault`: `Reader.prefault` where
        `data` is a mapped file."""
        if len(data) != manifest.size:
            raise IntegrityError(f"{manifest.key} has {len(data)} bytes, but its manifest states {manifest.size}")
        require_consistent(manifest)
        for span, found, expected in zip(
            manifest.spans, self._sums(data, manifest.spans, prefault), manifest.span_crc32c, strict=True
        ):
            if found != expected:
                raise IntegrityError(
                    f"{manifest.key} is corrupt in bytes {span.offset} to {span.offset + span.size}: "
                    f"checksum {found:08x} instead of {expected:08x}"
                )

    def _sums(self, data: memoryview, spans: tuple[Span, ...], prefault: Prefault | None) -> tuple[int, ...]:
        def one(span: Span) -> int:
            if prefault is not None:
                prefault(span.offset, span.size)
            return crc32c(data[span.offset : span.offset + span.size])

        if len(data) < _PARALLEL_BYTES_MIN:
            return tuple(map(one, spans))
        return tuple(self._pool.map(one, spans))
