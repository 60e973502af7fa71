"""CRC-32C of shards: one pass over the bytes gives the checksum of every span, of the tensors and of the whole file.

CRC-32C because object stores verify it and processors compute it; the library releases the GIL, so a large shard is
checked by several threads. Checksums of adjacent spans are combined arithmetically instead of reading the bytes again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import google_crc32c
import numpy as np

from holdfast.domain.errors import IntegrityError
from holdfast.replicator.threads import be_nice
from holdfast.shards import Manifest, Span, spans_of

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bit-reversed
_PARALLEL_BYTES_MIN = 32 << 20  # below, threads cost more than they bring

_Operator = tuple[int, ...]  # a 32 × 32 matrix over GF(2), one column per int


def crc32c(data: memoryview | bytes) -> int:
    # The library takes numpy arrays without copying them, but refuses memory views.
    return int(google_crc32c.value(np.frombuffer(data, dtype=np.uint8))) if len(data) else 0


def combine(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two adjacent pieces from the checksums of each."""
    return _apply(_append_zeros(second_bytes), first) ^ second


def summarise(spans: tuple[Span, ...], sums: tuple[int, ...], tensors_end: int) -> tuple[str, int]:
    """(digest of index and tensors, checksum of the file) from the checksums of the spans."""
    whole = body = body_bytes = 0
    for index, (span, value) in enumerate(zip(spans, sums, strict=True)):
        whole = combine(whole, value, span.size) if index else value
        if index and span.offset < tensors_end:
            body = combine(body, value, span.size)
            body_bytes += span.size
    return f"{body:08x}-{body_bytes:x}", whole


def require_consistent(manifest: Manifest) -> None:
    """Raises IntegrityError unless the manifest's digest and file checksum follow from its spans: the digest that a
    supervisor names then vouches for every span of the tensors."""
    if (manifest.digest, manifest.crc32c) != summarise(manifest.spans, manifest.span_crc32c, manifest.tensors_end):
        raise IntegrityError(f"the manifest of {manifest.key} contradicts itself: its checksums do not combine")


class Checksummer:
    """Computes and verifies, with `threads` threads for what is large. Call from any thread but its own.

    `nice`: as background work, so that training feels little of it.
    """

    def __init__(self, threads: int, *, nice: bool = False) -> None:
        self._pool = ThreadPoolExecutor(threads, "checksum", initializer=be_nice if nice else None)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def spans(self, data: memoryview, tensors_end: int) -> tuple[tuple[Span, ...], tuple[int, ...]]:
        spans = spans_of(len(data), tensors_end)
        return spans, self._sums(data, spans)

    def verify(self, manifest: Manifest, data: memoryview) -> None:
        """Raises IntegrityError naming the first span that is not what the manifest says."""
        if len(data) != manifest.size:
            raise IntegrityError(f"{manifest.key} has {len(data)} bytes, its manifest says {manifest.size}")
        require_consistent(manifest)
        for span, found, expected in zip(
            manifest.spans, self._sums(data, manifest.spans), manifest.span_crc32c, strict=True
        ):
            if found != expected:
                raise IntegrityError(
                    f"{manifest.key} is corrupt in bytes {span.offset} to {span.offset + span.size}: "
                    f"checksum {found:08x} instead of {expected:08x}"
                )

    def _sums(self, data: memoryview, spans: tuple[Span, ...]) -> tuple[int, ...]:
        def one(span: Span) -> int:
            return crc32c(data[span.offset : span.offset + span.size])

        if len(data) < _PARALLEL_BYTES_MIN:
            return tuple(map(one, spans))
        return tuple(self._pool.map(one, spans))


def _apply(operator: _Operator, vector: int) -> int:
    result = 0
    for column in operator:
        if not vector:
            break
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


def _multiply(a: _Operator, b: _Operator) -> _Operator:
    return tuple(_apply(a, column) for column in b)


@lru_cache(maxsize=256)
def _append_zeros(nbytes: int) -> _Operator:
    """What appending `nbytes` zero bytes does to a checksum, by repeated squaring."""
    operator: _Operator = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # one zero bit
    for _ in range(3):
        operator = _multiply(operator, operator)  # one zero byte
    result: _Operator = tuple(1 << bit for bit in range(32))
    while nbytes:
        if nbytes & 1:
            result = _multiply(operator, result)
        operator = _multiply(operator, operator)
        nbytes >>= 1
    return result
