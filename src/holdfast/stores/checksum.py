"""CRC-32C, the checksum that object stores verify themselves."""

from __future__ import annotations

from collections.abc import Iterable

import google_crc32c
import numpy as np

from holdfast.shards import crc


def crc32c(data: memoryview | bytes, before: int = 0) -> int:
    """Return the checksum of `data`, continuing from the checksum `before` of the preceding bytes. Releases the GIL."""
    # The library accepts numpy arrays without a copy, but no memory views.
    return int(google_crc32c.extend(before, np.frombuffer(data, dtype=np.uint8))) if len(data) else before


def of_parts(parts: Iterable[memoryview | bytes]) -> int:
    """Return the checksum of the concatenation."""
    value = 0
    for part in parts:
        value = crc32c(part, value)
    return value


def combine(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the checksum of adjacent pieces from (checksum, bytes) of each, without reading the bytes again."""
    whole = 0
    for value, nbytes in pieces:
        whole = crc.combine(whole, value, nbytes)
    return whole
