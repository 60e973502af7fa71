"""Many readers of the events share one reader of the log, and each gets every event once, in order."""

from __future__ import annotations

import anyio
import pytest
from eventlogs import entries, names
from waiting import VIRTUAL_TIME, wait_until_async

from holdfast.domain.errors import Unavailable
from holdfast.log.memory import MemoryLog
from holdfast.log.names import EVENTS
from holdfast.log.protocol import Delivery, Entry
from holdfast.supervisor.api.event_tail import BATCH_MAX, KEPT_MAX, LATE_READS_MAX, WAIT_S, EventTail
from holdfast.supervisor.published import PolicyAsked

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]


class WatchedLog(MemoryLog):
    """Counts the reads that are under way; refuses them while `away`."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.reading = self.reading_max = 0

    async def read(
        self, stream: str, *, after: str = "0", count: int = 1000, block_s: float | None = None
    ) -> list[Delivery]:
        self.reading += 1
        self.reading_max = max(self.reading, self.reading_max)
        try:
            await anyio.sleep(0.001)
            found = await super().read(stream, after=after, count=count, block_s=block_s)
            if self.away:
                raise Unavailable("Redis is away")
            return found
        finally:
            self.reading -= 1


async def read(tail: EventTail, position: str, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        batch = await tail.after(position)
        assert len(batch) <= BATCH_MAX
        found += names(list(batch))
        position = batch[-1].position if batch else position
    return found


async def test_readers_from_everywhere_get_each_event_once_and_in_order() -> None:
    log = WatchedLog()
    wanted = [each.id for each in entries(3 * KEPT_MAX)]
    positions = ["0", *await log.append(EVENTS, *entries(KEPT_MAX))]
    answers: dict[int, list[str]] = {}
    tail = EventTail(log)
    async with anyio.create_task_group() as tasks:

        async def reader(index: int) -> None:
            answers[index] = await read(tail, positions[index], len(wanted) - index)

        for index in range(0, len(positions), 30):
            tasks.start_soon(reader, index)
        tasks.start_soon(tail.run)
        for begin in range(KEPT_MAX, len(wanted), KEPT_MAX // 3):
            await anyio.sleep(0.01)
            await log.append(EVENTS, *entries(3 * KEPT_MAX)[begin : begin + KEPT_MAX // 3])
        await wait_until_async(lambda: len(answers) == len(range(0, len(positions), 30)), description="every reader")
        tasks.cancel_scope.cancel()
    assert all(found == wanted[index:] for index, found in answers.items())
    assert log.reading_max <= LATE_READS_MAX + 1


async def test_questions_of_policies_are_not_kept() -> None:
    log = MemoryLog()
    tail = EventTail(log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tail.run)
        await anyio.sleep(WAIT_S / 2)
        asked = Entry(id="asked", type=PolicyAsked.__name__, data=b"x")
        await log.append(EVENTS, asked, *entries(1), asked)
        assert await read(tail, "0", 1) == [entries(1)[0].id]
        assert await tail.after("0") == await tail.after("0")
        assert len(await tail.after("0")) == 1
        tasks.cancel_scope.cancel()


async def test_nothing_for_a_while_is_no_event_and_an_outage_is_told_and_loses_none() -> None:
    log = WatchedLog()
    tail = EventTail(log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tail.run)
        began = anyio.current_time()
        assert await tail.after("0") == ()
        assert anyio.current_time() - began == pytest.approx(WAIT_S)
        log.away = True
        await anyio.sleep(2 * WAIT_S)  # the read that was under way has ended
        with pytest.raises(Unavailable, match="Redis is away"):
            await tail.after("0")
        await log.append(EVENTS, *entries(2))
        log.away = False
        with anyio.fail_after(60):
            while True:
                try:
                    assert await read(tail, "0", 2) == [each.id for each in entries(2)]
                    break
                except Unavailable:
                    await anyio.sleep(0.1)
        tasks.cancel_scope.cancel()
