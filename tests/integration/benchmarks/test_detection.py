"""`make bench-detection` runs, writes what it promises, and its judges can say no."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from waiting import TIMEOUT_S

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.detection", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)


def here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The same in this process, which has imported most of it. Raises SystemExit as a new process would end."""
    from benchmarks.detection.__main__ import main

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["benchmarks.detection", *arguments])
    main()


def test_suites_write_their_numbers(tmp_path: Path) -> None:
    done = run("--only", "xid,user_vs_hardware,hang", "--seed", "7", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    suites = json.loads((tmp_path / "detection.json").read_text())["suites"]
    assert set(suites) == {"xid", "user_vs_hardware", "hang"}
    for suite in suites.values():
        assert {"precision", "recall", "wilson95", "delay", "cases"} <= suite.keys()
        assert suite["precision"] >= 0.98
        assert suite["recall"] >= 0.96


def test_data_of_another_directory_is_judged_and_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [{"name": "not so", "truth": "hardware", "stop": False, "failures": [
        {"node": 0, "after_s": 4, "step": 0, "error": ["NameError", "x", "a.py:1 f"]}]}]  # fmt: skip
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "mine.yaml").write_text(yaml.safe_dump(wrong))
    here(monkeypatch, "--only", "user_vs_hardware", "--data", str(tmp_path), "--out", str(tmp_path))
    score = json.loads((tmp_path / "detection.json").read_text())["suites"]["user_vs_hardware"]
    assert (score["hits"], score["wrong"], score["missed"], score["recall"]) == (0, 1, 1, 0.0)
    assert "user, not hardware" in score["mistakes"][0]


@pytest.mark.parametrize("arguments", [("--data", "/nowhere"), ("--only", "astrology")])
def test_bad_arguments_say_what_would_be_right(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        here(monkeypatch, *arguments)
    assert end.value.code == 2
    assert arguments[1] in capsys.readouterr().err
