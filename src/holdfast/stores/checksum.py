"""CRC-32C, the checksum that object stores verify themselves."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import google_crc32c
import numpy as np

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bit-reversed

_Operator = tuple[int, ...]  # a 32 × 32 matrix over GF(2), one column per int


def crc32c(data: memoryview | bytes, before: int = 0) -> int:
    """Of `data`, continuing from the checksum `before` of what precedes it. Releases the GIL."""
    # The library takes numpy arrays without copying them, but refuses memory views.
    return int(google_crc32c.extend(before, np.frombuffer(data, dtype=np.uint8))) if len(data) else before


def of_parts(parts: Iterable[memoryview | bytes]) -> int:
    """The checksum of the concatenation."""
    value = 0
    for part in parts:
        value = crc32c(part, value)
    return value


def combine(pieces: Iterable[tuple[int, int]]) -> int:
    """The checksum of adjacent pieces from (checksum, bytes) of each, without looking at the bytes again."""
    whole = 0
    for value, nbytes in pieces:
        whole = _apply(_append_zeros(nbytes), whole) ^ value
    return whole


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
