"""An injected fault of the clock: the machine's wall clock jumps, and back.

Theory. There is one wall clock per machine (time namespaces have only the monotonic and the boot clock), so the fault is one of
everything that runs there. What the clock should say is computed from the time since boot, which nobody sets: the record has
both clocks as they were. Whoever undoes it sets the wall clock to that, but only if it is still off by most of the jump: a time
service may have put it right meanwhile, and what was undone twice would be another jump.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.agent.machine import BOOT_ID, boot_id
from holdfast.agent.records import Unreadable, read_record, write_record
from holdfast.domain.errors import Conflict, HoldfastError


@dataclass(frozen=True, slots=True)
class Clocks:
    """The machine's; `set_wall` takes Unix seconds and raises OSError."""

    wall: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_REALTIME)
    since_boot: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    set_wall: Callable[[float], None] = lambda at: time.clock_settime(time.CLOCK_REALTIME, at)
    boot: Callable[[], str] = lambda: boot_id(BOOT_ID)


MACHINE = Clocks()


def jump(record: Path, offset_s: float, clocks: Clocks = MACHINE) -> None:
    """Raises `Conflict` with the reason if the clock cannot be set; then nothing has changed."""
    if not (boot := clocks.boot()):
        raise Conflict(f"{BOOT_ID} cannot be read: after a reboot the clock would be set for nothing")
    wall, since_boot = clocks.wall(), clocks.since_boot()
    try:
        write_record(record, {"boot": boot, "wall_s": wall, "since_boot_s": since_boot, "offset_s": offset_s})
    except OSError as error:
        raise Conflict(f"{record} cannot be written: {error.strerror}") from error
    try:
        clocks.set_wall(clocks.wall() + offset_s)
    except OSError as error:
        record.unlink(missing_ok=True)
        raise Conflict(f"the clock cannot be set: {error.strerror}; it needs CAP_SYS_TIME") from error


def undo(record: Path, clocks: Clocks = MACHINE) -> bool:
    """Set the clock back; no record: nothing. Returns whether there was one. Raises `HoldfastError` if the clock is still
    wrong; the record stays."""
    try:
        noted = read_record(record)
    except Unreadable:
        record.unlink(missing_ok=True)  # it is written whole before the clock is set
        return False
    if noted is None:
        return False
    if noted["boot"] == clocks.boot():  # else the machine has read its clock anew since
        offset_s = float(noted["offset_s"])
        right = float(noted["wall_s"]) + clocks.since_boot() - float(noted["since_boot_s"])
        left_s = clocks.wall() - right
        if left_s / offset_s > 0.5:
            try:
                clocks.set_wall(right)
            except OSError as error:
                raise HoldfastError(
                    f"the clock of this machine is wrong by {left_s:+.1f} s and cannot be set back: {error.strerror}"
                ) from error
    record.unlink(missing_ok=True)
    return True
