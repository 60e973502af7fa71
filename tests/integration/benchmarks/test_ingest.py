"""`make bench-ingest` runs on a small fleet, and its findings come from what its nodes said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from waiting import TIMEOUT_S

ROOT = Path(__file__).parents[3]


def test_a_small_fleet_is_taken_and_counted(tmp_path: Path) -> None:
    options = ["--only", "core,fleet", "--nodes", "40", "--seconds", "3", "--clients", "1", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.ingest", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "ingest.json").read_text())
    fleet = report["fleet"]
    assert fleet["not_connected"] == ""
    assert fleet["ended"] == {}
    assert fleet["unexpected"] == {}
    assert fleet["findings"] >= fleet["expected"] > 20
    assert 60 <= fleet["ticks"] <= 121
    assert report["core"]["decode_us"] > 0
    assert len(report["step_ms"]) > 10
