"""Ctrl-C on a local stack: the job saves before it stops, for a limited time, and the message says what is kept."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
from rich.console import Console

from holdfast.cli.follow import How, kept
from holdfast.cli.last_save import WAIT_S, save_running, stop_saved
from holdfast.domain.errors import Unavailable

HOW = How(resume="run it again", delete="delete /d", memory="is lost with the stack", first_error="holdfast logs x")
RUNNING: dict[str, Any] = {"phase": "running", "checkpoint_step": 50, "kept": None}
ON_DISK = {"attempt": 1, "step": 81, "on_disk": True, "directories": {"n0": "/d/x"}}
IN_MEMORY = {**ON_DISK, "on_disk": False}


def stopped(found: dict[str, Any] | None) -> dict[str, Any]:
    return {"phase": "stopped", "checkpoint_step": 81, "kept": found}


class Control:
    """Answers with one view after the other, and records the stop. The clock advances with each wait."""

    def __init__(self, *views: dict[str, Any] | Exception) -> None:
        self._views = list(views)
        self.stops: list[str] = []
        self.now = 0.0

    def job(self, name: str) -> dict[str, Any]:
        view = self._views.pop(0) if len(self._views) > 1 else self._views[0]
        if isinstance(view, Exception):
            raise view
        return view

    def stop(self, name: str, reason: str) -> None:
        self.stops.append(reason)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def interrupted(self, **options: Any) -> str:
        out = io.StringIO()
        screen = Console(file=out, width=300, force_terminal=False)
        stop_saved(self, "x", screen, reason="Ctrl-C", how=HOW, clock=lambda: self.now, sleep=self.sleep, **options)  # type: ignore[arg-type]
        return out.getvalue()


def test_it_waits_until_the_last_save_is_on_the_disk() -> None:
    control = Control(RUNNING, RUNNING, stopped(IN_MEMORY), stopped(ON_DISK))
    said = control.interrupted()
    assert control.stops == ["Ctrl-C"]
    assert "checkpoint at step 81 is retained on n0 under /d/x" in said
    assert 0 < control.now < WAIT_S


def test_a_save_that_does_not_come_is_waited_for_a_limited_time() -> None:
    control = Control(RUNNING)
    assert "is stopped. To resume: run it again" in control.interrupted()
    assert WAIT_S <= control.now < WAIT_S + 1


def test_a_script_that_saves_by_itself_is_not_resumed() -> None:
    said = Control(RUNNING, {**stopped(None), "checkpoint_step": 0}).interrupted()
    assert "the same command starts it again" in said
    assert "To resume" not in said


def test_a_job_that_has_ended_is_not_stopped() -> None:
    control = Control({**stopped(ON_DISK), "phase": "completed"})
    assert "step 81" in control.interrupted()
    assert control.stops == []


@pytest.mark.parametrize("views", [(Unavailable("no leader"),), (RUNNING, Unavailable("gone"))], ids=["first", "later"])
def test_a_control_plane_that_does_not_answer_does_not_delay_the_stop(views: tuple[Any, ...]) -> None:
    control = Control(*views)
    assert "To resume: run it again" in control.interrupted()
    assert control.now < 1


def test_a_second_interrupt_ends_the_wait() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Control(RUNNING).interrupted(check=interrupt)


def test_what_the_ranks_print_at_their_end_is_shown() -> None:
    control = Control(RUNNING, RUNNING, {**stopped(None), "checkpoint_step": 0})
    said = control.interrupted(output=lambda: ["[rank0] saved [at] step 56"]).splitlines()
    assert said[1] == "[rank0] saved [at] step 56"
    assert "is stopped" in said[2]


def test_a_second_interrupt_shows_it_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    screen = Console(width=300, force_terminal=False)
    with pytest.raises(KeyboardInterrupt):
        stop_saved(
            Control(RUNNING),  # type: ignore[arg-type]
            "x",
            screen,
            reason="Ctrl-C",
            how=HOW,
            check=interrupt,
            output=lambda: ["[rank0] got SIGTERM"],
        )
    assert "[rank0] got SIGTERM" in capsys.readouterr().out


def test_a_checkpoint_that_is_in_memory_only_is_not_called_retained() -> None:
    said = kept(stopped(IN_MEMORY), HOW)
    assert "step 81 is only in the memory of n0" in said
    assert "not been written to /d/x" in said
    assert "It is lost with the stack" in said
    assert "retained" not in said
    assert "retained" in kept(stopped(ON_DISK), HOW)
    assert "retained" in kept(stopped({**IN_MEMORY, "directories": {}}), HOW)  # in the object store only


class Fleet:
    """The API of `holdfast up`: jobs, and what becomes of a save."""

    def __init__(self, *jobs: dict[str, Any], answer: str | Exception = "step 7 is saved") -> None:
        self._jobs, self._answer = jobs, answer
        self.saved: list[str] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def jobs(self) -> tuple[dict[str, Any], ...]:
        return self._jobs

    def checkpoint(self, name: str, grace_s: float) -> dict[str, Any]:
        self.saved.append(name)
        if isinstance(self._answer, Exception):
            raise self._answer
        return {"reason": self._answer}

    def ends(self, **options: Any) -> list[str]:
        said: list[str] = []
        save_running(lambda: self, ("n0", "n1"), said.append, **options)  # type: ignore[arg-type, return-value]
        return said


def job(
    name: str, phase: str = "running", step: int | None = 5, nodes: tuple[str, ...] = ("n0", "n9")
) -> dict[str, Any]:
    return {"name": name, "phase": phase, "step": step, "nodes": list(nodes)}


def test_running_jobs_on_nodes_that_end_are_saved_first() -> None:
    fleet = Fleet(job("a"), job("b"), job("done", "completed"), job("silent", step=None), job("far", nodes=("n9",)))
    said = fleet.ends()
    assert sorted(fleet.saved) == ["a", "b"]
    assert "saving 2 running jobs first" in said[0]
    assert sum("step 7 is saved" in line for line in said) == 2


def test_nothing_is_said_if_there_is_nothing_to_save() -> None:
    assert Fleet(job("silent", step=None)).ends() == []


def test_a_save_that_is_refused_or_does_not_come_does_not_stop_the_end() -> None:
    assert len(Fleet(job("a"), answer=Unavailable("no leader")).ends()) == 1
    released = threading.Event()

    class Hanging(Fleet):
        def checkpoint(self, name: str, grace_s: float) -> dict[str, Any]:
            released.wait()
            raise Unavailable("too late")

    assert len(Hanging(job("a")).ends(wait_s=0.05)) == 1
    released.set()
