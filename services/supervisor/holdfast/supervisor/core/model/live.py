"""The nodes that may have live workers of a job, by generation. All fencing relies on them.

A node belongs to a generation from the moment that `Prepare` is sent until the node has answered that its workers of this
generation have ended. The nodes of a generation are one set of bits (`Node.number`), so a change of a job with 12,500 nodes
writes one value, and no rows of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.domain.numbers import Numbers

Live = Mapping[int, Numbers]  # generation → numbers of its nodes; ascending, and no generation without nodes


def nodes_of(live: Live) -> Numbers:
    """Numbers of the nodes that may have workers of any generation."""
    return Numbers.union(live.values())


def generations_on(live: Live, node: int) -> tuple[int, ...]:
    """Generations that may have workers on the node with this number, ascending."""
    return tuple(generation for generation, numbers in live.items() if node in numbers)


def begun(live: Live, generation: int, nodes: Numbers) -> Live:
    """The same, and these nodes may have workers of `generation`."""
    after = {**live, generation: live.get(generation, Numbers()) | nodes}
    return {number: after[number] for number in sorted(after)}


def ended(live: Live, nodes: Numbers, up_to: int | None = None) -> Live:
    """The same, and these nodes have no workers of generation `up_to` or older. None = of no generation."""
    return {
        generation: left
        for generation, numbers in live.items()
        if (left := numbers - nodes if up_to is None or generation <= up_to else numbers)
    }
