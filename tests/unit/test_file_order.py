"""The order in which files of tests are run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import file_order
import pytest

ROOT = Path(__file__).parents[2]


@dataclass
class Item:
    nodeid: str


def test_every_file_of_the_list_exists_and_is_there_once() -> None:
    names = file_order.listed()
    assert len(set(names)) == len(names)
    for name in names:
        assert (ROOT / name).exists(), f"{name} is gone: make test ARGS=--write-order measures which files take long"


def test_listed_files_come_first_and_nothing_else_changes_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(file_order, "LIST", tmp_path / "list.txt")
    file_order.write({"c.py": 9.0, "a.py": 5.0, "b.py": 9.0, "d.py": 4.9})
    assert file_order.listed() == ["b.py", "c.py", "a.py"]
    items = [Item(nodeid) for nodeid in ("z.py::2", "z.py::1", "a.py::1", "y.py::1", "c.py::2", "c.py::1")]
    file_order.sort(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == ["c.py::2", "c.py::1", "a.py::1", "z.py::2", "z.py::1", "y.py::1"]


def test_a_file_is_as_long_as_all_its_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(file_order, "LIST", tmp_path / "list.txt")
    meter = file_order.meter()
    for nodeid, phase, took_s in (
        ("a.py::one", "setup", 2.0),
        ("a.py::two[1]", "call", 3.0),
        ("b.py::one", "call", 4.0),
    ):
        meter.pytest_runtest_logreport(
            pytest.TestReport(nodeid, ("a.py", 1, ""), {}, "passed", None, phase, duration=took_s)  # type: ignore[arg-type]
        )
    meter.pytest_sessionfinish()
    assert file_order.listed() == ["a.py"]
