"""An agent that did not run for a while concludes nothing from what others did not say meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from waiting import FREEZING_TIME, freeze

from holdfast.agent.collectors.protocol import Probe
from holdfast.agent.replicator import AWAY_S, LocalReplicator, ReplicatorPlaces
from holdfast.agent.workers.progress import Progress
from holdfast.domain.notes import Sender, StepNote
from holdfast.domain.orders import Inventory
from holdfast.domain.signals import NodeSignal
from holdfast.runtime import freeze as freezes

pytestmark = pytest.mark.anyio
freezing = pytest.mark.parametrize("anyio_backend", [FREEZING_TIME], ids=["freezing"])

T0 = 1_700_000_000.0


@asynccontextmanager
async def watched() -> AsyncIterator[anyio.abc.TaskGroup]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(freezes.watch)
        yield tasks
        tasks.cancel_scope.cancel()


def test_ranks_that_were_not_listened_to_are_not_silent() -> None:
    known = Progress(node="n", job="gpt", generation=1, ranks=(0,), step=0, at=T0)
    for i in range(1, 5):
        known.fold(StepNote(Sender("gpt", 1, 0), i, T0 + i - 0.1, T0 + i, 0.0, 0.0, 1, 1.0, 1.0))
    assert known.silent_s(T0 + 64.0) == 60.0
    known.unheard(T0 + 64.0)
    assert known.silent_s(T0 + 64.1) == 0.0
    assert known.silent_s(T0 + 70.0) == pytest.approx(6.0), "what they do not say from then on counts"


@freezing
async def test_a_replicator_that_is_being_restarted_is_not_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Inventory] = []
    monkeypatch.setattr("holdfast.agent.replicator.open_channel", lambda _: None)
    monkeypatch.setattr("holdfast.agent.replicator.ReplicatorStub", lambda _: None)
    places = ReplicatorPlaces(node="a", agent_dir=tmp_path, memory_dir=tmp_path, disk_dir=tmp_path, listen="")
    replicator = LocalReplicator(places, {}, reported.append, lambda job, trouble: None)
    replicator._held = {"gpt": Inventory("gpt", ())}
    async with watched() as tasks:
        tasks.start_soon(replicator.withdraw_when_away)
        replicator._died.set()
        await anyio.sleep(1.0)
        freeze(60.0)
        await anyio.sleep(AWAY_S - 2.0)
        assert reported == [], "it has had no time to come back"
        await anyio.sleep(2.0)
        assert reported == [Inventory("gpt", ())]


@freezing
async def test_a_source_is_not_silent_because_nobody_listened() -> None:
    said: list[NodeSignal] = []
    asked, answered = anyio.Event(), anyio.Event()

    class Slow:
        @property
        def done(self) -> bool:
            return answered.is_set()

        async def wait(self) -> None:
            asked.set()
            await answered.wait()

        def take(self) -> tuple[NodeSignal, ...]:
            return ()

    probe = Probe("disk", "n", lambda: (), interval_s=60.0, deadline_s=5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.agent.collectors.protocol._Answer", lambda _: Slow())
        async with watched() as tasks:
            tasks.start_soon(probe.run, said.append)
            await asked.wait()
            await anyio.sleep(1.0)
            freeze(30.0)
            await anyio.sleep(0.1)  # its thread goes on when this process does, and answers a moment later
            answered.set()
            await anyio.sleep(5.0)
    assert said == []
