"""Time in which this process did not run is noticed, and no `patience` runs out because of it."""

from __future__ import annotations

import asyncio
from functools import partial

import anyio
import anyio.lowlevel
import pytest
import structlog
from sinks import keep
from waiting import FREEZING_TIME, freeze

from holdfast.runtime import freeze as freezes
from holdfast.runtime.freeze import LAP_S_MAX, Laps, awake, frozen_s, patience
from holdfast.runtime.telling import metrics

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [FREEZING_TIME], ids=["freezing"]),
]


async def test_a_freeze_is_reported_with_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = keep(monkeypatch)
    heard: list[float] = []
    before_s = frozen_s()
    with structlog.testing.capture_logs() as lines:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(freezes.watch, heard.append)
            await anyio.sleep(10.2)
            assert heard == []  # a quiet process is none that does not run
            freeze(30.0)
            await anyio.sleep(1.0)
            tasks.cancel_scope.cancel()
    [length_s] = heard
    assert length_s == pytest.approx(30.0, abs=0.5)
    assert frozen_s() - before_s == pytest.approx(length_s)
    assert [(line["log_level"], line["event"]) for line in lines] == [("warning", "process was frozen")]
    assert sink.recorded == [(metrics.FROZEN.name, length_s, {})]


async def test_a_machine_that_slept_is_reported_too() -> None:
    """The loop's clock stands still meanwhile, and no time-out has run on."""
    heard: list[float] = []
    slept_s = 0.0

    def since_boot() -> float:
        return anyio.current_time() + slept_s

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(freezes.watch, heard.append, since_boot=since_boot))
        with patience(5.0) as limit:
            await anyio.sleep(1.2)
            slept_s = 3600.0
            await anyio.sleep(3.0)
        assert not limit.cancelled_caught
        tasks.cancel_scope.cancel()
    assert heard == [pytest.approx(3600.0, abs=0.5)]


async def test_an_answer_that_came_during_the_freeze_wins() -> None:
    """When the loop goes on, the time-out and the answer are there in the same turn."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(freezes.watch)
        await anyio.lowlevel.checkpoint()
        answer = anyio.Event()
        with patience(8.0) as patient, anyio.move_on_after(8.0) as impatient:
            await anyio.sleep(3.0)
            freeze(60.0)
            asyncio.get_running_loop().call_soon(answer.set)
            await anyio.sleep(0.1)
            await answer.wait()
        assert impatient.cancelled_caught
        assert not patient.cancelled_caught
        tasks.cancel_scope.cancel()


async def test_the_rest_of_the_time_is_waited_for_after_it() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(freezes.watch)
        await anyio.lowlevel.checkpoint()
        began, began_awake = anyio.current_time(), awake()
        with patience(8.0) as limit:
            await anyio.sleep(3.0)
            freeze(60.0)
            await anyio.sleep_forever()
        assert limit.cancelled_caught
        assert anyio.current_time() - began == pytest.approx(68.0, abs=0.6)
        assert awake() - began_awake == pytest.approx(8.0, abs=0.6)
        tasks.cancel_scope.cancel()


async def test_without_a_freeze_it_is_a_time_out() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(freezes.watch)
        began = anyio.current_time()
        with patience(8.0) as limit:
            await anyio.sleep_forever()
        assert limit.cancelled_caught
        assert anyio.current_time() - began == pytest.approx(8.0)
        tasks.cancel_scope.cancel()


async def test_a_reaction_that_fails_ends_the_loop() -> None:
    def react(_: float) -> None:
        raise LookupError("a bug")

    async with anyio.create_task_group() as tasks:

        async def stop() -> None:
            await anyio.sleep(0.7)
            freeze(5.0)

        tasks.start_soon(stop)
        with pytest.raises(LookupError):
            await freezes.watch(react)


async def test_a_thread_counts_its_laps() -> None:
    now = [100.0]
    laps = Laps(lambda: now[0])
    for _ in range(3):
        now[0] += 0.5
        spent_s = laps.spent_s()
    assert spent_s == pytest.approx(1.5)
    now[0] += 600.0
    assert laps.spent_s() == pytest.approx(1.5 + LAP_S_MAX)
