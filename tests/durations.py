"""How long tests take, added up by what they belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import pytest


class Meter:
    """Adds up what pytest reports; with several processes, in the one that has started the others. `belongs_to`: node id of a
    test → what it counts for. `write` receives the seconds of each at the end."""

    def __init__(self, belongs_to: Callable[[str], str], write: Callable[[Mapping[str, float]], None]) -> None:
        self._belongs_to, self._write = belongs_to, write
        self._took_s: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took_s[self._belongs_to(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        self._write(self._took_s)
