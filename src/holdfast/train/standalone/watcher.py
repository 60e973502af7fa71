"""The watcher: a thread that handles POSIX signals even while the training thread is inside a collective, and takes part in
the agreement on a step to save.

SIGTERM: save, write the checkpoint to disk, exit with `worker.EXIT_INTERRUPTED`. SIGUSR1: save and continue. If a run does not
reach its next `run.checkpoint` within the grace period, it is ended as SIGTERM would have ended it. The same applies if other
ranks no longer answer, because torchrun sends SIGTERM to the remaining ranks after a crash, and waits for them."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from holdfast.domain.errors import Unavailable
from holdfast.train.standalone.agreement import Agreement

log = logging.getLogger("holdfast.train")

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
DISCONNECTED_POLL_S: Final = 0.1
SILENCE_POLLS_MAX: Final = 8  # the watcher of every running rank answers within two polls


_installed: weakref.WeakSet[Watcher] = weakref.WeakSet()


_forking = threading.local()


def _hold_signals() -> None:
    """Block the signals until a forked child has its own handlers. An earlier signal would wake its parent's watcher."""
    if _installed:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release_signals() -> None:
    mask, _forking.mask = getattr(_forking, "mask", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_in_child() -> None:
    """Restore the default handlers in a forked child: SIGTERM must end a data-loader worker and must not stop its parent."""
    for watcher in list(_installed):
        watcher.restore_signals()
    _release_signals()


os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_in_child)


class Watcher:
    """Create it on the main thread. On another thread Python handles no signals, and it only follows the other ranks."""

    def __init__(self, agreement: Agreement, grace_s: float, end: Callable[[int], None] = os._exit) -> None:
        self._agreement = agreement
        self._grace_s = grace_s
        self._end = end
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waiting = select.poll()  # unlike `select`, it takes descriptors from 1,024 on
        self._waiting.register(self._wake, select.POLLIN)
        self._closing = False
        self._handled: Counter[int] = Counter()  # counted by Python's handler, late
        self._woken: Counter[int] = Counter()  # counted by the wakeup descriptor, immediately
        self._asked: Counter[int] = Counter()
        self.deadline: float | None = None  # end of the grace period of a SIGTERM, monotonic
        # Results seen and whether one is awaited; `_progress_at` is the time of the last change.
        self._progress = (0, False)
        self._progress_at = 0.0
        self._previous: dict[int, Any] = {}
        self._previous_wakeup = -1
        self._install()
        self._thread = threading.Thread(target=self._run, name="holdfast-watcher", daemon=True)
        self._thread.start()

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "hf.launch runs outside of the main thread: SIGTERM and SIGUSR1 are not handled in this process"
            )
            return
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        # Python's C handler writes to this descriptor immediately; a Python handler runs only after the training
        # thread's present C call.
        self._previous_wakeup = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        _installed.add(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Count a signal, in case another library has replaced the wakeup descriptor. A signal that is counted in both ways
        is handled once."""
        self._handled[number] += 1

    def close(self) -> None:
        """Call this on the thread that created the watcher."""
        self.restore_signals()
        self._closing = True
        with contextlib.suppress(OSError):
            os.write(self._waker, b"\0")
        self._thread.join()
        os.close(self._wake)
        os.close(self._waker)

    def restore_signals(self) -> None:
        if self._previous:
            signal.set_wakeup_fd(self._previous_wakeup)
        while self._previous:
            signal.signal(*self._previous.popitem())
        _installed.discard(self)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        connected = True
        wait_s = 0.0
        while not self._closing:
            self._read_signals(wait_s)
            if self.deadline is None and self._arrived(signal.SIGTERM):
                self.deadline = time.monotonic() + self._grace_s
                log.warning("SIGTERM: saving within %g s, then exiting", self._grace_s)
            if why := self._hopeless():
                log.error("%s: exiting without a save", why)
                self._end(128 + signal.SIGTERM)
                return
            if not connected:
                wait_s = DISCONNECTED_POLL_S
                continue
            try:
                for number in filter(self._arrived, SIGNALS):
                    self._agreement.ask(leave=number == signal.SIGTERM)
                    self._asked[number] = max(self._handled[number], self._woken[number])
                wait_s = self._agreement.poll()
            except Unavailable as error:
                log.warning("emergency saves disabled: %s", error)
                connected = False

    def _hopeless(self) -> str:
        """Return why the save of a SIGTERM can no longer succeed; "" = it can, or there was no SIGTERM."""
        if self.deadline is None:
            return ""
        now = time.monotonic()
        if now > self.deadline:
            return f"the grace of {self._grace_s:g} s is over"
        progress = (self._agreement.verdicts, self._agreement.awaiting)
        if progress != self._progress or not self._agreement.awaiting:
            self._progress, self._progress_at = progress, now
        silence_s = SILENCE_POLLS_MAX * self._agreement.poll_s
        if now - self._progress_at > silence_s:
            return f"not every rank has answered within {silence_s:g} s"
        return ""

    def _arrived(self, number: int) -> bool:
        return max(self._handled[number], self._woken[number]) > self._asked[number]

    def _read_signals(self, wait_s: float) -> None:
        """Read the signals that have arrived; wait for at most `wait_s`."""
        self._waiting.poll(math.ceil(wait_s * 1000))
        with contextlib.suppress(BlockingIOError):
            self._woken.update(os.read(self._wake, 512))
