"""An agent's part in tests of the network: never beside work, and ended at once when work comes."""

from __future__ import annotations

import anyio
import pytest
from anyio.abc import TaskGroup
from waiting import VIRTUAL_TIME

from holdfast.agent.checks.link_tests import LinkTests
from holdfast.agent.replicator import NoReplicator
from holdfast.domain.errors import Conflict, HoldfastError, NotFound, Unavailable
from holdfast.domain.links import LinkLimits, LinkMeasured, MeasureLink, OpenLink
from holdfast.domain.orders import CheckLink

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]

LIMITS = LinkLimits(64 << 20, 0.5)
WAIT = CheckLink("n1", "secret", LIMITS, for_s=20.0)
MEASURE = CheckLink("n1", "secret", LIMITS, "n1:7")
FOUND = LinkMeasured(1e9, 1e9, 0.001)


class FakeReplicator(NoReplicator):
    def __init__(self) -> None:
        self.said: list[object] = []
        self.error: HoldfastError | None = None
        self.closing_s = 0.0

    async def open_link(self, request: OpenLink) -> None:
        self.said.append(request)

    async def measure_link(self, request: MeasureLink) -> LinkMeasured:
        self.said.append(request)
        if self.error is not None:
            raise self.error
        await anyio.sleep(5.0)
        return FOUND

    async def close_link(self) -> None:
        await anyio.sleep(self.closing_s)
        self.said.append("closed")


class Node:
    def __init__(self, tasks: TaskGroup) -> None:
        self.replicator, self.idle = FakeReplicator(), True
        self.tests = LinkTests("n0", tasks, lambda: self.replicator, lambda: self.idle)


async def test_one_waits_and_the_other_measures() -> None:
    async with anyio.create_task_group() as tasks:
        node = Node(tasks)
        assert (await node.tests.carry_out(WAIT)).link is None
        assert (await node.tests.carry_out(MEASURE)).link == FOUND
        assert node.replicator.said == [
            OpenLink("secret", LIMITS, 20.0),
            MeasureLink("n1", "n1:7", "secret", LIMITS),
        ]


async def test_a_node_with_work_refuses() -> None:
    async with anyio.create_task_group() as tasks:
        node = Node(tasks)
        node.idle = False
        for order in (WAIT, MEASURE):
            with pytest.raises(Conflict, match="n0 has work and does not test the network"):
                await node.tests.carry_out(order)
        assert not node.replicator.said


async def test_work_ends_a_test_without_waiting_for_its_end() -> None:
    async with anyio.create_task_group() as tasks:
        node = Node(tasks)
        node.replicator.closing_s = 30.0
        await node.tests.carry_out(WAIT)
        outcome: list[str] = []

        async def measure() -> None:
            with pytest.raises(Conflict) as error:
                await node.tests.carry_out(MEASURE)
            outcome.append(str(error.value))

        tasks.start_soon(measure)
        await anyio.sleep(1.0)
        began = anyio.current_time()
        node.tests.make_way()
        assert anyio.current_time() == began
        await anyio.wait_all_tasks_blocked()
        assert anyio.current_time() == began
        assert outcome == ["n0 received work, which cancelled its test of the network with n1"]
        await anyio.sleep(31.0)
        assert node.replicator.said[-1] == "closed"
        node.tests.make_way()
        await anyio.sleep(31.0)
        assert node.replicator.said.count("closed") == 1, "there was nothing to end"


async def test_one_test_at_a_time_and_its_failure_is_reported() -> None:
    async with anyio.create_task_group() as tasks:
        node = Node(tasks)
        tasks.start_soon(node.tests.carry_out, MEASURE)
        await anyio.sleep(1.0)
        with pytest.raises(Conflict, match="n0 is already testing the network"):
            await node.tests.carry_out(WAIT)
        await anyio.sleep(10.0)
        node.replicator.error = Unavailable("n1 hung up")
        with pytest.raises(Unavailable, match="hung up"):
            await node.tests.carry_out(MEASURE)


async def test_a_node_without_a_replicator_takes_no_part() -> None:
    async with anyio.create_task_group() as tasks:
        tests = LinkTests("n0", tasks, NoReplicator, lambda: True)
        for order in (WAIT, MEASURE):
            with pytest.raises(NotFound, match="without a replicator"):
                await tests.carry_out(order)
