"""Injects a fault of the clock: the machine's wall clock jumps, and is set back later.

Theory. There is one wall clock per machine (time namespaces have only the monotonic and the boot clock), so the fault affects
all processes of the machine. The correct time is computed from the time since boot, which cannot be set: the record contains
both clocks before the jump. The undo sets the wall clock to the correct time, but only if the clock is still off by more than
half of the jump. A time service may have corrected the clock already, and a second undo would be another jump.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.agent.host.machine import BOOT_ID, boot_id
from holdfast.agent.records import Unreadable, read_record, write_record
from holdfast.domain.errors import Conflict, HoldfastError


@dataclass(frozen=True, slots=True)
class Clocks:
    """The machine's clocks. `set_wall` takes Unix seconds and raises OSError."""

    wall: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_REALTIME)
    since_boot: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    set_wall: Callable[[float], None] = lambda at: time.clock_settime(time.CLOCK_REALTIME, at)
    boot: Callable[[], str] = lambda: boot_id(BOOT_ID)


MACHINE = Clocks()


def jump(record: Path, offset_s: float, clocks: Clocks = MACHINE) -> None:
    """Change the clock by `offset_s`. Raises `Conflict` with the reason, and changes nothing, if the clock cannot be set."""
    if not (boot := clocks.boot()):
        raise Conflict(f"{BOOT_ID} cannot be read: a reboot, which corrects the clock, could not be recognised")
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
    """Set the clock back if there is a record. Returns whether there was one. Raises `HoldfastError` if the clock is still
    wrong; the record is then kept."""
    try:
        noted = read_record(record)
    except Unreadable:
        record.unlink(missing_ok=True)  # the clock is set only after the complete record is written
        return False
    if noted is None:
        return False
    if noted["boot"] == clocks.boot():  # otherwise the machine has read its hardware clock again at a boot
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
