"""The exception that a process has printed before it ended by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent.workers.errors import LINES_AFTER_MAX, read_printed

PRINTED = """step 30
Error executing job with overrides: ['lr=1']
Traceback (most recent call last):
  File "/w/train.py", line 12, in main
    fit(model)
  File "/w/fit.py", line 3, in fit
    raise ValueError("bad sample 17")
ValueError: bad sample 17
"""
HYDRA_END = "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"


def read(tmp_path: Path, text: str, *, aborted: bool = False) -> tuple[str, str] | None:
    log = tmp_path / "rank-0.log"
    log.write_text(text)
    error = read_printed(log, aborted=aborted)
    return None if error is None else (error.type, error.message)


def test_an_exception_that_a_library_prints_before_it_ends_the_process_is_read(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(PRINTED + HYDRA_END)
    error = read_printed(log, aborted=False)
    assert error is not None
    assert (error.type, error.message) == ("ValueError", "bad sample 17")
    assert error.frames == ("/w/train.py:12 main", "/w/fit.py:3 fit")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise KeyError('x')", ("KeyError", "'x'")),
        ("raise ValueError('two\\nlines')", ("ValueError", "two\nlines")),
        ("raise ValueError", ("ValueError", "")),
        ("import json; json.loads('{')", ("json.decoder.JSONDecodeError", "Expecting property name enclosed")),
        ("try:\n  1/0\nexcept Exception as e:\n  raise RuntimeError('second') from e", ("RuntimeError", "second")),
        ("import traceback, sys\ntry:\n  1/0\nexcept Exception: traceback.print_exc(); sys.exit(3)",
         ("ZeroDivisionError", "division by zero")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_what_python_prints_is_read(tmp_path: Path, code: str, expected: tuple[str, str], prefix: str) -> None:
    """torch's prefix of each line is not part of the exception."""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    found = read(tmp_path, "".join(prefix + line for line in printed.stderr.splitlines(keepends=True)))
    assert found is not None
    assert (found[0], found[1][: len(expected[1])]) == expected


def test_an_exception_after_which_the_script_went_on_is_not_its_end(tmp_path: Path) -> None:
    after = "".join(f"step {step}\n" for step in range(31, 32 + LINES_AFTER_MAX))
    assert read(tmp_path, f"{PRINTED}\n{after}") is None
    assert read(tmp_path, f"{PRINTED}[rank0]:[W] a warning of torch at the end\n") == ("ValueError", "bad sample 17")


@pytest.mark.parametrize(
    "text", ["", "step 30\n", "Traceback (most recent call last):\n", PRINTED.replace("  File", "File")]
)
def test_other_output_is_no_exception(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) is None


def test_hostile_output_is_read_quickly(tmp_path: Path) -> None:
    block = "Traceback (most recent call last):\n" + " x\n" * 5
    assert read(tmp_path, block * 4000) is None
    assert read(tmp_path, "A" * 300_000) is None
    assert read(tmp_path, PRINTED + "\n" + "a: b\n" * LINES_AFTER_MAX) is not None


def test_an_exception_of_the_cpp_runtime_counts_if_the_process_was_aborted(tmp_path: Path) -> None:
    text = f"{PRINTED}terminate called after throwing an instance of 'c10::Error'\n  what():  no device\n"
    assert read(tmp_path, text, aborted=True) == ("c10.Error", "no device")
    assert read(tmp_path, PRINTED, aborted=True) is None


def test_a_missing_log_is_no_error(tmp_path: Path) -> None:
    assert read_printed(tmp_path / "none", aborted=False) is None
