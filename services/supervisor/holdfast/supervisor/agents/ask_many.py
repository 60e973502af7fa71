"""One question to the agents of many nodes: a few at the same time, one deadline for all, whoever is silent is left out.

A round asks at most `limit` nodes. On a larger job those come first that were asked longest ago, so that repeated rounds reach
every node; among nodes that were never asked the choice is spread evenly over the job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import anyio

from holdfast.domain.errors import Conflict, MalformedMessage, NotFound

T = TypeVar("T")

AT_ONCE_MAX = 128  # questions that wait for their answer
DEADLINE_S = 2.5  # for all of them
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many are taken


def nodes_to_ask(nodes: Sequence[str], asked_at: Mapping[str, float], limit: int) -> list[str]:
    """Choose up to `limit` nodes, the ones that were asked longest ago. `asked_at`: by node; without an entry = never. Pure."""
    if len(nodes) <= limit:
        return list(nodes)

    def turn(place: int) -> tuple[float, float]:
        return asked_at.get(nodes[place], float("-inf")), place * _GOLDEN % 1.0

    return [nodes[place] for place in sorted(range(len(nodes)), key=turn)[:limit]]


async def ask_each(
    nodes: Iterable[str],
    ask: Callable[[str], Awaitable[T]],
    *,
    at_once: int = AT_ONCE_MAX,
    deadline_s: float = DEADLINE_S,
) -> dict[str, T]:
    """Return the answers by node. A node without a session, or that does not answer in time, or whose answer is malformed, has
    none."""
    answers: dict[str, T] = {}
    waiting = iter(nodes)

    async def ask_in_turn() -> None:
        for node in waiting:
            try:
                answers[node] = await ask(node)
            except (Conflict, NotFound, MalformedMessage):
                continue

    with anyio.move_on_after(deadline_s):
        async with anyio.create_task_group() as tasks:
            for _ in range(at_once):
                tasks.start_soon(ask_in_turn)
    return answers
