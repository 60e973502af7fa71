"""What the conftest of one directory does to its tests, it does to no others: pytest hands it those of all directories."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
HOOK = "pytest_collection_modifyitems"
HOOKED = sorted(each for each in TESTS.glob("*/conftest.py") if HOOK in each.read_text())


@dataclass
class Item:
    path: Path
    marked: list[object] = field(default_factory=list)

    def add_marker(self, marker: object) -> None:
        self.marked.append(marker)


@pytest.mark.parametrize("conftest", HOOKED, ids=lambda each: each.parent.name)
def test_a_directory_marks_only_its_own_tests(conftest: Path) -> None:
    pytest.importorskip("playwright" if conftest.parent.name == "browser" else "pytest")
    spec = importlib.util.spec_from_file_location(f"conftest_of_{conftest.parent.name}", conftest)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own, other = Item(conftest.with_name("test_own.py")), Item(TESTS / "unit" / "test_other.py")
    getattr(module, HOOK)([own, other])
    assert other.marked == []


def test_there_are_such_directories() -> None:
    assert {each.parent.name for each in HOOKED} >= {"browser", "gpu"}
