"""Files of tests that take long come first: none that began last keeps other processes waiting at the end.

`make test ARGS=--write-order` measures them anew, on a machine that does nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from durations import Meter

LIST = Path(__file__).parent / "long_files.txt"
LONG_S = 5.0


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--write-order", action="store_true", help=f"write the files that take long to {LIST.name}")


def listed() -> list[str]:
    return LIST.read_text().splitlines()


def file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def sort(items: list[pytest.Item]) -> None:
    """Within a file, and among files that are not listed, the order stays."""
    place = {name: number for number, name in enumerate(listed())}
    items.sort(key=lambda item: place.get(file(item.nodeid), len(place)))


def meter() -> Meter:
    return Meter(file, write)


def write(took_s: Mapping[str, float]) -> None:
    long = sorted((name for name in took_s if took_s[name] >= LONG_S), key=lambda name: (-took_s[name], name))
    LIST.write_text("".join(f"{name}\n" for name in long))
