"""The report of a soak: one finding of any kind, or one leak, fails it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.soak.report import PARTS, Outcome, Report, dumps, quantiles, table, table_of, with_table

REPOSITORY = Path(__file__).parents[3]
# The page says of these that training goes on.
INTERRUPTS_NOTHING = {
    "diagnostics", "supervisor", "Redis", "the whole control plane", "replicator", "object store", "worker template",
    "an agent's last free file descriptor",
}  # fmt: skip


def outcome(*findings: tuple[str, str], kinds: tuple[str, ...] = ("agent_kill",), pause_s: float = 1.0) -> Outcome:
    return Outcome(1, kinds, "what was done", pause_s, 20.0, 4, 1, findings)


def report(*outcomes: Outcome) -> Report:
    return Report(seed=7, minutes=3.0, nodes=5, outcomes=list(outcomes))


def test_a_soak_without_a_finding_passes() -> None:
    assert report(outcome()).passed


def test_a_soak_that_struck_nothing_does_not() -> None:
    assert not report().passed


@pytest.mark.parametrize("count", ["unrecovered", "healthy_stopped", "healthy_evicted", "lost_work"])
def test_one_finding_fails_it_and_is_counted(count: str) -> None:
    found = report(outcome(), outcome((count, "why")))
    assert not found.passed
    assert found.to_json()[count] == 1
    assert [each["finding"] for each in found.to_json()["findings"]] == ["why"]


def test_a_wrong_value_a_leak_or_an_early_end_fails_it() -> None:
    wrong, leaking, broken = report(outcome()), report(outcome()), report(outcome())
    wrong.wrong_values = 1
    leaking.leaks["descriptors of x"] = "10 → 1000"
    broken.broken_off = "the nodes do not connect"
    assert not any(each.passed for each in (wrong, leaking, broken))


def test_the_file_has_the_agreed_fields() -> None:
    mixed = outcome(kinds=("agent_kill", "redis_kill"), pause_s=9.0)
    read = json.loads(dumps(report(outcome(), mixed)))
    assert read["faults"] == {"agent_kill": 2, "redis_kill": 1}
    assert read["pause_s"] == {"p50": 1.0, "p99": 9.0, "max": 9.0}
    assert (read["unrecovered"], read["wrong_values"], read["healthy_stopped"], read["healthy_evicted"]) == (0, 0, 0, 0)
    assert read["leaks"] == {}
    assert read["pause_s_by_kind"]["agent_kill"]["n"] == 1  # the mixed one says nothing of either


def test_quantiles_are_by_nearest_rank() -> None:
    assert quantiles(range(1, 101)) == {"p50": 50, "p99": 99, "max": 100}
    assert quantiles([]) == {}


def test_the_table_takes_the_worst_of_all_reports_and_admits_what_was_not_tried() -> None:
    reports = [report(outcome(pause_s=pause_s)).to_json() for pause_s in (1.0, 3.5)]
    rows = table(reports).splitlines()
    assert "| agent | 2 | 1 at most | 3.5 s | 4 at most |" in rows
    assert "| Redis | 0 | – | – | – |" in rows


def test_a_page_gets_its_table_between_its_marks_and_again() -> None:
    page = with_table((REPOSITORY / "docs" / "architecture.md").read_text(), "one")
    assert table_of(page) == ["one"]
    assert table_of(with_table(page, "another\none")) == ["another", "one"]
    with pytest.raises(ValueError, match="no line <!-- measured"):
        with_table("a page without marks", "one")


def test_the_page_has_measured_every_part() -> None:
    """What docs/architecture.md says of a part that dies was tried, and what is said to interrupt nothing did not."""
    rows = [
        line.strip("| ").split(" | ") for line in table_of((REPOSITORY / "docs" / "architecture.md").read_text())[2:]
    ]
    assert [row[0] for row in rows] == list(PARTS)
    for part, times, generations, _, again in rows:
        assert int(times) > 0, f"{part} was never tried alone: make soak"
        if part in INTERRUPTS_NOTHING:
            assert (generations, again) == ("0 at most", "0 at most"), part
