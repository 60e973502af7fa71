"""`holdfast demo`, as a user types it: each fault has its remediation, and the report adds up. The long form is a slow test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_processes import STACK, warm

STEPS = 360
SHORT_STEPS = 140  # the faults need 65, and some more until each is injected
# A stopped rank is proof: 2 s, and what a busy machine adds. Without proof it is given `floor_s`, 10 s.
HANG_DETECTED_S_MAX = 5.0
CLASSES = {"startup", "detect", "decide", "recover", "rework", "stall", "wait", "degraded", "other"}


TIMEOUT_S = 700.0


def _new(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "holdfast.cli.main", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=TIMEOUT_S, check=False)
    return result.returncode, result.stdout, result.stderr


def _forked(*arguments: str) -> tuple[int, str, str]:
    return warm(STACK)(("holdfast.cli.main", *arguments), Path.cwd(), os.environ, TIMEOUT_S)


def _demo(out: Path, *options: str, command: Callable[..., tuple[int, str, str]] = _new) -> tuple[dict[str, Any], str]:
    """The report, and what was printed."""
    code, printed, errors = command("demo", "--out", str(out), *options)
    assert code == 0, printed[-6000:] + errors[-2000:]
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    loaded: dict[str, Any] = json.loads((out / "report.json").read_text())
    return loaded, printed


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _demo(tmp_path_factory.mktemp("demo"), "--steps", str(STEPS))[0]


pytestmark = pytest.mark.timeout(740)


def test_three_faults_in_the_short_form(tmp_path: Path) -> None:
    report, printed = _demo(tmp_path, "--short", "--steps", str(SHORT_STEPS), command=_forked)
    assert report["failures"] == []
    assert [(incident["kind"], incident["action"]) for incident in report["incidents"]] == [
        ("worker_crash", "restart"),
        ("node_lost", "hot_swap"),
        ("hang", "restart"),
    ]
    _assert_times_are_in_order(report)
    _assert_every_second_is_in_one_class(report)
    assert report["losses"]["max_abs_diff"] < 1e-4
    assert report["steps"]["reached"] == report["steps"]["target"] == SHORT_STEPS
    assert "dashboard while it runs: http://" in printed
    summary = printed.rstrip().splitlines()[-5:]
    assert summary[0] == "all 3 faults were detected, attributed and recovered as expected"
    assert summary[1].startswith("from a fault to the first step after it: median ")
    assert summary[2].startswith(f"steps {SHORT_STEPS}/{SHORT_STEPS}, ")
    assert summary[3].startswith(f"goodput {report['goodput']['job']:.1%}: of {report['wall_s']:.0f} s the start took ")
    assert str(tmp_path / "report.json") in summary[4]


@pytest.mark.slow
def test_every_fault_got_its_remediation_and_the_right_culprit(report: dict[str, Any]) -> None:
    assert report["failures"] == []
    found = [(incident["kind"], incident["action"]) for incident in report["incidents"]]
    assert found == [
        ("worker_crash", "restart"),
        ("node_lost", "hot_swap"),
        ("hang", "restart"),
        ("gpu_error", "gpu_reset"),
        ("gpu_error", "scale_down"),
        ("repair", "scale_up"),
    ]
    crash, lost, hang, reset, xid, repair = report["incidents"]
    assert (crash["rank"], hang["rank"]) == (4, 2)
    assert hang["detected_at_s"] - hang["fault_at_s"] <= HANG_DETECTED_S_MAX
    assert lost["node"]
    assert reset["node"] not in ("", xid["node"])
    assert "must be reset before it is used again; then new processes on the same nodes" in reset["reason"]
    assert xid["node"]
    assert reset["restored_from"] == {"memory": 9}, "nothing but its processes ended"
    assert crash["restored_from"] == {"memory": 9}
    assert lost["restored_from"]["peer"] == 1
    assert xid["restored_from"]["peer"] >= 6, "each of six ranks needs what three replicas saved"
    assert "re-sharded from dp 3 to dp 2: read " in xid["outcome"]
    assert "re-sharded from dp 2 to dp 3: read " in repair["outcome"]
    slow = report["slow_rank"]["incidents"][-1]
    assert (slow["kind"], slow["action"], slow["rank"]) == ("straggler", "hot_swap", 1)
    assert "it costs" in slow["reason"], "what it costs is weighed against what a swap costs"
    bereft = report["both_copies_lost"]["incidents"]
    assert {(incident["kind"], incident["action"]) for incident in bereft} == {("node_lost", "hot_swap")}
    assert all(incident["restored_from"]["object store"] >= 1 for incident in bereft)
    assert report["user_bug"]["phase"] == "failed"
    # The second attempt shows it on both nodes, unless a rank is ended by the failure of the other before it gets there.
    assert report["user_bug"]["tries"] in (2, 3), "one restart, and one swap if only one node has shown the exception"
    assert "IndexError" in report["user_bug"]["reason"]
    assert "step 25" in report["user_bug"]["reason"]


@pytest.mark.slow
def test_every_second_is_in_exactly_one_class(report: dict[str, Any]) -> None:
    _assert_every_second_is_in_one_class(report)


def _assert_every_second_is_in_one_class(report: dict[str, Any]) -> None:
    assert set(report["badput_s"]) == CLASSES
    assert report["useful_s"] + sum(report["badput_s"].values()) == pytest.approx(report["wall_s"], rel=0.01)
    assert 0 < report["goodput"]["paid"] < report["goodput"]["job"] < 1


@pytest.mark.slow
def test_the_mesh_shrinks_and_grows_and_no_work_is_lost(report: dict[str, Any]) -> None:
    sizes = [size for _, size in report["world_sizes"] if size]
    assert sizes == [9, 9, 9, 9, 9, 6, 9]
    assert report["steps"]["reached"] == report["steps"]["target"] == STEPS
    assert report["losses"]["max_abs_diff"] < 1e-4


@pytest.mark.slow
def test_times_of_an_incident_are_in_order(report: dict[str, Any]) -> None:
    _assert_times_are_in_order(report)


def _assert_times_are_in_order(report: dict[str, Any]) -> None:
    for incident in report["incidents"]:
        marks = [incident[f"{name}_at_s"] for name in ("fault", "detected", "decided", "prepared", "first_step")]
        assert marks == sorted(marks), incident
        assert len(incident["trace_id"]) == 32
