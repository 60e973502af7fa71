"""A failed test shows what its processes have logged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

TWO_TESTS = """
def write(directory, name):
    directory.joinpath("agent").mkdir()
    directory.joinpath("agent", name).write_text("".join(f"line {number}\\n" for number in range(100)))

def test_that_passes(tmp_path):
    write(tmp_path, "rank-0.log")

def test_that_fails(tmp_path):
    write(tmp_path, "rank-1.log")
    assert tmp_path is None
"""


def test_a_failure_shows_the_last_lines_of_its_own_logs(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TWO_TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "failure_logs", f"--basetemp={tmp_path / 'tmp'}", "test_two.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = done.stdout + done.stderr
    assert "1 failed, 1 passed" in shown
    assert "rank-1.log" in shown
    assert "rank-0.log" not in shown
    assert "line 60\nline 61\n" in shown
    assert "line 59\n" not in shown
