"""Warnings while `holdfast run` follows a job: each condition once, with what to do, and no flood."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from holdfast.cli.warning_lines import AGAIN_S, OF_A_KIND_MAX, WarningLines

JOB = {"ranks": [{"rank": 0, "node": "n0"}, {"rank": 1, "node": "n1"}], "submitted_at": 1000.0}


def finding(number: int = 1, **changes: Any) -> dict[str, Any]:
    base = {
        "id": f"straggler:gpt:{number}",
        "kind": "straggler",
        "severity": "warning",
        "summary": "Rank 1 on n1 is slow [/bold].",
        "advice": "check the node",
        "job": "gpt",
        "node": "n1",
        "rank": 1,
        "gpu": None,
        "incident": "",
        "judged_at": 1010.0 + number,
        "evidence": {},
    }
    return base | changes


def shown(lines: WarningLines, *findings: dict[str, Any]) -> list[str]:
    return [Text.from_markup(line, emoji=False).plain for line in lines.new(findings, JOB)]


def test_a_warning_is_one_line_that_says_what_to_do() -> None:
    assert shown(WarningLines("gpt"), finding(summary="Rank 1 on n1\nis slow [/bold].")) == [
        "warning   Rank 1 on n1 is slow [/bold]. To do: check the node (`holdfast explain straggler:gpt:1`)"
    ]


def test_a_condition_is_printed_once_however_often_it_is_reported() -> None:
    lines = WarningLines("gpt")
    assert len(shown(lines, finding(2), finding(1))) == 1
    assert shown(lines, finding(1), finding(3, generation=4)) == []


def test_other_conditions_of_a_rank_are_printed() -> None:
    lines = WarningLines("gpt")
    assert len(shown(lines, finding(1, evidence={"rule": "a"}), finding(2, evidence={"rule": "b"}))) == 2


def test_many_ranks_are_not_a_flood() -> None:
    lines = WarningLines("gpt")
    printed = shown(lines, *(finding(rank, rank=rank) for rank in range(200)))
    assert len(printed) == OF_A_KIND_MAX + 1
    assert "holdfast explain --job gpt" in printed[-1]
    assert shown(lines, *(finding(rank, rank=rank) for rank in range(200, 400))) == []
    assert len(shown(lines, finding(500, rank=500, judged_at=1500.0 + AGAIN_S))) == 1


def test_what_is_not_a_warning_of_this_run_is_not_printed() -> None:
    lines = WarningLines("gpt")
    others = (
        finding(1, severity="info"),
        finding(2, severity="error"),
        finding(3, incident="i-1"),
        finding(4, job="other"),
        finding(5, job="", node="n7"),
        finding(6, judged_at=900.0),
    )
    assert shown(lines, *others) == []


def test_a_warning_about_a_node_of_the_job_is_printed() -> None:
    about_node = finding(kind="host_pressure", job="", node="n0", rank=None, summary="The disk of n0 is full")
    assert len(shown(WarningLines("gpt"), about_node)) == 1
