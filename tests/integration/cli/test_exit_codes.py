"""What a scheduler gets from `holdfast run` when it ends."""

from __future__ import annotations

from pathlib import Path

from commands import Shell

RAISES = """
def main() -> None:
    raise KeyError("no such layer")

main()
"""


def test_an_error_of_the_script_is_not_worth_another_attempt(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RAISES)
    shell = Shell(tmp_path)
    result = shell("run", "--local", "--dir", "own", "train.py", timeout_s=150)
    assert result.code == 93, result.out + result.err
    assert "no such layer" in result.out
    shell.assert_nothing_runs()


def test_without_a_supervisor_nothing_is_known_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    result = Shell(tmp_path)("run", "--api", "http://127.0.0.1:1", "train.py")
    assert result.code == 69, result.out + result.err
    assert "no Holdfast API answers at http://127.0.0.1:1" in result.err
    assert "holdfast up" in result.err
    assert "Traceback" not in result.err
