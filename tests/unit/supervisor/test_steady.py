"""A leader's time passes as time passes, whatever is done to the machine's clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

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


@pytest.mark.parametrize("ahead_s", [0.0, HOUR_S, 100 * HOUR_S])
def test_it_goes_on_where_another_clock_was_whatever_its_own_machine_shows(ahead_s: float) -> None:
    machine = Machine()
    at = machine.wall() - 3.0
    machine.ahead_s += ahead_s
    clock = SteadyClock(machine.wall, machine.elapsed)
    clock.resume(at, 3.0)
    assert clock() == pytest.approx(at + 3.0)
    machine.elapsed_s += 10.0
    assert clock() == pytest.approx(at + 13.0, abs=10.0 * DRIFT_MAX + 1e-6)


@pytest.mark.parametrize(
    ("behind_s", "ago_s", "passed_s"),
    [(0.0, 3.0 + HOUR_S, 3.0), (0.0, 0.0, 0.0), (HOUR_S, 3.0, 0.0), (HOUR_S, 3.0 + HOUR_S, 0.0)],
    ids=["the log is ahead", "the log was set back", "the machine is behind", "both are wrong"],
)
def test_of_two_measures_of_a_pause_the_shorter_counts(behind_s: float, ago_s: float, passed_s: float) -> None:
    machine = Machine()
    at = machine.wall() - 3.0
    machine.ahead_s -= behind_s
    clock = SteadyClock(machine.wall, machine.elapsed)
    clock.resume(at, ago_s)
    assert clock() == pytest.approx(at + passed_s)


def test_it_is_never_behind_what_a_leader_has_written() -> None:
    machine = Machine()
    clock = SteadyClock(machine.wall, machine.elapsed)
    written = clock() + HOUR_S
    clock.not_before(written)
    assert clock() >= written
    machine.elapsed_s += 1.0
    assert clock() > written
