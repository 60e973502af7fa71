"""Checksums of a shard with the available library: CRC-32C if `google_crc32c` can be imported, otherwise zlib's CRC-32.

The trainer library must work with torch and the standard library alone, and CRC-32C in pure Python would take minutes per
gigabyte. A manifest names the algorithm of its checksums (`checksum`), so the two are never confused."""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.domain.errors import IncompatibleVersion, IntegrityError
from holdfast.shards import Manifest, Span, crc

PIECE_BYTES = 1 << 20  # the GIL is held while a piece is copied; short enough not to delay a training thread


@dataclass(frozen=True, slots=True)
class Checksum:
    """One algorithm: `extend(value, data)` continues a checksum; `polynomial` is bit-reversed."""

    name: str
    polynomial: int
    extend: Callable[[int, bytes], int]

    def of(self, data: memoryview) -> int:
        value = 0
        for start in range(0, len(data), PIECE_BYTES):
            value = self.extend(value, bytes(data[start : start + PIECE_BYTES]))
        return value

    def summarise(self, spans: Iterable[Span], sums: Iterable[int], tensors_end: int) -> tuple[str, int]:
        """Return (digest of index and tensors, checksum of the file), combined from the checksums of the spans."""
        return crc.summarise(spans, sums, tensors_end, self.polynomial)


def _zlib_extend(value: int, data: bytes) -> int:
    return zlib.crc32(data, value)


CRC32 = Checksum("crc32", crc.ZLIB, _zlib_extend)


def _crc32c() -> Checksum | None:
    if importlib.util.find_spec("google_crc32c") is None:
        return None
    return Checksum("crc32c", crc.CASTAGNOLI, importlib.import_module("google_crc32c").extend)


def best() -> Checksum:
    """Return the algorithm that this process uses for new manifests."""
    return _crc32c() or CRC32


def named(name: str) -> Checksum:
    """Return the algorithm of a manifest. Raises IncompatibleVersion if it is not available in this process."""
    if name == CRC32.name:
        return CRC32
    found = _crc32c() if name == "crc32c" else None
    if found is None:
        raise IncompatibleVersion(f"the shard has {name} checksums, which need: pip install google-crc32c")
    return found


def verify(manifest: Manifest, data: memoryview) -> None:
    """Check every byte against the manifest. Raises IntegrityError that names the first span that does not match."""
    checksum = named(manifest.checksum)
    if len(data) != manifest.size:
        raise IntegrityError(f"{manifest.key} has {len(data)} bytes, but {manifest.size} according to its manifest")
    if (manifest.digest, manifest.crc32c) != checksum.summarise(
        manifest.spans, manifest.span_crc32c, manifest.tensors_end
    ):
        raise IntegrityError(f"the manifest of {manifest.key} contradicts itself: its checksums do not combine")
    for span, expected in zip(manifest.spans, manifest.span_crc32c, strict=True):
        found = checksum.of(data[span.offset : span.offset + span.size])
        if found != expected:
            raise IntegrityError(
                f"{manifest.key} is corrupt in bytes {span.offset} to {span.offset + span.size}: "
                f"checksum {found:08x} instead of {expected:08x}"
            )
