"""Starts the parts of a stack again when they end, at once the first time, then after delays that grow, and says so.

A part that does not end but stands still (somebody has sent it SIGSTOP) is said as well, and replaced where that loses nothing.
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
from holdfast.runtime.survivors import UNKNOWN_EXIT

DELAY_S_FIRST = 1.0
DELAY_S_MAX = 30.0
SETTLED_S = 60.0  # a part that ran for as long has recovered: its next end is a first one
NAMED_AFTER = 3  # ends in a row; from here on its log is shown
FROZEN_SAID_S = 2.0
FROZEN_REPLACED_S = 30.0  # whoever has stopped it may want to look at it first
LOG_LINES = 15
LOG_BYTES_MAX = 64 << 10


@dataclass(slots=True)
class Restarts:
    """When a part is started again. Pure: times are the caller's, monotonic seconds."""

    started_at: float
    in_a_row: int = 0
    due_at: float | None = None  # it has ended, and is started again then

    def ended(self, at: float) -> float:
        """It has ended; returns the seconds until its next start."""
        self.in_a_row = 1 if at - self.started_at >= SETTLED_S else self.in_a_row + 1
        delay_s = 0.0 if self.in_a_row == 1 else min(DELAY_S_FIRST * 2.0 ** min(self.in_a_row - 2, 16), DELAY_S_MAX)
        self.due_at = at + delay_s
        return delay_s

    def started(self, at: float) -> None:
        self.started_at, self.due_at = at, None

    @property
    def shows_log(self) -> bool:
        """At the third end in a row, then each time that their number has doubled: the log must not fill the screen."""
        return self.in_a_row == NAMED_AFTER or (self.in_a_row > NAMED_AFTER and self.in_a_row.bit_count() == 1)


@dataclass(frozen=True, slots=True)
class Part:
    """`exit_code` is None while it runs; `start` starts it again where it was, and returns its pid.

    `pid` is asked only while it runs. `keeps` is what would be lost with it if it were ended; empty: nothing.
    """

    name: str
    exit_code: Callable[[], int | None]
    start: Callable[[], int]
    log: Path
    pid: Callable[[], int | None] = lambda: None
    keeps: str = ""


@dataclass(slots=True)
class Tender:
    """`say` takes one line of markup."""

    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    is_stopped: Callable[[int], bool] = is_stopped
    kill: Callable[[int], None] = kill_tree
    _restarts: dict[str, Restarts] = field(default_factory=dict)
    _frozen: dict[str, tuple[float, bool]] = field(
        default_factory=dict
    )  # by part: since when, and whether that was said

    def tend(self, part: Part) -> bool:
        """Start it again when it has ended and its time has come; whether it runs."""
        at = self.clock()
        restarts = self._restarts.setdefault(part.name, Restarts(at))
        if (code := part.exit_code()) is None:
            if restarts.due_at is not None:  # somebody else has started it
                restarts.started(at)
            self._look_whether_frozen(part, at)
            return True
        self._frozen.pop(part.name, None)
        if restarts.due_at is None:
            self._say_ended(part, code, restarts, restarts.ended(at))
        if restarts.due_at is not None and at < restarts.due_at:
            return False
        try:
            pid = part.start()
        except (HoldfastError, OSError, subprocess.SubprocessError) as error:
            self.say(f"[red]{part.name}[/] could not be started again: {escape(str(error))}")
            restarts.ended(at)
            return False
        restarts.started(at)
        self.say(f"[green]{part.name}[/] has been started again (pid {pid})")
        return True

    def _look_whether_frozen(self, part: Part, at: float) -> None:
        pid = part.pid()
        since, said = self._frozen.get(part.name, (at, False))
        if pid is None or not self.is_stopped(pid):
            if self._frozen.pop(part.name, None) is not None and said:
                self.say(f"[green]{part.name}[/] goes on, after {at - since:.0f} s")
            return
        if not said and at - since >= FROZEN_SAID_S:
            said = True
            then = (
                f"it is left alone: {part.keeps}" if part.keeps else f"it is replaced after {FROZEN_REPLACED_S:.0f} s"
            )
            self.say(
                f"[yellow]{part.name}[/] (pid {pid}) stands still: somebody has stopped it (SIGSTOP). `kill -CONT {pid}` lets "
                f"it go on; {then}"
            )
        self._frozen[part.name] = since, said
        if not part.keeps and at - since >= FROZEN_REPLACED_S:
            self.kill(pid)  # its end is seen at the next look

    def _say_ended(self, part: Part, code: int, restarts: Restarts, delay_s: float) -> None:
        how = described_exit(code)
        again = "starting it again" if delay_s == 0 else f"starting it again in {delay_s:.0f} s"
        if restarts.in_a_row < NAMED_AFTER:
            self.say(f"[yellow]{part.name}[/] {how}; {again}")
            return
        self.say(f"[red]{part.name}[/] {how}, {restarts.in_a_row} times in a row; {again}; its log is {part.log}")
        if restarts.shows_log:
            for line in last_lines(part.log):
                self.say(f"    [dim]{escape(line)}[/]")


def described_exit(code: int) -> str:
    """ "ended with exit code 2", "was killed by SIGKILL" …"""
    if code == UNKNOWN_EXIT:
        return "has ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def last_lines(log: Path) -> list[str]:
    """The end of a log, however long it is; nothing of one that cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES_MAX))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []
