"""An object store in memory with injected faults, for tests. It is part of the package so that users can test their own code
with it, and passes the same contract suite as the other stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import RLock

from holdfast.domain.errors import HoldfastError, IntegrityError, NotFound, OutOfSpace, Unavailable
from holdfast.stores.checksum import crc32c as checksum
from holdfast.stores.protocol import ObjectInfo, Pace, check_key, unpaced

PIECE_BYTES = 1 << 20  # unit of the rate limit


@dataclass(slots=True)
class Fault:
    """A fault: the calls that fail, how, and how often. `answer_lost`: the call is executed, and only its answer is lost."""

    error: HoldfastError
    operation: str = ""  # "put", "read_into", "read", "stat", "list", "delete"; "" = any
    key_part: str = ""  # substring of the key
    times: int = 1
    answer_lost: bool = False

    def applies(self, operation: str, key: str, *, after: bool) -> bool:
        matches = self.answer_lost == after and self.operation in ("", operation) and self.key_part in key
        return matches and self.times > 0


@dataclass(slots=True)
class InMemory:
    """`capacity_bytes`: limit, beyond which OutOfSpace is raised. `down`: every call fails. `before`: called first with the
    operation and key of each call; it may block or raise. `calls` records the calls."""

    url: str = "memory://store"
    capacity_bytes: int | None = None
    down: bool = False
    before: Callable[[str, str], None] | None = None
    clock: Callable[[], float] = time.time
    faults: list[Fault] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    _objects: dict[str, tuple[bytes, ObjectInfo]] = field(default_factory=dict)
    _lock: RLock = field(default_factory=RLock)

    # ------------------------------------------------------------ the protocol

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        *,
        crc32c: int,
        if_absent: bool = False,
        pace: Pace = unpaced,
    ) -> bool:
        self._enter("put", check_key(key))
        content = b"".join(_paced(parts, pace))
        with self._lock:
            if checksum(content) != crc32c:
                raise IntegrityError(f"{key}: the bytes do not match their checksum {crc32c:08x}")
            absent = not (if_absent and key in self._objects)
            if absent:
                self._make_room(key, len(content))
                self._objects[key] = content, ObjectInfo(key, len(content), crc32c, self.clock())
        self._leave("put", key)
        return absent

    def read_into(self, key: str, target: memoryview, offset: int = 0) -> None:
        self._enter("read_into", check_key(key))
        content = self._content(key)[offset : offset + len(target)]
        if len(content) < len(target):
            raise IntegrityError(f"{key} ends before byte {offset + len(target)}")
        target[:] = content
        self._leave("read_into", key)

    def read(self, key: str, size_max: int) -> bytes:
        self._enter("read", check_key(key))
        content = self._content(key)
        if len(content) > size_max:
            raise IntegrityError(f"{key} has {len(content)} bytes, more than the limit of {size_max}")
        self._leave("read", key)
        return content

    def stat(self, key: str) -> ObjectInfo | None:
        self._enter("stat", check_key(key))
        with self._lock:
            found = self._objects.get(key)
        self._leave("stat", key)
        return found[1] if found else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._enter("list", prefix)
        with self._lock:
            found = [info for key, (_, info) in sorted(self._objects.items()) if key.startswith(prefix)]
        self._leave("list", prefix)
        return iter(found)

    def delete(self, key: str) -> None:
        self._enter("delete", check_key(key))
        with self._lock:
            self._objects.pop(key, None)
        self._leave("delete", key)

    def close(self) -> None:
        """No-op: stored objects remain."""

    # ------------------------------------------------------------ faults

    def fail(self, error: HoldfastError | None = None, **which: object) -> None:
        """Inject a fault: `store.fail(operation="put", key_part=".tensors", times=3)`; see `Fault`."""
        self.faults.append(Fault(error or Unavailable("HTTP 503: try again later"), **which))  # type: ignore[arg-type]

    def rot(self, key: str, offset: int) -> None:
        """Flip a bit of a stored object without changing its metadata."""
        content, info = self._objects[key]
        changed = bytearray(content)
        changed[offset] ^= 1
        self._objects[key] = bytes(changed), info

    def truncate(self, key: str, size: int) -> None:
        content, info = self._objects[key]
        self._objects[key] = content[:size], info

    # ------------------------------------------------------------ inside

    def _enter(self, operation: str, key: str) -> None:
        with self._lock:
            self.calls.append((operation, key))
        if self.before is not None:
            self.before(operation, key)
        if self.down:
            raise Unavailable(f"{self.url} does not answer")
        self._raise_fault(operation, key, after=False)

    def _leave(self, operation: str, key: str) -> None:
        self._raise_fault(operation, key, after=True)

    def _raise_fault(self, operation: str, key: str, *, after: bool) -> None:
        with self._lock:
            for fault in self.faults:
                if fault.applies(operation, key, after=after):
                    fault.times -= 1
                    raise fault.error

    def _content(self, key: str) -> bytes:
        with self._lock:
            if key not in self._objects:
                raise NotFound(f"{key} does not exist in {self.url}")
            return self._objects[key][0]

    def _make_room(self, key: str, nbytes: int) -> None:
        if self.capacity_bytes is None:
            return
        held = sum(info.size for other, (_, info) in self._objects.items() if other != key)
        if held + nbytes > self.capacity_bytes:
            raise OutOfSpace(
                f"{key} needs {nbytes} bytes; {self.capacity_bytes - held} of {self.capacity_bytes} are free in {self.url}"
            )


def _paced(parts: Sequence[memoryview | bytes], pace: Pace) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            pace(len(piece))
            yield piece
