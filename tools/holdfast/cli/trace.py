"""Prints an incident's trace as a tree of spans with start times and durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree

SIBLINGS_MAX = 12  # shown spans of the same name: the slowest ones
PREFIX = "holdfast."
# Attributes that are shown at the end of a line, in this order; `--json` prints all attributes.
SAID = ("cause", "summary", "reason", "source", "outcome")

Span = Mapping[str, Any]


def tree(trace: Mapping[str, Any]) -> Tree:
    """Build the tree of a trace in the form of the REST API. Times are relative to the first span."""
    spans: Sequence[Span] = trace["spans"]
    title = Text.assemble((f"incident {trace['incident']}", "bold"), (f"   trace {trace['trace_id']}", "dim"))
    root = Tree(title, guide_style="dim")
    if not spans:
        root.add(Text("no spans are recorded", "dim"))
        return root
    known = {span["span_id"] for span in spans}
    zero = min(span["start"] for span in spans)
    for span in spans:
        if span["parent_id"] not in known:
            _grow(root, span, spans, zero)
    return root


def _grow(above: Tree, span: Span, spans: Sequence[Span], zero: float) -> None:
    branch = above.add(_line(span, zero))
    children = sorted((each for each in spans if each["parent_id"] == span["span_id"]), key=lambda each: each["start"])
    shown, left_out = _slowest(children)
    for child in shown:
        _grow(branch, child, spans, zero)
    for name, count in left_out.items():
        branch.add(Text(f"… and {count} more {name}, all faster", "dim"))


def _slowest(children: Sequence[Span]) -> tuple[list[Span], dict[str, int]]:
    """Return the spans to show, in order of time, and how many spans of each name are left out."""
    kept: set[str] = set()
    left_out: dict[str, int] = {}
    for name in dict.fromkeys(child["name"] for child in children):
        alike = sorted((child for child in children if child["name"] == name), key=_seconds, reverse=True)
        kept.update(child["span_id"] for child in alike[:SIBLINGS_MAX])
        if len(alike) > SIBLINGS_MAX:
            left_out[name] = len(alike) - SIBLINGS_MAX
    return [child for child in children if child["span_id"] in kept], left_out


def _line(span: Span, zero: float) -> Text:
    about = {name.removeprefix(PREFIX): value for name, value in span["attributes"].items()}
    style = "bold red" if span["error"] else "bold"
    line = Text.assemble((span["name"], style), f"  {_place(about)}".rstrip())
    line.append(f"  {_duration(_seconds(span))}", "cyan")
    line.append(f"  at +{_duration(span['start'] - zero)}", "dim")
    detail = span["error"] or next((str(about[name]) for name in SAID if about.get(name)), "")
    if action := about.get("action"):
        detail = f"{action}: {detail}"
    if detail:
        line.append(f"  {detail}")
    return line


def _place(about: Mapping[str, Any]) -> str:
    rank = f"rank {about['rank']}" if "rank" in about else ""
    generation = f"{about.get('generation', '?')} → {about['new_generation']}" if "new_generation" in about else ""
    return " ".join(part for part in (about.get("node", ""), rank, generation) if part)


def _seconds(span: Span) -> float:
    return max(0.0, float(span["end"]) - float(span["start"]))


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
