"""Combines checksums of adjacent pieces without reading the bytes again.

A CRC is linear: appending zero bytes applies a 32 × 32 matrix over GF(2) to the checksum, and the checksum of the following
piece is then added by exclusive or (as in zlib's `crc32_combine`). So one pass over a shard gives the checksums of every span,
of the tensors and of the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from holdfast.shards.manifest import Span

CASTAGNOLI = 0x82F63B78  # CRC-32C, which object stores verify and processors compute; bit-reversed
ZLIB = 0xEDB88320  # CRC-32; bit-reversed

_Operator = tuple[int, ...]  # a matrix, one column per int


def combine(first: int, second: int, second_bytes: int, polynomial: int = CASTAGNOLI) -> int:
    """Return the checksum of two adjacent pieces from the checksum of each."""
    return _apply(_append_zeros(second_bytes, polynomial), first) ^ second


def summarise(
    spans: Iterable[Span], sums: Iterable[int], tensors_end: int, polynomial: int = CASTAGNOLI
) -> tuple[str, int]:
    """Return (digest of index and tensors, checksum of the file) from the checksums of the spans."""
    whole = body = body_bytes = 0
    for span, value in zip(spans, sums, strict=True):
        whole = combine(whole, value, span.size, polynomial)
        if 0 < span.offset < tensors_end:
            body = combine(body, value, span.size, polynomial)
            body_bytes += span.size
    return f"{body:08x}-{body_bytes:x}", whole


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
def _append_zeros(nbytes: int, polynomial: int) -> _Operator:
    """Return the matrix that appending `nbytes` zero bytes applies to a checksum, by repeated squaring."""
    operator: _Operator = (polynomial, *(1 << bit for bit in range(31)))  # one zero bit
    for _ in range(3):
        operator = _multiply(operator, operator)  # one zero byte
    result: _Operator = tuple(1 << bit for bit in range(32))
    while nbytes:
        if nbytes & 1:
            result = _multiply(operator, result)
        operator = _multiply(operator, operator)
        nbytes >>= 1
    return result
