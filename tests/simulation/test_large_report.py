"""What `holdfast simulate --large` prints while it runs and at its end."""

from __future__ import annotations

import pytest

from holdfast.sim import large
from holdfast.sim.large_report import Progress, Recovery, Result, progress

FIRST = Recovery("worker crash", 11.0, 20.0)  # with the start of the job
RECOVERIES = (FIRST, Recovery("lost node", 70.0, 2.0), Recovery("worker crash", 15.0, 4.0))


def test_the_cost_of_a_fault_is_that_of_the_faults_after_the_first() -> None:
    text = str(Result(100, 800, RECOVERIES, 3, 300.0, 26.0, 5200, 90.0)).splitlines()
    assert text == [
        "100 nodes, 800 ranks: 3 faults recovered in 300 s of virtual time; highest step 3",
        "  1 × lost node: running again after 70 s (median), 70 s at most",
        "  2 × worker crash: running again after 13 s (median), 15 s at most",
        "  26.0 s of CPU, 3.00 s per fault after the first, 200 events/s, 17.3 events per node and fault, peak memory 90 MB",
    ]


def test_one_fault_does_not_say_what_another_one_costs() -> None:
    assert "per fault after" not in str(Result(100, 800, (FIRST,), 3, 300.0, 26.0, 5200, 90.0))
    assert progress(9, (FIRST,), "the job is running") == "1 of 9 faults recovered; the job is running"


@pytest.mark.parametrize(("faults", "left"), [(13, "30 s"), (103, "5 min"), (5003, "4 h 10 min")])
def test_the_time_that_is_left_follows_from_the_faults_so_far(faults: int, left: str) -> None:
    text = progress(faults, RECOVERIES, "the job is starting")
    assert text == f"3 of {faults} faults recovered, 3.00 s of CPU each, about {left} of CPU left; the job is starting"


def test_progress_is_shown_at_once_and_then_at_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = 50.0
    monkeypatch.setattr("holdfast.sim.large_report.time.monotonic", lambda: at)
    shown = Progress(9)
    for at in (50.0, 54.9, 55.0, 59.0, 60.0):
        shown.show((), f"at {at:g} s")
    assert [line.rsplit("; ")[1] for line in capsys.readouterr().err.splitlines()] == ["at 50 s", "at 55 s", "at 60 s"]


def test_the_command_shows_what_the_job_does_and_the_recoveries(capsys: pytest.CaptureFixture[str]) -> None:
    assert large.run(8, 3, 1) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("0 of 3 faults recovered; the job is not accepted yet, at step 0\n")
    assert printed.out.startswith("8 nodes, 64 ranks: 3 faults recovered in ")
    assert "s per fault after the first" in printed.out
