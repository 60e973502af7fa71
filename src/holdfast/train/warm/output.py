"""Standard output and error of a worker, which are files on the node's disk: a disk that is full must not end the training.

What a script prints there is dropped while the disk has no room. Under torchrun the same `print` goes to a terminal or a
pipe, and no script expects it to raise.
"""

from __future__ import annotations

import errno
import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class _Lossy(io.FileIO):
    """A file whose writes succeed without an effect while its disk is full, or the quota is used up."""

    def write(self, data: ReadableBuffer, /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return memoryview(data).nbytes


def open_streams() -> None:
    """Open `sys.stdout` and `sys.stderr` anew on their descriptors. A line is written when it ends: a killed worker loses
    what is still in a buffer."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        raw = _Lossy(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=before.encoding, errors=before.errors, line_buffering=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
