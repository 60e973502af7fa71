"""The demo's report, summary and picture, from an outcome that is made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from holdfast.cli.demo import picture
from holdfast.cli.demo.course import LONG, SHORT, Expectation, Outcome, read_losses
from holdfast.cli.demo.report import BADPUT, Report, print_summary, print_tables
from holdfast.cli.main import application
from holdfast.domain.errors import HoldfastError

ZERO = 1_700_000_000.0
KEYS = {"wall_s", "mesh", "steps", "goodput", "badput_s", "world_sizes", "incidents", "losses"}
INCIDENT_KEYS = {
    *(
        "id",
        "kind",
        "cause",
        "node",
        "rank",
        "action",
        "reason",
        "generation",
        "fault_at_s",
        "detected_at_s",
        "decided_at_s",
    ),
    *("prepared_at_s", "first_step_at_s", "rework_steps", "restored_from", "outcome", "trace_id", "walk", "cost_share"),
}
BADPUT_S = dict(zip(BADPUT, (3.0, 0.5, 0.1, 2.0, 1.4, 0.5, 0.5, 1.0, 1.0), strict=True))


def incident(**changes: Any) -> dict[str, Any]:
    base = {
        "id": "i1",
        "kind": "worker_crash",
        "cause": "rank 4 was killed [/red]",
        "node": "node-4",
        "rank": 4,
        "action": {"kind": "restart", "reason": "in place"},
        "decided_by": "default policy",
        "generation": 1,
        "fault_at": ZERO + 10.0,
        "detected_at": ZERO + 10.1,
        "decided_at": ZERO + 10.15,
        "prepared_at": ZERO + 10.3,
        "first_step_at": ZERO + 10.6,
        "rework_steps": 3,
        "trace_id": "ab" * 16,
        "restored_from": {"memory": 9},
        "outcome": "generation 2 steps from step 7 on, re-sharded from dp 3 to dp 2: read 7.4 MB from peers",
    }
    return base | changes


@pytest.fixture
def outcome() -> Outcome:
    goodput = {
        "started_at": ZERO,
        "wall_s": 50.0,
        "useful_s": 40.0,
        "badput_s": BADPUT_S,
        "goodput_job": 0.8,
        "goodput_paid": 0.72,
        "rework_steps": 3,
        "world_sizes": [(0.0, 9), (30.0, 6), (40.0, 9)],
        "tokens_per_s": [(float(second), 1000.0 + second) for second in range(50)],
    }
    ended = {"phase": "failed", "reason": "ValueError twice at step 7", "generation": 2, "mesh": {"dp": 2}, "step": 7}
    return Outcome(
        target=100,
        job={"mesh": {"dp": 3, "pp": 3}, "step": 100, "phase": "completed"},
        goodput=goodput,
        incidents=[
            incident(),
            incident(id="i2", kind="gpu_error", rank=None, action=None, prepared_at=None, first_step_at=None),
        ],
        losses={0: 5.5, 1: 4.5},
        others={
            "uneven": (
                {"name": "uneven", "phase": "running", "step": 70},
                [incident(id="i4", kind="straggler", action={"kind": "hot_swap", "reason": "slow"})],
            ),
            "bereft": (
                {"name": "bereft", "phase": "running", "step": 60},
                [incident(id="i2", kind="node_lost", restored_from={"memory": 1, "object store": 2})],
            ),
            "faulty": (
                ended,
                [incident(id="i3", kind="repeated_exception", action={"kind": "stop", "reason": "twice"})],
            ),
        },
        failures=[],
    )


def test_each_incident_has_its_walk(outcome: Outcome) -> None:
    tried = {"recipe": 1, "rung": 1, "action": "gpu_reset", "nodes": [], "within_s": 0.0, "reason": "due"}
    walk = [
        {**tried, "began_at": ZERO + 10.2, "ended_at": ZERO + 10.2, "end": "refused", "why": "no command"},
        {**tried, "began_at": ZERO + 10.2, "ended_at": ZERO + 12.0, "end": "done", "why": "", "action": "hot_swap"},
    ]
    outcome = replace(outcome, incidents=[incident(), incident(id="i2", walk=walk), incident(id="i3", action=None)])
    plain, recipe, undecided = Report.of(LONG, outcome, {0: 5.5, 1: 4.25}).incidents
    one = {"action": "restart", "began_s": 10.15, "ended_s": 10.6, "end": "done", "reason": "in place", "why": ""}
    assert plain["walk"] == [one]
    shown = [(each["action"], each["end"], each["why"], each["began_s"], each["ended_s"]) for each in recipe["walk"]]
    assert shown == [("gpu_reset", "refused", "no command", 10.2, 10.2), ("hot_swap", "done", "", 10.2, 12.0)]
    assert undecided["walk"] == []


def test_the_file_has_what_was_promised(outcome: Outcome, tmp_path: Path) -> None:
    Report.of(LONG, outcome, {0: 5.5, 1: 4.25}).write(tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report.keys() >= KEYS
    assert report["steps"] == {"target": 100, "reached": 100, "rework": 3}
    assert report["goodput"] == {"job": 0.8, "paid": 0.72}
    assert tuple(report["badput_s"]) == BADPUT
    assert report["useful_s"] + sum(report["badput_s"].values()) == pytest.approx(report["wall_s"], rel=0.01)
    assert report["world_sizes"] == [[0.0, 9], [30.0, 6], [40.0, 9]]
    assert report["losses"] == {"final": 4.5, "reference_final": 4.25, "max_abs_diff": 0.25}
    for each in report["incidents"]:
        assert each.keys() >= INCIDENT_KEYS
    first, second = report["incidents"]
    assert [first[f"{name}_at_s"] for name in ("fault", "detected", "decided", "prepared", "first_step")] == [
        *(10.0, 10.1, 10.15, 10.3, 10.6)
    ]
    assert (second["first_step_at_s"], second["action"], second["rank"]) == (None, None, None)
    assert report["user_bug"]["tries"] == 2
    assert report["slow_rank"]["incidents"][0]["action"] == "hot_swap"


def test_the_short_form_has_one_job_and_its_summary_has_five_lines(outcome: Outcome) -> None:
    report = Report.of(SHORT, replace(outcome, others={}), outcome.losses)
    assert (report.slow_rank, report.both_copies_lost, report.user_bug) == (None, None, None)
    console = Console(width=140, highlight=False)
    with console.capture() as capture:
        print_tables(console, report)
    assert sum("worker_crash" in line for line in capture.get().splitlines()) == 1
    with console.capture() as capture:
        print_summary(console, report, Path("out/demo"), "out/demo/timeline.png")
    assert len(capture.get().strip().splitlines()) == 5


@pytest.mark.parametrize(("options", "least"), [([], 150), (["--short"], 100)])
def test_too_few_steps_for_the_faults_are_refused_before_anything_starts(
    options: list[str], least: int, tmp_path: Path
) -> None:
    result = CliRunner().invoke(
        application("demo"), ["demo", *options, "--steps", "80", "--out", str(tmp_path / "out")]
    )
    assert f"at least {least}" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_losses_that_are_missing_are_a_failure(outcome: Outcome) -> None:
    report = Report.of(LONG, outcome, {0: 5.5, 1: 4.5, 2: 4.0})
    assert report.failures == ["losses: 2 steps were logged, 3 in the reference run; expected the same"]


def test_no_losses_at_all_is_an_error(outcome: Outcome) -> None:
    with pytest.raises(HoldfastError, match="nothing to report"):
        Report.of(LONG, outcome, {})


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("failures", [[], ["hang: no incident [/was] opened"]])
def test_the_summary(outcome: Outcome, width: int, failures: list[str]) -> None:
    report = replace(Report.of(LONG, outcome, outcome.losses), failures=failures)
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        print_tables(console, report)
        print_summary(console, report, Path("out/demo"), "out/demo/timeline.png")
    text = capture.get()
    crash = next(line for line in text.splitlines() if line.startswith("worker_crash"))
    assert crash.split() == [
        "worker_crash",
        "rank",
        "4",
        "restart",
        "0.10",
        "0.05",
        "0.15",
        "0.30",
        "0.60",
        "3",
        "memory",
    ]
    unfinished = next(line for line in text.splitlines() if line.startswith("gpu_error"))
    assert unfinished.split()[-4:] == ["–", "–", "3", "memory"]
    assert "Where the 50.0 s of the main job went" in text
    assert ("all 9 faults" in text) is (not failures)
    assert ("1 result of 9 faults is not as expected" in text) is bool(failures)
    # 50 s less 40 s of use and 3 s of start are 7 s for two incidents.
    assert (
        "goodput 80.0%: of 50 s the start took 3 s, and 2 incidents cost 3.5 s each; with one a day it would be 99.996%"
        in text
    )
    if width > 80:
        assert text.rstrip().splitlines()[-1].startswith("out/demo/report.json")
        assert "from a fault to the first step after it: median 0.60 s, longest 0.60 s" in text
    for failure in failures:
        assert failure in " ".join(text.split())


def test_the_picture_is_drawn(outcome: Outcome, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    where = picture.draw(Report.of(LONG, outcome, outcome.losses), tmp_path / "timeline.png")
    assert where == str(tmp_path / "timeline.png")
    data = (tmp_path / "timeline.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == tuple(int(inches * picture.DPI) for inches in picture.FIGURE_INCHES)
    assert len(data) > 10_000


def test_without_matplotlib_the_demo_has_no_picture_and_says_how_to_get_one(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    report = Report.of(LONG, outcome, outcome.losses)
    instead = picture.draw(report, tmp_path / "timeline.png")
    assert not any(tmp_path.iterdir())
    console = Console(width=140, highlight=False)
    with console.capture() as capture:
        print_summary(console, report, tmp_path, instead)
    assert "no timeline.png without matplotlib: pip install 'holdfast-training[demo]'" in capture.get()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"rank": 3}, "crash: rank 3 instead of 4"),
        ({"kind": "hang"}, "crash: kind 'hang' instead of 'worker_crash'"),
        ({"action": None}, "crash: action None instead of 'restart'"),
        ({"outcome": "generation 2 steps from step 7 on"}, "crash: outcome 'generation 2 steps from step 7 on', not"),
    ],
)
def test_what_must_come_of_a_fault(changes: dict[str, Any], message: str) -> None:
    expected = Expectation("crash", "worker_crash", "restart", rank=4, outcome="re-sharded from dp 3 to dp 2")
    found = expected.check(incident(**changes))
    assert found.startswith(message)
    assert bool(found) is bool(message)


def test_a_fault_without_an_incident() -> None:
    assert Expectation("hang", "hang", "restart").check(None) == "hang: no incident was opened"


def test_losses_are_read_past_torn_lines_and_repeated_steps(tmp_path: Path) -> None:
    (tmp_path / "loss.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n{"step": 1, "loss": 1.5}\n{"other": 1}\n{"step": 2, "lo'
    )
    assert read_losses(tmp_path) == {1: 1.5}
