"""An incident's trace in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from holdfast.cli.trace import SIBLINGS_MAX, tree


def span(name: str, parent: str = "", start: float = 0.0, end: float = 1.0, **attributes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "service": "holdfast-agent",
        "span_id": f"{name}-{attributes.get('rank', '')}",
        "parent_id": parent,
        "start": 1000.0 + start,
        "end": 1000.0 + end,
        "attributes": {f"holdfast.{key}": value for key, value in attributes.items()},
        "error": "",
    }


def shown(*spans: dict[str, Any]) -> list[str]:
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        console.print(tree({"incident": "i-1", "trace_id": "ab" * 16, "spans": list(spans)}))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_children_stand_below_their_parents_in_order_of_time() -> None:
    lines = shown(
        span("incident", "elsewhere", 0.2, 1.0, node="n2", rank=4, cause="rank 4 was [killed]"),
        span("prepare", "change-", 0.4, 0.5, node="n2"),
        span("change", "incident-4", 0.3, 1.0, generation=3, new_generation=4, reason="r"),
        span("decision", "incident-4", 0.2, 0.3, action="restart", reason="a crash is cured by a restart"),
    )
    assert "i-1" in lines[0]
    assert lines[1].endswith("incident  n2 rank 4  800 ms  at +0 ms  rank 4 was [killed]"), "markup is text"
    assert lines[2].endswith("decision  100 ms  at +0 ms  restart: a crash is cured by a restart")
    assert "change  3 → 4  700 ms  at +100 ms" in lines[3]
    assert "prepare  n2" in lines[4]
    assert [line.index(name) for line, name in zip(lines[1:], ("inc", "dec", "cha", "pre"), strict=True)] == [
        4,
        8,
        8,
        12,
    ]


def test_of_a_thousand_ranks_the_slowest_are_shown() -> None:
    ranks = [span("first step", "change-", 0.0, rank / 100, rank=rank) for rank in range(1000)]
    lines = shown(span("change"), *ranks)
    assert len(lines) == 2 + SIBLINGS_MAX + 1
    assert "rank 999" in "".join(lines)
    assert f"{1000 - SIBLINGS_MAX} more first step" in lines[-1]


def test_a_failure_says_why() -> None:
    [_, line] = shown({**span("stage", node="n1"), "error": "no source hands it out"})
    assert line.endswith("no source hands it out")


def test_an_empty_record_says_so() -> None:
    assert "no spans are recorded" in shown()[1]
