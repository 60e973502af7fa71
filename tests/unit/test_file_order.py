"""The order in which files of tests are run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import file_order
import pytest
from file_order import File

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(file_order, "LIST", tmp_path / "list.txt")


@dataclass
class Item:
    nodeid: str


def test_every_file_of_the_list_exists_and_is_there_once_the_longest_first() -> None:
    files = file_order.listed()
    assert len({each.name for each in files}) == len(files)
    for each in files:
        assert (ROOT / each.name).exists(), (
            f"{each.name} is gone: make test ARGS=--write-order measures what takes long"
        )
        assert each.computed_s <= each.took_s
    assert all(one.took_s >= other.took_s for one, other in pairwise(files))


@pytest.mark.usefixtures("no_list")
def test_listed_files_come_first_and_nothing_else_changes_its_place() -> None:
    file_order.write([File("c.py", 9.0, 0.0), File("a.py", 5.0, 0.0), File("b.py", 9.0, 0.0), File("d.py", 4.9, 4.0)])
    assert file_order.listed() == [File("b.py", 9.0, 0.0), File("c.py", 9.0, 0.0), File("a.py", 5.0, 0.0)]
    items = [Item(nodeid) for nodeid in ("z.py::2", "z.py::1", "a.py::1", "y.py::1", "c.py::2", "c.py::1")]
    file_order.sort(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == ["c.py::2", "c.py::1", "a.py::1", "z.py::2", "z.py::1", "y.py::1"]


def test_files_that_compute_are_spread_among_those_that_wait() -> None:
    waiting = [File(f"w{number}", 10.0, 1.0) for number in range(6)]
    computing = [File(f"c{number}", 15.0, 14.0) for number in range(4)]
    order = [each.name for each in file_order.spread([*computing, *waiting])]
    assert order == ["w0", "c0", "w1", "c1", "w2", "w3", "c2", "w4", "c3", "w5"]


def test_whatever_takes_how_long_no_part_of_the_order_is_of_one_kind() -> None:
    """Up to each place in the order, both kinds have the same share of their time behind them, but for one file."""
    files = [File(f"{number}", 1.0 + 97.0 * (number % 7), 0.6 * (number % 2) * 600.0) for number in range(40)]
    files.sort(key=lambda each: -each.took_s)
    all_s = {kind: sum(each.took_s for each in files if each.computes is kind) for kind in (False, True)}
    behind_s = {False: 0.0, True: 0.0}
    for each in file_order.spread(files):
        behind_s[each.computes] += each.took_s
        shares = [behind_s[kind] / all_s[kind] for kind in (False, True)]
        longest = max(other.took_s / all_s[other.computes] for other in files)
        assert abs(shares[0] - shares[1]) <= longest + 1e-9


def test_files_of_one_kind_keep_their_order() -> None:
    files = [File(name, 5.0, 5.0) for name in "cab"]
    assert file_order.spread(files) == files
    assert file_order.spread([]) == []


@pytest.mark.usefixtures("no_list")
def test_a_file_is_as_long_as_all_its_tests_and_computes_as_much() -> None:
    meter = file_order.OrderMeter()
    for nodeid, phase, took_s, computed_s in (
        ("a.py::one", "setup", 2.0, 0.5),
        ("a.py::two[1]", "call", 3.0, 2.5),
        ("b.py::one", "call", 4.0, 4.0),
        ("c.py::one", "call", 6.0, None),
    ):
        report = pytest.TestReport(nodeid, ("a.py", 1, ""), {}, "passed", None, phase, duration=took_s)  # type: ignore[arg-type]
        if computed_s is not None:  # from another process that measures nothing
            report.computed_s = computed_s  # type: ignore[attr-defined]
        meter.pytest_runtest_logreport(report)
    meter.pytest_sessionfinish()
    assert file_order.listed() == [File("c.py", 6.0, 0.0), File("a.py", 5.0, 3.0)]
    assert [each.computes for each in file_order.listed()] == [False, True]


def test_cpu_time_is_attached_to_a_report_and_reaches_the_process_that_writes_the_list(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter((10.0, 12.5, 13.0))
    with monkeypatch.context() as patched:  # ends before the report of this test is made
        patched.setattr("time.process_time", lambda: next(now_s))
        times = file_order.CpuTimes()
        for computed_s in (2.5, 0.5):
            making = times.pytest_runtest_makereport()
            next(making)
            with pytest.raises(StopIteration) as made:
                making.send(pytest.TestReport("a.py::one", ("a.py", 1, ""), {}, "passed", None, "call", duration=3.0))
            sent = pytestconfig.hook.pytest_report_to_serializable(config=pytestconfig, report=made.value.value)
            arrived = pytestconfig.hook.pytest_report_from_serializable(config=pytestconfig, data=sent)
            assert arrived.computed_s == computed_s
