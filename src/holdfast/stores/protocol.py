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

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,254}", re.ASCII)  # a leading dot is a store's own: temporaries

Pace = Callable[[int], None]  # called with the bytes that are to be sent next; returns when they may be


def unpaced(_nbytes: int) -> None:
    """No limit."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object. `crc32c` is None where the store does not keep one."""

    key: str
    size: int
    crc32c: int | None
    updated_at: float  # Unix s, by the store's clock


class ObjectStore(Protocol):
    @property
    def url(self) -> str:
        """As `open_store` takes it."""

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
        """Fill `target` with the object's bytes from `offset` on, straight into it.

        The content is what came over the wire: the caller verifies it. Raises NotFound, IntegrityError when the object is
        shorter than that, Unavailable.
        """

    def read(self, key: str, size_max: int) -> bytes:
        """Read a small object. Raises NotFound, IntegrityError if it is larger than `size_max`, Unavailable."""

    def stat(self, key: str) -> ObjectInfo | None:
        """None = no such object. Raises Unavailable."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, in the order of keys. Raises Unavailable."""

    def delete(self, key: str) -> None:
        """Delete the object if it exists. Raises Unavailable."""

    def close(self) -> None:
        """Give up connections. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A store's address, taken apart. `file`: no bucket, the prefix is a directory; else the prefix is "" or without slashes
    at its ends."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix.lstrip('/')}" if self.prefix else "")


@dataclass(frozen=True, slots=True)
class StoreKind:
    """One kind of object store: how its URLs look and how one is opened. All that the rest of Holdfast knows of it.

    `open` reads and writes nothing yet; it raises `InvalidSpec` when a package that it needs is not installed.
    """

    example: str  # "gs://bucket/prefix", for messages
    is_valid: Callable[[StoreUrl], bool]  # looks at the text only
    open: Callable[[StoreUrl], ObjectStore]


def check_key(key: str) -> str:
    """`key` itself. Raises InvalidSpec for one that could lead outside of the store or collide with its temporaries."""
    if len(key) > KEY_BYTES_MAX or not all(map(_SEGMENT.fullmatch, key.split("/"))):
        raise InvalidSpec("key", key, "segments of letters, digits and ._=- separated by single slashes")
    return key
