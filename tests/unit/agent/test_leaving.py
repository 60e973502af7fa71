"""An agent that is told to end asks for its ranks to be moved, and waits for it as long as it may."""

from __future__ import annotations

import anyio
import pytest
from waiting import VIRTUAL_TIME

from holdfast.agent.leaving import HANDOVER_S, Leaving
from holdfast.domain.nodes import TERMINATION
from holdfast.domain.signals import MaintenanceNotice

pytestmark = pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME])
NOW = 1.8e9


class Node:
    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.notices = list[MaintenanceNotice]()

    async def leave(self, grace_s: float) -> float:
        """Seconds that it took."""
        began = anyio.current_time()
        leaving = Leaving(
            "n1", "its life", grace_s, workers=lambda: range(self.workers), emit=self.notices.append, clock=lambda: NOW
        )
        await leaving.carry_out()
        return anyio.current_time() - began


@pytest.mark.anyio
@pytest.mark.parametrize(("workers", "grace_s"), [(0, 25.0), (8, 0.0)])
async def test_a_node_without_workers_or_without_a_grace_leaves_at_once(workers: int, grace_s: float) -> None:
    node = Node(workers)
    assert await node.leave(grace_s) == 0.0
    assert not node.notices


@pytest.mark.anyio
async def test_it_stays_a_while_for_those_who_restore_from_it_when_its_ranks_have_moved() -> None:
    node = Node(8)
    async with anyio.create_task_group() as tasks:

        async def move() -> None:
            await anyio.sleep(4.0)
            node.workers = 0

        tasks.start_soon(move)
        assert 4.0 + HANDOVER_S <= await node.leave(60.0) < 5.0 + HANDOVER_S
    (notice,) = node.notices
    assert notice == MaintenanceNotice("n1", NOW, TERMINATION, "its agent was told to end", NOW + 60.0, "its life")


@pytest.mark.anyio
async def test_it_leaves_at_the_end_of_the_grace_whoever_is_left() -> None:
    assert await Node(8).leave(25.0) == pytest.approx(25.0)


@pytest.mark.anyio
async def test_what_is_left_of_the_grace_bounds_the_stay_after_the_ranks_have_moved() -> None:
    node = Node(8)
    async with anyio.create_task_group() as tasks:

        async def move() -> None:
            await anyio.sleep(20.0)
            node.workers = 0

        tasks.start_soon(move)
        assert await node.leave(25.0) == pytest.approx(25.0)
