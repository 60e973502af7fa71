"""Traces as a collector has got them: whether the spans of one hang together, and how."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.runtime.telling.fake_collector import Received


def parents_of(spans: Sequence[Received]) -> dict[str, str]:
    """The name of every span's parent by the span's name; the root is not among them.

    Fails unless the spans are one whole trace: one trace id, one root, no span twice, no parent missing, and spans of one name
    below spans of one name.
    """
    [_] = {span.trace_id for span in spans}
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "a span came twice"
    root_of(spans)
    orphans = [span.name for span in spans if span.parent_id and span.parent_id not in by_id]
    assert not orphans, f"the parents of these did not come: {orphans}"
    pairs = {(span.name, by_id[span.parent_id].name) for span in spans if span.parent_id}
    parents = dict(pairs)
    assert len(parents) == len(pairs), f"spans of one name below different ones: {sorted(pairs)}"
    return parents


def root_of(spans: Sequence[Received]) -> Received:
    """The span that is below no other. Fails unless there is exactly one."""
    roots = [span for span in spans if not span.parent_id]
    assert len(roots) == 1, f"{len(roots)} roots: {[root.name for root in roots]}"
    return roots[0]
