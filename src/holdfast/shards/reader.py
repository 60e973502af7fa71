"""Reads a shard: tensors as memory views into the mapped file, without a copy and without torch.

A reader holds LOCK_SH from opening to closing, so an image is not overwritten in that time. It checks the structure (state,
header, index, size) but not the checksums of the payload, which the process that returned the path has verified. For other
paths, call `verify`."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from holdfast.domain.errors import Conflict, IntegrityError
from holdfast.domain.generations import ShardKey
from holdfast.shards.layout import PAGE, Header, parse_header
from holdfast.shards.manifest import Manifest
from holdfast.shards.opening import open_stored
from holdfast.shards.pages import map_apart, populate
from holdfast.shards.slots import Slot, TensorSpec, read_index

# Errors of madvise: a page that would raise SIGBUS, a page with broken memory, and errors of the medium.
_UNREADABLE = (errno.EFAULT, 133, errno.EIO)  # 133: EHWPOISON, which Python does not define


def peek(path: Path, *, owners: Collection[int] | None = None) -> Header | None:
    """Read the header without a lock: a hint, to be checked again under the lock. None = no complete content.

    `owners`: as of `open_stored`. Raises FileNotFoundError, IntegrityError, IncompatibleVersion, OSError.
    """
    fd = open_stored(path, owners=owners)
    try:
        return parse_header(os.pread(fd, PAGE, 0))
    finally:
        os.close(fd)


class Reader:
    """An open shard. Use it as a context manager.

    Raises FileNotFoundError; Conflict if the shard is incomplete or being written; IntegrityError if it is damaged or is not
    the `expected` shard; IncompatibleVersion for another layout.
    """

    def __init__(self, path: Path, expected: ShardKey | None = None, *, owners: Collection[int] | None = None) -> None:
        """`owners`: as of `open_stored`."""
        self.path = path
        self._fd = open_stored(path, owners=owners)
        try:
            self._lock()
            self.header = self._check(expected)
            self._map = map_apart(self._fd, self.header.size, private=True)
            self._bytes = memoryview(self._map)
            self._specs, self._slots = self._read_index()
        except BaseException:
            os.close(self._fd)
            raise
        self._at = {spec.fqn: (spec, slot) for spec, slot in zip(self._specs, self._slots, strict=True)}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. Views stay valid, but an image may be overwritten from now on."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def key(self) -> ShardKey:
        """Attempt, step and rank of the save."""
        return self.header.stamp.key

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of the shard, in the order of its index."""
        return self._specs

    @property
    def data(self) -> memoryview:
        """The complete shard, exactly `header.size` bytes."""
        return self._bytes

    @property
    def extra(self) -> bytes:
        """A copy of the non-tensor state, pickled by the trainer."""
        return bytes(self._bytes[self.header.tensors_end : self.header.size])

    def view(self, fqn: str) -> memoryview:
        """Return the bytes of one tensor. Raises KeyError if the shard has no tensor of that name."""
        spec, slot = self._at[fqn]
        return self._bytes[slot.payload : slot.payload + spec.nbytes]

    def slot(self, fqn: str) -> Slot:
        """Return the location of a tensor in the file. Raises KeyError if the shard has no tensor of that name."""
        return self._at[fqn][1]

    def spec(self, fqn: str) -> TensorSpec:
        """Raises KeyError if the shard has no tensor of that name."""
        return self._at[fqn][0]

    def items(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Yield each tensor with a view of its bytes. After `close`, an image may be overwritten."""
        for spec in self._specs:
            yield spec, self.view(spec.fqn)

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._at

    def populate(self) -> None:
        """Fill the page tables, from another thread than the one that reads the shard, because page faults take half of the
        time of a copy out of a new mapping."""
        populate(self._map, write=False)

    def prefault(self, offset: int, size: int) -> None:
        """Read these bytes from the medium now. Raises IntegrityError if that fails; a read through the mapping would then kill
        the process with SIGBUS. Has no effect before Linux 5.14."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            populate(self._map, start, min(offset + size, len(self._map)) - start, write=False)
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            raise IntegrityError(
                f"{self.path} cannot be read in bytes {offset} to {offset + size}: the medium is damaged, or the file truncated"
            ) from error

    def verify(self, crc32c: Callable[[memoryview], int]) -> bool:
        """Compare every byte with the manifest next to the file. Returns False if there is no manifest of this save.

        The manifest of an image may be of an earlier save into the same image, and is then ignored. Raises IntegrityError if
        the manifest is damaged, belongs to another shard, or does not match the bytes.
        """
        image = self.path.suffix == ".image"
        sibling = self.path.with_name(f"{self.path.name}.json") if image else self.path.with_suffix(".json")
        try:
            manifest = Manifest.read(sibling)
        except FileNotFoundError:
            return False
        if not manifest.describes(self.header):
            if image:
                return False
            raise IntegrityError(f"{self.path} and its manifest are of different shards")
        self.prefault(0, self.header.size)
        manifest.verify(self._bytes, crc32c)
        return True

    def allow(self, uid: int, gid: int) -> None:
        """Let the user `uid`, who is a member of the group `gid`, read the file. Raises OSError if it is another user's."""
        if os.fstat(self._fd).st_uid != uid:
            os.fchown(self._fd, -1, gid)
            os.fchmod(self._fd, 0o640)

    def still_whole(self) -> bool:
        """Return whether the header is unchanged since opening; writers that respect the locks cannot change it."""
        return parse_header(os.pread(self._fd, PAGE, 0)) == self.header

    # ------------------------------------------------------------ opening

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(f"{self.path} is being written") from error

    def _check(self, expected: ShardKey | None) -> Header:
        header = parse_header(os.pread(self._fd, PAGE, 0))
        if header is None:
            raise Conflict(f"{self.path} does not contain a complete shard")
        if expected is not None and header.stamp.key != expected:
            raise IntegrityError(f"{self.path} contains {header.stamp.key}, not {expected}")
        if (size := os.fstat(self._fd).st_size) < header.size:
            raise IntegrityError(f"{self.path} is truncated: {size} of {header.size} bytes")
        return header

    def _read_index(self) -> tuple[tuple[TensorSpec, ...], tuple[Slot, ...]]:
        self.prefault(PAGE, self.header.index_size)
        raw = bytes(self._bytes[PAGE : PAGE + self.header.index_size])
        if zlib.crc32(raw) != self.header.index_crc:
            raise IntegrityError(f"{self.path}: the index is damaged, its checksum does not match")
        return read_index(raw, self.header.tensors_end)
