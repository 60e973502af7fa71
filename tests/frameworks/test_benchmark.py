"""`make bench-recovery ARGS='--only frameworks'` runs and writes what it promises. Whether the numbers are good is not a test's
business."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed: make frameworks-test")
def test_one_trial_is_measured_under_holdfast_and_with_the_frameworks_own_resume(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.recovery", "--only", "frameworks", "--trials", "1"]
    done = subprocess.run(
        [*command, "--frameworks", "accelerate", "--out", str(tmp_path)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "frameworks.json").read_text())
    assert result["failed_trials"] == {}, done.stdout
    for measured in ("kill_to_step_s", "rework_steps"):
        assert {how: len(values) for how, values in result[measured]["accelerate"].items()} == {"holdfast": 1, "own": 1}
    assert all(values[0] > 0 for values in result["kill_to_step_s"]["accelerate"].values())
    assert result["rework_steps"]["accelerate"]["own"][0] >= 5  # killed after 15 steps, saved after 10
    assert "÷ holdfast" in done.stdout
