"""The order in which files of tests begin. Those that take long come first: none that began last keeps other processes waiting
at the end. Those that compute are spread among those that wait for processes, so that the processors are in use all the time.

`make test ARGS=--write-order` measures both anew, on a machine that does nothing else.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from durations import Meter

LIST = Path(__file__).parent / "long_files.txt"
LONG_S = 5.0
UNLISTED_S = 1.0  # what a file that is not listed takes, about
UNLISTED_COMPUTE = ("tests/unit/", "tests/contract/", "tests/simulation/")
COMPUTES = 0.5  # the share of its time in which a file computes, if it does not mainly wait


@dataclass(frozen=True, slots=True)
class File:
    """One line of the list."""

    name: str
    took_s: float
    computed_s: float  # of that: CPU time of the process of the tests, without what they start

    @classmethod
    def of(cls, line: str) -> File:
        took_s, computed_s, name = line.split(" ", 2)
        return cls(name, float(took_s), float(computed_s))

    @classmethod
    def unlisted(cls, name: str) -> File:
        return cls(name, UNLISTED_S, UNLISTED_S if name.startswith(UNLISTED_COMPUTE) else 0.0)

    def __str__(self) -> str:
        return f"{self.took_s:.0f} {self.computed_s:.0f} {self.name}"

    @property
    def computes(self) -> bool:
        return self.computed_s >= COMPUTES * self.took_s


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--write-order", action="store_true", help=f"write the files that take long to {LIST.name}")


def listed() -> list[File]:
    return [File.of(line) for line in LIST.read_text().splitlines()]


def file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def sort(items: list[pytest.Item]) -> None:
    """Within a file the order stays."""
    names = dict.fromkeys(file(item.nodeid) for item in items)
    long = [each for each in listed() if each.name in names]
    short = [File.unlisted(name) for name in names.keys() - {each.name for each in long}]
    short.sort(key=lambda each: [*names].index(each.name))
    place = {each.name: number for number, each in enumerate(spread([*long, *short]))}
    items.sort(key=lambda item: place[file(item.nodeid)])


def spread(files: Sequence[File]) -> list[File]:
    """Files that compute, spread evenly among the others by the time that they take. Among those of a kind the order stays."""
    kinds = [[each for each in files if each.computes is computes] for computes in (False, True)]
    began: list[tuple[float, int, int, File]] = []
    for kind, members in enumerate(kinds):
        all_s, before_s = sum(each.took_s for each in members), 0.0
        for number, each in enumerate(members):
            began.append((before_s / all_s, kind, number, each))
            before_s += each.took_s
    return [each for *_, each in sorted(began, key=lambda entry: entry[:3])]


class CpuTimes:
    """In the process of the tests: attaches to each report how much CPU time this process has used since the one before."""

    def __init__(self) -> None:
        self._until_s = time.process_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = time.process_time()
        report.computed_s = now_s - self._until_s  # type: ignore[attr-defined] # travels with the report
        self._until_s = now_s
        return report


class OrderMeter(Meter):
    """How long files take, and how much of that they compute."""

    def __init__(self) -> None:
        super().__init__(file, self._write)
        self._computed_s: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        super().pytest_runtest_logreport(report)
        self._computed_s[file(report.nodeid)] += getattr(report, "computed_s", 0.0)

    def _write(self, took_s: Mapping[str, float]) -> None:
        write(File(name, seconds, self._computed_s[name]) for name, seconds in took_s.items())


def write(files: Iterable[File]) -> None:
    long = sorted((each for each in files if each.took_s >= LONG_S), key=lambda each: (-each.took_s, each.name))
    LIST.write_text("".join(f"{each}\n" for each in long))
