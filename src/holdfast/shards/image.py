"""A memory image: a shard file in memory (tmpfs), preallocated, permanently mapped, written repeatedly.

Access is controlled by `flock` alone, so that a process that exits releases its locks:

* the trainer takes LOCK_EX without waiting to overwrite an image, and releases it when the image is complete;
* a reader (the replicator, a restoring trainer) holds LOCK_SH for as long as it needs the bytes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
import zlib
from pathlib import Path

from holdfast.domain.errors import Conflict, IntegrityError, OutOfSpace
from holdfast.shards.layout import (
    BODY_OFFSET,
    COMPLETE,
    MAGIC,
    PAGE,
    STATE_OFFSET,
    WRITING,
    Header,
    Stamp,
    pack_header,
    parse_body,
    parse_header,
)
from holdfast.shards.opening import open_stored
from holdfast.shards.pages import map_apart, populate
from holdfast.shards.slots import Layout, Plan, lay_out, read_index

_open: weakref.WeakSet[Image] = weakref.WeakSet()


def _close_inherited() -> None:
    """Close images in a forked child (a data-loader worker), which would keep the locks of a trainer killed while saving."""
    for image in list(_open):
        image.close()


os.register_at_fork(after_in_child=_close_inherited)


class Image:
    """One image, open for writing. Create it with `create` or `open`.

    A save is `try_lock` → `begin` → fill every `view` → `write_extra` → `complete`. After an exception in between, call
    `abandon`; the image then has no content.
    """

    def __init__(self, path: Path, fd: int, layout: Layout) -> None:
        self.path = path
        self._fd = fd
        self._layout = layout
        self._map = map_apart(fd, layout.size_max)
        self._bytes = memoryview(self._map)
        self._at = {
            spec.fqn: (slot.payload, spec.nbytes) for spec, slot in zip(layout.tensors, layout.slots, strict=True)
        }
        self._sequence = 0
        self._stamp: Stamp | None = None  # while a save is in progress
        self._extra_size = 0
        # A fork must not copy the page tables of a large image, and the child must not be able to write to it.
        self._map.madvise(mmap.MADV_DONTFORK)
        _open.add(self)

    @classmethod
    def create(cls, path: Path, plan: Plan) -> Image:
        """Create an empty image with all pages allocated, so that later writes cause neither slow page faults nor SIGBUS.

        Raises OutOfSpace, with the sizes, if the file system has no room; no file is left in this case.
        """
        layout = lay_out(plan)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _allocate(fd, path, layout.size_max)
            image = cls(path, fd, layout)
            image._populate(fresh=True)
            image._write_around(layout)
            image._bytes[STATE_OFFSET:BODY_OFFSET] = WRITING
            image._bytes[: len(MAGIC)] = MAGIC
        except BaseException:
            os.unlink(path)
            os.close(fd)
            raise
        return image

    @classmethod
    def open(cls, path: Path) -> Image:
        """Open an image that an earlier process has left, complete or not.

        Raises FileNotFoundError, IntegrityError if the image was never complete or is damaged (it can only be replaced),
        IncompatibleVersion for another layout.
        """
        fd = open_stored(path, os.O_RDWR)
        try:
            header = parse_body(os.pread(fd, PAGE, 0))
            layout = _layout_of(fd, header, os.fstat(fd).st_size)
            image = cls(path, fd, layout)
        except BaseException:
            os.close(fd)
            raise
        image._sequence = header.sequence
        image._populate(fresh=False)
        return image

    # ------------------------------------------------------------ reading

    @property
    def header(self) -> Header | None:
        """Return the header of the image; None if it has no complete content."""
        return parse_header(bytes(self._bytes[:PAGE]))

    def fits(self, layout: Layout) -> bool:
        """Whether a save of this layout can go into this image."""
        mine = self._layout
        return mine.index == layout.index and mine.extra_reserve >= layout.extra_reserve

    @property
    def in_place(self) -> bool:
        """Whether the path still refers to this file. The replicator may have quarantined or deleted it."""
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return False
        mine = os.fstat(self._fd)
        return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)

    # ------------------------------------------------------------ writing

    def try_lock(self) -> bool:
        """Lock the image for overwriting. Returns False if a process is reading it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Release the lock without changing the content."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def begin(self, stamp: Stamp) -> None:
        """Begin a save. The image has no content until `complete`. The caller holds the lock."""
        stamp.encode()  # a stamp that does not fit must fail before the old content is overwritten
        self._bytes[STATE_OFFSET:BODY_OFFSET] = WRITING
        self._stamp = stamp
        self._extra_size = 0

    @property
    def buffer(self) -> memoryview:
        """Return the complete mapping, at a fixed address for the lifetime of the image, for pinning."""
        return self._bytes

    def view(self, fqn: str) -> memoryview:
        """Return the writable bytes of one tensor."""
        offset, nbytes = self._at[fqn]
        return self._bytes[offset : offset + nbytes]

    def write_extra(self, extra: bytes) -> None:
        """Write the extra state. Raises Conflict if it exceeds the reserve."""
        if len(extra) > self._layout.extra_reserve:
            raise Conflict(
                f"{self.path}: {len(extra)} bytes of extra state exceed the reserve of {self._layout.extra_reserve}"
            )
        start = self._layout.tensors_end
        self._bytes[start : start + len(extra)] = extra
        self._extra_size = len(extra)

    def complete(self) -> Header:
        """Make the save visible, and release the lock."""
        if self._stamp is None:
            raise Conflict(f"{self.path}: complete() without begin()")
        self._sequence += 1
        header = Header(
            stamp=self._stamp,
            sequence=self._sequence,
            index_size=len(self._layout.index),
            index_crc=zlib.crc32(self._layout.index),
            tensors_end=self._layout.tensors_end,
            extra_size=self._extra_size,
        )
        body = pack_header(header)
        self._bytes[BODY_OFFSET : BODY_OFFSET + len(body)] = body
        self._bytes[STATE_OFFSET:BODY_OFFSET] = COMPLETE
        self._stamp = None
        self.unlock()
        return header

    def abandon(self) -> None:
        """Abandon a save. The image has no content and can be used again."""
        self._stamp = None
        self.unlock()

    def close(self) -> None:
        """Close the file. The mapping is released with its last view."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _open.discard(self)

    def _write_around(self, layout: Layout) -> None:
        """Write the parts that saves do not change: the index, and the bytes around the payloads."""
        self._bytes[PAGE : PAGE + len(layout.index)] = layout.index
        for spec, slot in zip(layout.tensors, layout.slots, strict=True):
            after = slot.payload + spec.nbytes
            self._bytes[slot.offset : slot.payload] = spec.envelope.prefix
            self._bytes[after : slot.offset + slot.length] = spec.envelope.suffix

    def _populate(self, *, fresh: bool) -> None:
        """Cause the page faults now instead of in the first save, whose stall would be 10 times as long."""
        # On an older kernel, touch every page of a new image. An existing image causes only minor faults.
        if not populate(self._map) and fresh:
            self._map[::PAGE] = bytes(len(range(0, len(self._map), PAGE)))


def _allocate(fd: int, path: Path, size: int) -> None:
    """Allocate the space, because a write to a mapping of a full tmpfs would kill the process with SIGBUS."""
    stat = os.statvfs(path.parent)
    free = stat.f_bavail * stat.f_frsize
    full = OutOfSpace(
        f"no room for a shard image of {size} bytes at {path}: {free} of {stat.f_blocks * stat.f_frsize} bytes are free "
        "there; two images per worker are needed"
    )
    if stat.f_blocks and free < size:  # otherwise each failing allocation would first fill the tmpfs, for seconds
        raise full
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        raise full from error


def _layout_of(fd: int, header: Header, file_size: int) -> Layout:
    """Read the layout of an existing image from the file."""
    index = os.pread(fd, header.index_size, PAGE) if file_size >= header.size else b""
    if file_size < header.size or zlib.crc32(index) != header.index_crc:
        raise IntegrityError("the shard is truncated or its index is damaged")
    tensors, slots = read_index(index, header.tensors_end)
    return Layout(tensors, slots, index, header.tensors_end, file_size - header.tensors_end)
