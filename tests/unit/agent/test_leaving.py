"""An agent that is asked to end asks for its ranks to be moved, and waits for it as long as it may."""

from __future__ import annotations

import anyio
import pytest
from waiting import VIRTUAL_TIME

from holdfast.agent.host.leaving import Leaving
from holdfast.agent.replicator import is_copying
from holdfast.domain.generations import ShardKey, ShardRecord, StoredStep
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import TERMINATION
from holdfast.domain.orders import Inventory
from holdfast.domain.replication import Configure
from holdfast.domain.signals import MaintenanceNotice

VIRTUAL = pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME])
NOW = 1.8e9
HANDOVER_S = 15.0


class Node:
    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.copies_until = 0.0  # seconds from the beginning
        self.notices = list[MaintenanceNotice]()

    async def leave(self, grace_s: float) -> float:
        """Seconds that it took."""
        began = anyio.current_time()
        leaving = Leaving(
            "n1",
            "its life",
            grace_s,
            HANDOVER_S,
            workers=lambda: range(self.workers),
            copies=lambda: anyio.current_time() - began < self.copies_until,
            emit=self.notices.append,
            clock=lambda: NOW,
        )
        await leaving.carry_out()
        return anyio.current_time() - began


@pytest.mark.anyio
@VIRTUAL
@pytest.mark.parametrize(("workers", "grace_s"), [(0, 25.0), (8, 0.0)])
async def test_a_node_without_workers_or_without_a_grace_leaves_at_once(workers: int, grace_s: float) -> None:
    node = Node(workers)
    assert await node.leave(grace_s) == 0.0
    assert not node.notices


@pytest.mark.anyio
@VIRTUAL
async def test_it_stays_a_while_for_those_who_restore_from_it_when_its_ranks_have_moved() -> None:
    node = Node(8)
    async with anyio.create_task_group() as tasks:

        async def move() -> None:
            await anyio.sleep(4.0)
            node.workers = 0

        tasks.start_soon(move)
        assert 4.0 + HANDOVER_S <= await node.leave(60.0) < 5.0 + HANDOVER_S
    (notice,) = node.notices
    assert notice == MaintenanceNotice("n1", NOW, TERMINATION, "its agent was asked to end", NOW + 60.0, "its life")


@pytest.mark.anyio
@VIRTUAL
async def test_it_leaves_at_the_end_of_the_grace_whoever_is_left() -> None:
    assert await Node(8).leave(25.0) == pytest.approx(25.0)


@pytest.mark.anyio
@VIRTUAL
async def test_what_is_left_of_the_grace_bounds_the_stay_after_the_ranks_have_moved() -> None:
    node = Node(8)
    async with anyio.create_task_group() as tasks:

        async def move() -> None:
            await anyio.sleep(20.0)
            node.workers = 0

        tasks.start_soon(move)
        assert await node.leave(25.0) == pytest.approx(25.0)


@pytest.mark.anyio
@VIRTUAL
@pytest.mark.parametrize(("copies_until", "stays_s"), [(0.0, 2.0 + HANDOVER_S), (40.0, 40.0), (70.0, 60.0)])
async def test_it_stays_for_the_copies_of_the_last_save_within_the_grace(copies_until: float, stays_s: float) -> None:
    node = Node(8)
    node.copies_until = copies_until
    async with anyio.create_task_group() as tasks:

        async def stop() -> None:
            await anyio.sleep(2.0)
            node.workers = 0

        tasks.start_soon(stop)
        assert await node.leave(60.0) == pytest.approx(stays_s, abs=0.25)


MESH = Mesh.of({"dp": 4})
MEMORY = ((0, "memory"), (1, "memory"))
DISK = ((0, "disk"), (1, "disk"))


def shards(step: int, *places: tuple[int, str]) -> tuple[ShardRecord, ...]:
    return tuple(ShardRecord(ShardKey(7, step, rank), MESH, tier, 1, "", "n1") for rank, tier in places)


@pytest.mark.parametrize(
    ("held", "store", "stored", "copying"),
    [
        ((), "", (), False),
        (shards(10, *DISK), "", (), False),
        (shards(10, *DISK) + shards(20, *MEMORY), "", (), True),
        (shards(20, *MEMORY, (0, "disk")), "", (), True),
        (shards(20, *DISK, (3, "memory")), "", (), False),  # rank 3 is a peer's
        (shards(20, *DISK), "file:///s", (), True),
        (shards(20, *DISK), "file:///s", (10,), True),
        (shards(20, *DISK), "file:///s", (20,), False),
    ],
)
def test_the_newest_save_of_its_ranks_has_copies_to_come(
    held: tuple[ShardRecord, ...], store: str, stored: tuple[int, ...], copying: bool
) -> None:
    served = Configure("gpt", 3, 7, MESH, (0, 1), (), 2, "token", store)
    inventory = Inventory("gpt", held, tuple(StoredStep(7, step, MESH, False) for step in stored))
    assert is_copying(served, inventory) is copying
