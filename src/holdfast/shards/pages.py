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
    """Map the file of `fd` through another open file description than the one with the lock.

    A mapping keeps its file description open, and Python's mmap keeps a duplicate of the descriptor. If the file were mapped
    through `fd` itself, the lock would be held until the last tensor view is released and the last forked child has exited.
    """
    other = os.open(f"/proc/self/fd/{fd}", (os.O_RDONLY if private else os.O_RDWR) | os.O_CLOEXEC)
    try:
        if private:  # copy-on-write: views are writable, as torch requires, and the file is not changed
            return mmap.mmap(other, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return mmap.mmap(other, size)
    finally:
        os.close(other)


def populate(mapping: mmap.mmap, offset: int = 0, size: int | None = None, *, write: bool = True) -> bool:
    """Fault in these pages (with `write`, for writing). `offset` is a multiple of the page size.

    Returns False if the kernel does not support this. Raises OSError, also if there is no memory for a new page.

    It calls libc, because mmap.madvise holds the GIL, which would stop all other threads for hundreds of milliseconds per
    gigabyte. It works in pieces, because the kernel locks the address space during each call.
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
