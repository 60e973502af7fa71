"""Many simulated seeds: the same is printed whatever the number of processes, and a broken promise is named with its replay."""

from __future__ import annotations

import re

import pytest

from holdfast.sim import seeds, worlds
from holdfast.sim.world import Violation


def test_two_processes_print_what_one_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(seeds, "_TOGETHER", 1)
    said = []
    for jobs in (1, 2):
        assert seeds.run(range(30, 33), jobs=jobs) == 0
        said.append(re.sub(r"\(\d+\.\d s", "(", capsys.readouterr().out))
    assert said[0] == said[1]
    assert said[0].startswith("3 of 3 seeds hold every promise")


def test_a_broken_promise_is_printed_with_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(seed: int, *, tracing: bool) -> object:
        raise Violation(f"seed {seed}, at 3.000 s: two leaders")

    monkeypatch.setattr(seeds, "simulate", breaks)
    assert seeds.run(range(7, 9), jobs=1) == 1
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


def test_a_campaign_through_all_worlds_has_a_share_of_each_kind() -> None:
    chosen = worlds.of_all_kinds(0, 3000)
    assert [len([seed for seed in chosen if seed in kind.seeds(0, 3000)]) for kind in worlds.KINDS] == [
        3000, 300, 100, 60, 20,
    ]  # fmt: skip
    assert len(chosen) == len(set(chosen)) == 3480


def test_campaigns_that_follow_each_other_simulate_each_seed_once() -> None:
    parts = [seed for first in range(0, 6000, 70) for seed in worlds.of_all_kinds(first, min(70, 6000 - first))]
    assert sorted(parts) == sorted(worlds.of_all_kinds(0, 6000))


def test_the_kinds_of_worlds_do_not_overlap() -> None:
    """The last campaign that the command takes ends before the seeds of the next kind begin."""
    ends = [kind.seeds(0, worlds.SEEDS_END).stop for kind in worlds.KINDS]
    assert all(end <= kind.first for end, kind in zip(ends, worlds.KINDS[1:], strict=False))
