"""The list of tests that `make test-fast` leaves out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import long_tests
import pytest

ROOT = Path(__file__).parents[2]


def test_every_test_of_the_list_exists() -> None:
    for name in long_tests.listed():
        path, _, function = name.partition("::")
        text = (ROOT / path).read_text()
        for word in function.split("::"):
            known = f"def {word}(" in text or f"class {word}" in text or word in ("runTest", *_machines(text))
            assert known, f"{name} is gone: make long-tests measures which tests take long"


def _machines(text: str) -> list[str]:
    """Test cases that hypothesis makes of a state machine: `TestX = Machine.TestCase`."""
    return [line.partition(" = ")[0] for line in text.splitlines() if line.endswith(".TestCase")]


@dataclass
class Item:
    nodeid: str


@dataclass
class Config:
    left_out: list[Item] = field(default_factory=list)

    @property
    def hook(self) -> Config:
        return self

    def pytest_deselected(self, items: list[Item]) -> None:
        self.left_out += items


def test_all_cases_of_a_listed_test_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(long_tests, "LIST", tmp_path / "list.txt")
    long_tests.write(["a.py::test_slow", "a.py::TestOf::test_it"])
    items = [Item(f"a.py::{name}") for name in ("test_slow[1]", "test_quick", "test_slow[2-x]", "TestOf::test_it")]
    config = Config()
    long_tests.leave_out(config, items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == ["a.py::test_quick"]
    assert len(config.left_out) == 3


def test_a_function_is_as_long_as_all_its_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(long_tests, "LIST", tmp_path / "list.txt")
    meter = long_tests.meter()
    for nodeid, took_s in (("a.py::test_many[1]", 0.2), ("a.py::test_many[2]", 0.2), ("a.py::test_one", 0.2)):
        meter.pytest_runtest_logreport(
            pytest.TestReport(nodeid, ("a.py", 1, ""), {}, "passed", None, "call", duration=took_s)
        )
    meter.pytest_sessionfinish()
    assert long_tests.listed() == ["a.py::test_many"]
