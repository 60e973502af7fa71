"""Restarts the parts of a stack when they exit: immediately the first time, then after growing delays, with a message.

A part that is stopped (SIGSTOP) is reported as well, and replaced if that loses no data.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.markup import escape

from holdfast.cli.processes import is_stopped, kill_tree
from holdfast.domain.errors import HoldfastError
from holdfast.runtime.processes.survivors import UNKNOWN_EXIT

DELAY_S_FIRST = 1.0
DELAY_S_MAX = 30.0
SETTLED_S = 60.0  # after this time a part counts as recovered, and its next exit is the first in a row
NAMED_AFTER = 3  # exits in a row from which on the end of the part's log is shown
FROZEN_SAID_S = 2.0
FROZEN_REPLACED_S = 30.0  # leaves time to inspect the stopped process
LOG_LINES = 15
LOG_BYTES_MAX = 64 << 10


@dataclass(slots=True)
class Restarts:
    """Decides when a part is restarted. Pure: times are passed in, in monotonic seconds."""

    started_at: float
    in_a_row: int = 0
    due_at: float | None = None  # set after an exit: the time of the restart

    def ended(self, at: float) -> float:
        """Record an exit. Returns the seconds until the restart."""
        self.in_a_row = 1 if at - self.started_at >= SETTLED_S else self.in_a_row + 1
        delay_s = 0.0 if self.in_a_row == 1 else min(DELAY_S_FIRST * 2.0 ** min(self.in_a_row - 2, 16), DELAY_S_MAX)
        self.due_at = at + delay_s
        return delay_s

    def started(self, at: float) -> None:
        self.started_at, self.due_at = at, None

    @property
    def shows_log(self) -> bool:
        """True at the third exit in a row and each time that their number has doubled, to limit the output."""
        return self.in_a_row == NAMED_AFTER or (self.in_a_row > NAMED_AFTER and self.in_a_row.bit_count() == 1)


@dataclass(frozen=True, slots=True)
class Part:
    """One process of a stack. `exit_code` is None while it runs; `start` restarts it in place and returns its pid.

    `pid` is called only while it runs. `keeps` describes what killing it would lose; empty: nothing.
    """

    name: str
    exit_code: Callable[[], int | None]
    start: Callable[[], int]
    log: Path
    pid: Callable[[], int | None] = lambda: None
    keeps: str = ""


@dataclass(slots=True)
class Tender:
    """Restarts parts. `say` receives one line of markup."""

    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    is_stopped: Callable[[int], bool] = is_stopped
    kill: Callable[[int], None] = kill_tree
    _restarts: dict[str, Restarts] = field(default_factory=dict)
    _frozen: dict[str, tuple[float, bool]] = field(default_factory=dict)  # part → (since when, whether reported)

    def tend(self, part: Part) -> bool:
        """Restart the part if it has exited and its delay is over. Returns whether it runs."""
        at = self.clock()
        restarts = self._restarts.setdefault(part.name, Restarts(at))
        if (code := part.exit_code()) is None:
            if restarts.due_at is not None:  # started by other code
                restarts.started(at)
            self._check_frozen(part, at)
            return True
        self._frozen.pop(part.name, None)
        if restarts.due_at is None:
            self._report_exit(part, code, restarts, restarts.ended(at))
        if restarts.due_at is not None and at < restarts.due_at:
            return False
        try:
            pid = part.start()
        except (HoldfastError, OSError, subprocess.SubprocessError) as error:
            self.say(f"[red]{part.name}[/] could not be restarted: {escape(str(error))}")
            restarts.ended(at)
            return False
        restarts.started(at)
        self.say(f"[green]{part.name}[/] restarted (pid {pid})")
        return True

    def _check_frozen(self, part: Part, at: float) -> None:
        pid = part.pid()
        since, said = self._frozen.get(part.name, (at, False))
        if pid is None or not self.is_stopped(pid):
            if self._frozen.pop(part.name, None) is not None and said:
                self.say(f"[green]{part.name}[/] runs again after {at - since:.0f} s")
            return
        if not said and at - since >= FROZEN_SAID_S:
            said = True
            then = (
                f"it will not be replaced, because {part.keeps}"
                if part.keeps
                else f"it will be replaced after {FROZEN_REPLACED_S:.0f} s"
            )
            self.say(
                f"[yellow]{part.name}[/] (pid {pid}) is stopped by a signal (SIGSTOP). To continue it: kill -CONT {pid}; {then}"
            )
        self._frozen[part.name] = since, said
        if not part.keeps and at - since >= FROZEN_REPLACED_S:
            self.kill(pid)  # its exit is handled by the next call

    def _report_exit(self, part: Part, code: int, restarts: Restarts, delay_s: float) -> None:
        how = described_exit(code)
        again = "restarting" if delay_s == 0 else f"restarting in {delay_s:.0f} s"
        if restarts.in_a_row < NAMED_AFTER:
            self.say(f"[yellow]{part.name}[/] {how}; {again}")
            return
        self.say(f"[red]{part.name}[/] {how}, {restarts.in_a_row} times in a row; {again}; log: {part.log}")
        if restarts.shows_log:
            for line in last_lines(part.log):
                self.say(f"    [dim]{escape(line)}[/]")


def described_exit(code: int) -> str:
    """Describe an exit code: "exited with code 2", "was killed by SIGKILL" …"""
    if code == UNKNOWN_EXIT:
        return "has exited"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES_MAX))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []
