"""Bounds on the processor time and the memory of one call, measured by the kernel."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


class TooSlow(AssertionError):
    """A call took more processor time than its bound."""


class TooLarge(AssertionError):
    """The process grew by more than the bound during a call."""


class _Expired(BaseException):
    """Raised in the call itself. Not an `Exception`, so that no handler of the code under test catches it."""


@contextmanager
def bounded(cpu_s_max: float, growth_bytes_max: int) -> Iterator[None]:
    """Raises `TooSlow` or `TooLarge`. Only in the main thread. A call that stays in C code is interrupted when it returns to
    Python; the caller needs a deadline of its own for one that never does."""
    before = signal.signal(signal.SIGPROF, _expire)
    _CLEAR.write_text(_RESET_PEAK)
    start = _resident_bytes("VmRSS")
    signal.setitimer(signal.ITIMER_PROF, cpu_s_max, 0.1)
    try:
        yield
    except _Expired:
        raise TooSlow(f"more than {cpu_s_max:g} s of processor time") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
    grown = _resident_bytes("VmHWM") - start
    if grown > growth_bytes_max:
        raise TooLarge(f"memory grew by {grown >> 20} MiB, more than {growth_bytes_max >> 20} MiB")


def _expire(_number: int, _frame: FrameType | None) -> None:
    raise _Expired


def _resident_bytes(field: str) -> int:
    text = _STATUS.read_text()
    start = text.index(field + ":") + len(field) + 1
    return int(text[start : text.index("kB", start)]) << 10
