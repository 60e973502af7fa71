"""`holdfast report`: its numbers by hand, and the page of a recorded run (tests/data/report)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli import report as subject
from holdfast.cli.main import application
from holdfast.cli.report.page import page
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.supervisor.report.fleet import fleet_report
from holdfast.supervisor.report.json_values import fleet_values
from holdfast.supervisor.report.numbers import Report, Terms, report
from holdfast.supervisor.report.words import compared, money, percent, since, span

RECORDED = json.loads((Path(__file__).parents[2] / "data/report/three_faults.json").read_text())
T0 = 1_000_000.0
HOUR = 3600.0


def incident(at_h: float, repaired_s: float | None, **changes: Any) -> dict[str, Any]:
    at = T0 + at_h * HOUR
    return {
        "severity": "error",
        "kind": "worker_crash",
        "node": "n1",
        "state": "resolved" if repaired_s is not None else "preparing",
        "cause": "Rank 3 on n1 was killed",
        "action": {"kind": "restart"},
        "fault_at": at,
        "first_step_at": None if repaired_s is None else at + repaired_s,
        "rework_steps": 0,
        **changes,
    }


def job(**ledger: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """100 hours on 8 ranks, 10 of them without nodes, 80 useful; 90 s of rework are 9 steps."""
    books = {
        "started_at": T0,
        "wall_s": 100 * HOUR,
        "useful_s": 80 * HOUR,
        "unmeasured_s": 0.0,
        "badput_s": {"wait": 10 * HOUR, "rework": 90.0, "other": 10 * HOUR - 90.0, "stall": 0.0},
        "goodput_job": 0.8,
        "goodput_paid": 0.75,
        "fault_free_tokens_per_s": 4000.0,
        "tokens": 1_152_000_000,
        "rework_steps": 9,
        **ledger,
    }
    return {"name": "llm", "phase": "running", "mesh": {"dp": 4, "tp": 2}, "step": 70}, books


def made(incidents: list[dict[str, Any]], terms: Terms = Terms(), **ledger: Any) -> Report:
    return report(*job(**ledger), incidents, terms)


def test_the_numbers_of_three_faults_on_two_nodes() -> None:
    found = made(
        [
            incident(1, 10.0, rework_steps=3),
            incident(2, 20.0),
            incident(50, 60.0, kind="node_lost", node="n2", severity="fatal", rework_steps=6),
            incident(3, 5.0, severity="", kind="maintenance"),  # a planned change
            incident(4, 5.0, severity="warning", kind="straggler"),
            incident(-5, 5.0),  # of an earlier run of that name
        ],
        Terms(price_per_gpu_hour=2.0),
    )
    everything = found.all_faults
    assert (everything.count, everything.repaired, everything.rework_steps) == (3, 3, 9)
    assert everything.mtbf_s == 30 * HOUR, "90 hours with nodes, three faults"
    assert (everything.mttr_s, everything.longest_s) == (30.0, 60.0)
    assert everything.cost == pytest.approx((10 + 20 + 60 + 9 * 10.0) * 8 * 2.0 / HOUR)
    assert [(each.name, each.count, each.mtbf_s, each.mttr_s) for each in found.by_kind] == [
        ("worker_crash", 2, 45 * HOUR, 15.0),
        ("node_lost", 1, 90 * HOUR, 60.0),
    ]
    assert [(each.name, each.count) for each in found.by_node] == [("n1", 2), ("n2", 1)]
    assert (found.scheduling, found.goodput, found.ranks) == (0.9, 0.8, 8)
    assert found.runtime == pytest.approx(80 / 90)
    assert found.cost == 100 * 8 * 2.0
    assert sum(each.seconds for each in found.shares) == 100 * HOUR
    assert sum(each.cost or 0.0 for each in found.shares) == pytest.approx(1600.0)
    assert "stall" not in {each.name for each in found.shares}
    assert found.notes == ()


def test_without_a_fault_there_is_a_lower_bound_and_no_mean() -> None:
    found = made([])
    assert (found.all_faults.mtbf_s, found.all_faults.mttr_s) == (None, None)
    assert found.all_faults.mtbf_at_least_s == 30 * HOUR
    assert "No fault; MTBF is at least 30.0 h (95 % confidence)." in page(found, RECORDED["timeline"], [], "$")


def test_a_fault_that_is_not_over_counts_for_one_of_the_two() -> None:
    found = made([incident(1, 10.0), incident(99, None)])
    assert (found.all_faults.count, found.all_faults.repaired) == (2, 1)
    assert found.all_faults.mttr_s == 10.0
    assert found.notes == ("Faults that are not over yet, and count for MTBF, not for MTTR: 1.",)


def test_what_is_not_measured_is_not_a_number() -> None:
    found = made(
        [],
        goodput_job=None,
        goodput_paid=None,
        useful_s=0.0,
        unmeasured_s=80 * HOUR,
        fault_free_tokens_per_s=0.0,
        tokens=0,
    )
    assert (found.goodput, found.runtime, found.scheduling) == (None, None, 0.9)
    assert "is not known" in found.notes[0]
    text = page(found, {**RECORDED["timeline"], "at": [], "step": []}, [], "$")
    assert "No step was reported." in text
    asked = made([], Terms(flops_per_token=1e9, peak_flops=1e12), fault_free_tokens_per_s=0.0)
    assert asked.mfu is None
    assert "MFU is not known" in asked.notes[-1]


def test_mfu_and_the_comparison_are_of_what_was_given() -> None:
    terms = Terms(2.0, flops_per_token=4e8, peak_flops=1e12, restart_s=250.0, checkpoint_every_s=600.0)
    found = made([incident(1, 10.0, rework_steps=9), incident(2, 30.0)], terms)
    assert found.mfu == pytest.approx(4000 * 4e8 / 8e12)
    assert found.comparison is not None
    assert (found.comparison.seconds, found.comparison.actual_s) == (2 * 550.0, 40.0 + 90.0)
    assert found.comparison.saved == pytest.approx((1100 - 130) * 8 * 2.0 / HOUR)
    assert found.comparison.left_out == 0
    slow = made([incident(1, 900.0), incident(2, None), incident(3, None, state="failed")], terms)
    assert slow.comparison is not None
    assert (slow.comparison.faults, slow.comparison.left_out) == (1, 2), "those without an end are not counted as free"
    text = compared(slow.comparison, "€")
    assert "€1.56 more. 2 that are not over, or ended the job, are left out." in text
    assert "1 of the faults ended the job" in slow.notes[0]
    high = made([], Terms(flops_per_token=4e10, peak_flops=1e12))
    assert "more than 100 %" in high.notes[0]


def test_the_page_needs_nothing_from_elsewhere_and_shows_text_as_text() -> None:
    faults = [{**each, "cause": "<script>alert(1)</script>"} for each in RECORDED["incidents"]]
    found = report(RECORDED["job"], RECORDED["goodput"], faults, Terms(2.5))
    text = page(found, RECORDED["timeline"], faults, "<b>")
    assert "&lt;b&gt;0.24" in text
    assert "<b>" not in text
    text = page(found, RECORDED["timeline"], faults, "€")
    assert not re.search(r"https?://|<script|<link|src=|@import|url\(", text)
    assert "&lt;script&gt;alert(1)" in text
    assert text.count("<polyline") == 1
    assert "3 faults, one in" in text
    assert "€0.24" in text
    for tag in ("table", "tr", "td", "svg", "div", "figure", "dl"):
        assert len(re.findall(f"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag


class Recorded:
    """The API of the recorded run."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None: ...
    def job(self, _: str) -> Any:
        return RECORDED["job"]

    def goodput(self, _: str) -> Any:
        return RECORDED["goodput"]

    def timeline(self, _: str) -> Any:
        return RECORDED["timeline"]

    def incidents(self, _: str) -> Any:
        return iter(RECORDED["incidents"])

    def fleet_report(self, **parameters: Any) -> Any:
        made = fleet_report(
            [report(RECORDED["job"], RECORDED["goodput"], RECORDED["incidents"], Terms(2.5))],
            parameters["since"],
            parameters["until"],
        )
        return fleet_values(made)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(subject, "Client", Recorded)
    return lambda *arguments: CliRunner().invoke(
        application("report"), ["report", "llm", "--api", "http://127.0.0.1:1", *arguments]
    )


def test_the_command_prints_tables_json_and_writes_a_page(run: Any, tmp_path: Path) -> None:
    shown = run("--price-per-gpu-hour", "2.5", "--restart-s", "250", "--checkpoint-every-s", "600").output
    assert "85 s on 4 ranks, $0.24. 73.7 % of the time was useful work. 3 faults, one in 28 s" in " ".join(
        shown.split()
    )
    assert "worker_crash  2" in shown
    assert "each of 3 repaired faults takes a restart of 4.2 min" in " ".join(shown.split())
    reported = json.loads(run("--json").output)
    assert (reported["all_faults"]["count"], reported["cost"], reported["comparison"]) == (3, None, None)
    assert run("--html", str(tmp_path / "llm.html")).exit_code == 0
    assert (tmp_path / "llm.html").read_text().startswith("<!doctype html>")


def test_the_command_reports_the_fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subject, "Client", Recorded)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(application("report"), ["report", "--api", "http://127.0.0.1:1", *arguments])

    shown = " ".join(run("--fleet", "--last", "30d").output.split())
    assert shown.startswith(
        "1 job, 0.1 GPU-hours, $0.24. 73.7 % of the GPU time was useful work. 3 faults, one in 0.0 GPU-hours"
    )
    assert "worker_crash" in shown
    reported = json.loads(run("--fleet", "--json").output)
    assert reported["until"] - reported["since"] == pytest.approx(7 * 86_400)
    assert run("--fleet", "--html", str(tmp_path / "fleet.html")).exit_code == 0
    text = (tmp_path / "fleet.html").read_text()
    assert not re.search(r"https?://|<script|<link|src=|@import|url\(", text)
    assert "<h1>Fleet</h1>" in text
    for tag in ("table", "tr", "td"):
        assert len(re.findall(f"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag
    assert isinstance(run("llm", "--fleet").exception, InvalidSpec)
    assert isinstance(run().exception, InvalidSpec)


def test_what_the_job_file_states_needs_no_option(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = {"price_per_gpu_hour": 2.5, "currency": "€", "restart_s": 250, "checkpoint_every_s": 600}
    monkeypatch.setattr(Recorded, "job", lambda *_: {**RECORDED["job"], "spec": {"report": stated}})
    assert "€0.24" in run().output
    assert "each of 3 repaired faults takes a restart of 4.2 min" in " ".join(run().output.split())
    assert "$0.24" in run("--currency", "$").output


def test_what_cannot_be_is_refused_and_nothing_is_overwritten(run: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("mine")
    assert isinstance(run("--html", str(tmp_path / "mine.html")).exception, Conflict)
    assert (tmp_path / "mine.html").read_text() == "mine"
    found = run("--flops-per-token", "1e9").exception
    assert isinstance(found, InvalidSpec)
    assert "peak_flops as well" in str(found)
    assert isinstance(run("--restart-s", "9").exception, InvalidSpec)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (span(0.4), "0.40 s"), (span(85), "85 s"), (span(600), "10.0 min"), (span(7200), "2.0 h"), (span(9e6), "104 d"),
        (since(183_661), "2 d 03:01:01"), (since(-1), "00:00:00"),
        (percent(0.9971), "99.71 %"), (percent(0.5), "50.0 %"), (percent(None), "not known"),
        (money(1234.5, "$"), "$1,234"), (money(0.125, "€"), "€0.12"),
    ],
)  # fmt: skip
def test_amounts_in_words(shown: str, expected: str) -> None:
    assert shown == expected
