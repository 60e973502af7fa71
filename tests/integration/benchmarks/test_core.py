"""`make bench-core` runs on a small job, and everything that it loses comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from waiting import TIMEOUT_S

ROOT = Path(__file__).parents[3]


def test_a_small_job_recovers_saves_and_is_taken_over(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.core", "--nodes", "8,16", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "core.json").read_text())
    assert set(report) == {"8", "16"}
    for row in report.values():
        assert row["incident_cpu_s"] > 0
        assert row["commits"] > 0
        assert row["bytes_per_commit"] > 0
        assert row["memory_mb"] >= 0
