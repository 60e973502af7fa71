"""Where a demo writes: a second one beside the first, of which nothing is deleted."""

from __future__ import annotations

from pathlib import Path

from holdfast.cli.demo import STACK, unused


def test_a_further_demo_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    assert unused(out) == out
    out.mkdir()
    (out / "notes.txt").touch()
    assert unused(out) == out, "no demo has run here"
    (out / STACK).mkdir()
    assert unused(out) == out / "run-2"
    (out / "run-2").mkdir()
    assert unused(out) == out / "run-3"
    assert not (out / "run-3").exists()
