"""A leader's time passes as time passes, whatever is done to the machine's clock."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.runtime.steady_clock import DRIFT_MAX, SteadyClock

HOUR_S = 3600.0


@dataclass
class Machine:
    elapsed_s: float = 100.0
    ahead_s: float = 1_000_000.0

    def elapsed(self) -> float:
        return self.elapsed_s

    def wall(self) -> float:
        return self.elapsed_s + self.ahead_s


def test_it_shows_the_wall_clock_while_nobody_sets_it() -> None:
    machine = Machine()
    clock = SteadyClock(machine.wall, machine.elapsed)
    for _ in range(3):
        machine.elapsed_s += 7.0
        assert clock() == machine.wall()


def test_a_clock_that_is_set_changes_no_interval_by_more_than_a_little() -> None:
    for jump_s in (HOUR_S, -HOUR_S):
        machine = Machine()
        clock = SteadyClock(machine.wall, machine.elapsed)
        before = clock()
        machine.ahead_s += jump_s
        assert clock() == before
        machine.elapsed_s += 10.0
        assert abs(clock() - before - 10.0) <= 10.0 * DRIFT_MAX + 1e-6


def test_it_finds_back_to_the_wall_clock() -> None:
    machine = Machine()
    clock = SteadyClock(machine.wall, machine.elapsed)
    machine.ahead_s -= HOUR_S
    machine.elapsed_s += HOUR_S / DRIFT_MAX
    assert clock() == machine.wall()


def test_it_is_never_behind_what_a_leader_has_written() -> None:
    machine = Machine()
    clock = SteadyClock(machine.wall, machine.elapsed)
    written = clock() + HOUR_S
    clock.not_before(written)
    assert clock() >= written
    machine.elapsed_s += 1.0
    assert clock() > written
