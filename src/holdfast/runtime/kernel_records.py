"""The format of a line to write to a kernel log."""

from __future__ import annotations

import time


def kernel_record(line: str, *, device: bool) -> bytes:
    """Return the bytes of a line. /dev/kmsg takes "<priority>text" and adds the other fields; a plain file needs the complete
    record."""
    if device:
        return f"<3>{line}\n".encode()
    return f"3,0,{time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000},-;{line}\n".encode()
