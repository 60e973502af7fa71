"""Prepare functions outside of a worker template, and their limits inside one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast.train as hf
from holdfast.domain.errors import InvalidSpec
from holdfast.train.warm import preparation

calls: list[str] = []


def load() -> dict[str, float]:
    calls.append("load")
    return {"torch": torch.rand(1).item(), "python": random.random()}


imported_elsewhere = load


def fails() -> None:
    raise ValueError("no such data set")


@pytest.fixture(autouse=True)
def nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_values", {})
    calls.clear()


def test_without_a_template_the_function_is_called_once_in_the_process() -> None:
    first = hf.prepared(load)
    assert hf.prepared(load) is first
    assert calls == ["load"]


def test_random_numbers_of_a_script_do_not_depend_on_where_the_function_was_called() -> None:
    torch.manual_seed(7)
    random.seed(7)
    expected = (torch.rand(1).item(), random.random())
    torch.manual_seed(7)
    random.seed(7)
    found = hf.prepared(load)
    assert (found["torch"], found["python"]) == expected
    assert (torch.rand(1).item(), random.random()) == expected


@pytest.mark.parametrize("name", ["load", "imported_elsewhere"])
def test_what_the_template_has_called_is_returned(name: str) -> None:
    threads = torch.get_num_threads()
    preparation.call(f"{__name__}:{name}", lambda reason: None)
    assert torch.get_num_threads() == threads
    hf.prepared(load)
    assert calls == ["load"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}:fails", "fails failed: ValueError: no such data set"),
        (f"{__name__}:no_such", "has no function no_such, which preload names"),
        ("no_such_module:prepare", "importing no_such_module for no_such_module:prepare failed: ModuleNotFoundError"),
    ],
)
def test_what_fails_in_the_template_is_named(name: str, message: str) -> None:
    with pytest.raises(preparation.PrepareFailed, match=message):
        preparation.call(name, lambda reason: None)


def test_an_exception_leaves_nothing_and_is_raised_again() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="no such data set"):
            hf.prepared(fails)


def test_a_function_that_no_template_can_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner() -> int:
        return 1

    for function in (inner, lambda: 1):
        with pytest.raises(InvalidSpec, match="a function of a module"):
            hf.prepared(function)
    monkeypatch.setattr(load, "__module__", "__main__")
    with pytest.raises(InvalidSpec, match="load of the script itself"):
        hf.prepared(load)


def test_a_function_that_takes_too_long_is_named_and_its_process_ends(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef prepare():\n    while True:\n        time.sleep(60)\n")
    code = (
        "from holdfast.train.warm import preparation\n"
        "preparation.call('slow:prepare', lambda reason: print(reason, flush=True), timeout_s=0.3)\n"
        "print('went on', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "slow:prepare takes longer than 0.3 s\n"
