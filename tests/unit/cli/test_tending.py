"""When a part of a stack is started again, and which messages the user gets."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from waiting import wait_until

from holdfast.cli.processes import is_stopped
from holdfast.cli.tending import (
    DELAY_S_MAX,
    FROZEN_REPLACED_S,
    FROZEN_SAID_S,
    LOG_LINES,
    SETTLED_S,
    Part,
    Tender,
    described_exit,
    last_lines,
)
from holdfast.domain.errors import Unavailable
from holdfast.runtime.processes.survivors import UNKNOWN_EXIT


@dataclass
class World:
    """One part, its clock, and what was said. `starts` are the times at which it was started again."""

    log: Path
    now: float = 1000.0
    code: int | None = None
    broken: bool = False
    said: list[str] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        self.tender = Tender(
            self.said.append, clock=lambda: self.now, is_stopped=lambda _: self.stopped, kill=lambda _: self.dies(-9)
        )
        self.part = Part("supervisor", lambda: self.code, self._start, self.log, lambda: 42)

    def _start(self) -> int:
        if self.broken:
            raise Unavailable("no process to be had")
        self.starts.append(self.now)
        self.code, self.stopped = None, False
        return 77

    def dies(self, code: int = 1) -> None:
        self.code = code

    def passes(self, seconds: float) -> None:
        """Looked at five times a second, as `holdfast up` does."""
        until = self.now + seconds
        while self.now < until:
            self.tender.tend(self.part)
            self.now += 0.2


@pytest.fixture
def world(tmp_path: Path) -> World:
    log = tmp_path / "supervisor.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    return World(log)


def test_the_first_end_is_mended_at_once_and_said(world: World) -> None:
    world.tender.tend(world.part)
    world.dies(-9)
    assert world.tender.tend(world.part)
    assert world.starts == [1000.0]
    assert "was killed by SIGKILL; restarting" in world.said[0]
    assert "restarted (pid 77)" in world.said[1]


def test_delays_grow_to_a_bound_and_what_settles_starts_afresh(world: World) -> None:
    for _ in range(12):
        world.dies()
        world.passes(DELAY_S_MAX + 1)
        assert world.code is None, "it is always started again"
    gaps = [after - before for before, after in zip(world.starts, world.starts[1:], strict=False)]
    assert max(gaps) <= DELAY_S_MAX + 32
    world.passes(SETTLED_S)
    began = world.now
    world.dies()
    world.passes(1)
    assert world.starts[-1] == pytest.approx(began)


def test_one_that_ends_again_and_again_is_named_with_the_end_of_its_log(world: World) -> None:
    world.dies()
    for _ in range(40):
        world.passes(1)
        world.dies()
    reported = "\n".join(world.said)
    assert "3 times in a row" in reported
    assert str(world.log) in reported
    assert "line 99" in reported
    assert reported.count("line 99") <= 3, "its log does not fill the screen"


def test_what_cannot_be_started_is_said_and_tried_again(world: World) -> None:
    world.broken = True
    world.dies()
    world.passes(5)
    assert any("could not be restarted: no process to be had" in line for line in world.said)
    world.broken = False
    world.passes(DELAY_S_MAX)
    assert world.code is None


def test_one_that_somebody_else_has_started_is_let_be(world: World) -> None:
    world.dies()
    world.passes(0.2)
    world.dies()
    world.tender.tend(world.part)
    world.code = None
    world.passes(DELAY_S_MAX)
    assert len(world.starts) == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "exited with code 0"),
        (-15, "was killed by SIGTERM"),
        (-99, "was killed by signal 99"),
        (UNKNOWN_EXIT, "has exited"),
    ],
)
def test_how_it_ended(code: int, said: str) -> None:
    assert described_exit(code) == said


def test_the_end_of_a_log_of_any_length(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff\x00" * 1_000_000 + b"\nlast [red]words\n")
    assert last_lines(log)[-1] == "last [red]words"
    log.write_text("\n".join(map(str, range(1000))))
    assert len(last_lines(log)) == LOG_LINES
    assert last_lines(tmp_path / "none") == []


# ------------------------------------------------------------------ what stands still


def test_a_part_that_stands_still_is_said_within_seconds_and_that_it_goes_on(world: World) -> None:
    world.stopped = True
    world.passes(FROZEN_SAID_S + 1.0)
    assert len(world.said) == 1
    assert "supervisor[/] (pid 42) is stopped by a signal" in world.said[0]
    assert "kill -CONT 42" in world.said[0]
    world.stopped = False
    world.passes(1.0)
    assert world.said[1:] == ["[green]supervisor[/] runs again after 3 s"]
    assert world.starts == []


def test_a_moment_s_stop_is_not_said(world: World) -> None:
    for _ in range(3):
        world.stopped = True
        world.passes(1.0)
        world.stopped = False
        world.passes(1.0)
    assert world.said == []


def test_what_loses_nothing_by_it_is_replaced(world: World) -> None:
    world.stopped = True
    world.passes(FROZEN_REPLACED_S - 1.0)
    assert world.starts == []
    world.passes(2.0)
    assert len(world.starts) == 1
    assert "was killed by SIGKILL; restarting" in world.said[1]


def test_what_keeps_something_is_left_alone(world: World) -> None:
    world.part = replace(world.part, keeps="its workers would exit with it")
    world.stopped = True
    world.passes(600.0)
    assert world.starts == []
    assert len(world.said) == 1
    assert "it will not be replaced, because its workers would exit with it" in world.said[0]


def test_a_stopped_process_is_known_by_its_state() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(process.pid), description="it to stand still")
        process.kill()
    assert not is_stopped(process.pid)
