"""Memory pages of mapped files: mapping without holding a lock, and prefaulting."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

# Linux 5.14; Python's mmap module does not name them.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_PIECE_BYTES = 32 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def map_apart(fd: int, size: int, *, private: bool = False) -> mmap.mmap:
    """Map the file behind `fd` through another open file description than the one that carries the lock.

    A mapping keeps its file description alive, and Python's mmap a duplicate of its descriptor: mapped through `fd` itself,
    a lock would outlive its descriptor for as long as any tensor still looks at the mapping, or any forked child lives.
    """
    other = os.open(f"/proc/self/fd/{fd}", (os.O_RDONLY if private else os.O_RDWR) | os.O_CLOEXEC)
    try:
        if private:  # copy-on-write: views are writable, as torch wants them, and the file stays as it is
            return mmap.mmap(other, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return mmap.mmap(other, size)
    finally:
        os.close(other)


def populate(mapping: mmap.mmap, offset: int = 0, size: int | None = None, *, write: bool = True) -> bool:
    """Have these pages present (`write`: and this mapping's to write to); `offset` is a multiple of the page size.

    False on a kernel that does not know how. Raises OSError, also where there is no memory for a page that is new.

    Through libc, because mmap.madvise keeps the GIL for all of it: hundreds of milliseconds per gigabyte in which no other
    thread could go on. In pieces, because the kernel holds the address space's lock for each.
    """
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    end = len(mapping) if size is None else offset + size
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    for at in range(offset, end, _PIECE_BYTES):
        piece = ctypes.c_size_t(min(_PIECE_BYTES, end - at))
        if _libc.madvise(ctypes.c_void_p(start + at), piece, advice):
            if (code := ctypes.get_errno()) == errno.EINVAL:
                return False
            raise OSError(code, f"populating {size} bytes of a mapping: {os.strerror(code)}")
    return True
