"""Whoever undoes a jump of the clock, however often and however late, leaves the clock right. No real clock is set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.agent.injection.clock_jump import Clocks, jump, undo
from holdfast.domain.errors import Conflict, HoldfastError


@dataclass
class Machine:
    """`now`: the right time."""

    now: float = 1_700_000_000.0
    off_s: float = 0.0
    booted_at: float = 1_699_990_000.0
    boot: str = "boot-1"
    error: OSError | None = None

    def set(self, at: float) -> None:
        if self.error is not None:
            raise self.error
        self.off_s = at - self.now

    @property
    def clocks(self) -> Clocks:
        return Clocks(
            wall=lambda: self.now + self.off_s,
            since_boot=lambda: self.now - self.booted_at,
            set_wall=self.set,
            boot=lambda: self.boot,
        )


@pytest.mark.parametrize("offset_s", [3600.0, -3600.0, 0.5])
def test_it_jumps_and_is_set_back_by_the_time_since_boot(tmp_path: Path, offset_s: float) -> None:
    machine, record = Machine(), tmp_path / "record.json"
    jump(record, offset_s, machine.clocks)
    assert machine.off_s == pytest.approx(offset_s, abs=1e-3)
    machine.now += 1000.0
    assert undo(record, machine.clocks)
    assert machine.off_s == pytest.approx(0.0, abs=1e-3)
    assert not undo(record, machine.clocks)


@pytest.mark.parametrize("offset_s", [60.0, -60.0])
def test_a_clock_that_somebody_has_put_right_is_left_alone(tmp_path: Path, offset_s: float) -> None:
    machine, record = Machine(), tmp_path / "record.json"
    jump(record, offset_s, machine.clocks)
    for off_s in (0.0, 0.02, -0.02, -offset_s, offset_s / 3):
        machine.off_s = off_s
        kept = record.read_bytes()
        assert undo(record, machine.clocks)
        assert machine.off_s == off_s
        record.write_bytes(kept)  # whoever undoes it at the same time has read it, too


def test_after_a_reboot_the_clock_is_not_set(tmp_path: Path) -> None:
    machine, record = Machine(), tmp_path / "record.json"
    jump(record, 3600.0, machine.clocks)
    machine.boot, machine.booted_at = "boot-2", machine.now
    assert undo(record, machine.clocks)
    assert machine.off_s == pytest.approx(3600.0, abs=1e-3)
    assert not record.exists()


def test_what_may_not_set_the_clock_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    machine, record = Machine(error=PermissionError(1, "Operation not permitted")), tmp_path / "record.json"
    with pytest.raises(Conflict, match="cannot be set: Operation not permitted; it needs CAP_SYS_TIME"):
        jump(record, 60.0, machine.clocks)
    assert not record.exists()
    with pytest.raises(Conflict, match="boot_id cannot be read"):
        jump(record, 60.0, Machine(boot="").clocks)


def test_a_clock_that_cannot_be_set_back_is_said_and_tried_again(tmp_path: Path) -> None:
    machine, record = Machine(), tmp_path / "record.json"
    jump(record, 60.0, machine.clocks)
    machine.error = PermissionError(1, "Operation not permitted")
    with pytest.raises(HoldfastError, match=r"wrong by \+60\.0 s and cannot be set back: Operation not permitted"):
        undo(record, machine.clocks)
    machine.error = None
    assert undo(record, machine.clocks)
    assert machine.off_s == pytest.approx(0.0, abs=1e-3)


def test_half_a_record_is_no_reason_to_set_a_clock(tmp_path: Path) -> None:
    machine, record = Machine(), tmp_path / "record.json"
    record.write_text('{"boot": "boo')
    assert not undo(record, machine.clocks)
    assert not record.exists()
