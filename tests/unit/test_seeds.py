"""Many simulated seeds: the same is printed whatever the number of processes, and a broken promise is named with its replay."""

from __future__ import annotations

import re

import pytest

from holdfast.sim import seeds
from holdfast.sim.world import Violation


def test_two_processes_print_what_one_prints(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for jobs in (1, 2):
        assert seeds.run(30, 24, jobs=jobs) == 0
        said.append(re.sub(r"\(\d+\.\d s", "(", capsys.readouterr().out))
    assert said[0] == said[1]
    assert said[0].startswith("24 of 24 seeds hold every promise")


def test_a_broken_promise_is_printed_with_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(seed: int, *, tracing: bool) -> object:
        raise Violation(f"seed {seed}, at 3.000 s: two leaders")

    monkeypatch.setattr(seeds, "simulate", breaks)
    assert seeds.run(7, 2, jobs=1) == 1
    out = capsys.readouterr().out
    assert "VIOLATION seed 7, at 3.000 s: two leaders\n  replay: python -m holdfast.sim --seed 7 --trace\n" in out
    assert out.splitlines()[-1].startswith("0 of 2 seeds hold every promise")


def test_long_work_shows_where_it_stands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter(range(0, 10_000, 40))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    progress = seeds.Progress(3)
    for done in (1, 2, 3):
        progress.show(done, failed=0)
    assert capsys.readouterr().err == "2 of 3 seeds, 0 broke a promise\n"
