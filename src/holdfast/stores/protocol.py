"""The interface of an object store: seven methods, the same for a bucket, a shared file system and a test.

A store holds objects under keys: an object appears atomically, or not at all. Every method is synchronous and
thread-safe; callers in an event loop use a worker thread. Errors:

* `NotFound`        there is no object with that key
* `Unavailable`     the store does not answer in time; a later attempt may succeed. Methods have already retried
* `IntegrityError`  bytes do not match their checksum
* `OutOfSpace`      the store is full; no partial object remains
* `InvalidSpec`     an invalid URL or key, or a store that denies access; another attempt cannot succeed
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.domain.errors import InvalidSpec

KEY_BYTES_MAX = 1024  # of Google Cloud Storage

# Keys with a leading dot are reserved for a store's temporary files.
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,254}", re.ASCII)

Pace = Callable[[int], None]  # called with the number of bytes to send next; returns when they may be sent


def unpaced(_nbytes: int) -> None:
    """A pace without a limit."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object. `crc32c` is None if the store does not record it."""

    key: str
    size: int
    crc32c: int | None
    updated_at: float  # Unix s, by the store's clock


class ObjectStore(Protocol):
    """A store of objects under keys. The module describes its guarantees and errors."""

    @property
    def url(self) -> str:
        """URL for `open_store`."""

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        *,
        crc32c: int,
        if_absent: bool = False,
        pace: Pace = unpaced,
    ) -> bool:
        """Store the concatenated `parts`, verified end to end against their CRC-32C; replaces an existing object.

        With `if_absent`, returns False if the key exists, and leaves the object unchanged; exactly one of several writers gets
        True. Raises IntegrityError if the parts do not match `crc32c`, OutOfSpace, Unavailable."""

    def read_into(self, key: str, target: memoryview, offset: int = 0) -> None:
        """Read the object's bytes from `offset` on directly into `target`.

        The bytes are not verified; the caller does that. Raises NotFound, IntegrityError if the object is too short,
        Unavailable.
        """

    def read(self, key: str, size_max: int) -> bytes:
        """Read a small object. Raises NotFound, IntegrityError if it is larger than `size_max`, Unavailable."""

    def stat(self, key: str) -> ObjectInfo | None:
        """Return information about an object; None if it does not exist. Raises Unavailable."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Return every object whose key starts with `prefix`, sorted by key. Raises Unavailable."""

    def delete(self, key: str) -> None:
        """Delete the object if it exists. Raises Unavailable."""

    def close(self) -> None:
        """Close connections. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The parts of a store's URL. `file`: no bucket, and the prefix is a directory. Otherwise the prefix is "" or has no slash
    at its ends."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix.lstrip('/')}" if self.prefix else "")


@dataclass(frozen=True, slots=True)
class StoreKind:
    """One kind of object store: the form of its URLs and how to open one. Other code does not depend on the kind.

    `open` does no I/O. It raises `InvalidSpec` if a package that it needs is not installed.
    """

    example: str  # "gs://bucket/prefix", for messages
    is_valid: Callable[[StoreUrl], bool]  # checks only the text
    open: Callable[[StoreUrl], ObjectStore]


def check_key(key: str) -> str:
    """Return `key`. Raises InvalidSpec if it could lead outside of the store or collide with its temporary files."""
    if len(key) > KEY_BYTES_MAX or not all(map(_SEGMENT.fullmatch, key.split("/"))):
        raise InvalidSpec("key", key, "segments of letters, digits and ._=- separated by single slashes")
    return key
