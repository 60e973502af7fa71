"""Wait until a descriptor can be read. For descriptors from 1,024 on, `select.select` raises ValueError, and `select.poll` does
not."""

from __future__ import annotations

import math
import select
from typing import Final, Protocol

READY: Final = select.POLLIN | select.POLLHUP | select.POLLERR


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def readable(file: int | HasFileno, timeout_s: float | None) -> bool:
    """Return True as soon as `file` can be read or has ended (a pidfd: its process has), False after `timeout_s`; None = wait
    without a limit."""
    waiting = select.poll()
    waiting.register(file, READY)
    return bool(waiting.poll(None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)))
