"""Which tests take long: `make test-fast` leaves them out, `make long-tests` measures them anew.

A function is long when all of its cases together take `LONG_S` on a machine that does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from durations import Meter

LIST = Path(__file__).with_suffix(".txt")
LONG_S = 0.3


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--short", action="store_true", help=f"without the tests of {LIST.name}")
    parser.addoption("--write-long", action="store_true", help=f"write the tests that take long to {LIST.name}")


def listed() -> list[str]:
    return LIST.read_text().splitlines()


def function(nodeid: str) -> str:
    """The test without its parameters."""
    return nodeid.partition("[")[0]


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = frozenset(listed())
    config.hook.pytest_deselected(items=[item for item in items if function(item.nodeid) in long])
    items[:] = [item for item in items if function(item.nodeid) not in long]


def meter() -> Meter:
    return Meter(function, lambda took_s: write(name for name in took_s if took_s[name] >= LONG_S))


def write(names: Iterable[str]) -> None:
    LIST.write_text("".join(f"{name}\n" for name in sorted(names)))
