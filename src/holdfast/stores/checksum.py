"""CRC-32C, the checksum that object stores verify themselves."""

from __future__ import annotations

from collections.abc import Iterable

import google_crc32c
import numpy as np

from holdfast.shards import crc


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
        whole = crc.combine(whole, value, nbytes)
    return whole
