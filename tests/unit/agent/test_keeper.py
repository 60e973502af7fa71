"""The worker template: which is kept, whether it is ready, and what is said when it keeps dying."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
from waiting import VIRTUAL_TIME, wait_until_async

from holdfast.agent.workers import keeper as module
from holdfast.agent.workers.keeper import DEATHS_MAX, SETTLED_S, TemplateKeeper
from holdfast.agent.workers.template import TemplateKey
from holdfast.domain.errors import Unavailable

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]

KEY, OTHER = TemplateKey(("model",)), TemplateKey(("another",))


class FakeTemplate:
    """Ready after a second; ends when it is ordered to."""

    made: ClassVar[list[FakeTemplate]] = []

    def __init__(self, key: TemplateKey, log_path: Path, environment: Mapping[str, str], user: None = None) -> None:
        self.key, self.pid, self.failure = key, len(self.made), ""
        self.draining = False
        self._ready, self._ended = anyio.Event(), anyio.Event()
        self.made.append(self)

    @property
    def usable(self) -> bool:
        return not self.failure and not self.draining

    @property
    def ready(self) -> bool:
        return self._ready.is_set() and self.usable

    async def wait_ready(self) -> None:
        await self._ready.wait()
        if self.failure:
            raise Unavailable(self.failure)

    async def drain(self) -> None:
        self.draining = True
        self._ended.set()

    async def run(self) -> None:
        with anyio.move_on_after(1.0):
            await self._ended.wait()
        self._ready.set()
        await self._ended.wait()
        self.failure = self.failure or "it was replaced by another one"

    def dies(self) -> None:
        self.failure = "the worker template exited with code -9 without an error message"
        self._ended.set()


@pytest.fixture
def templates(monkeypatch: pytest.MonkeyPatch) -> list[FakeTemplate]:
    monkeypatch.setattr(FakeTemplate, "made", [])
    monkeypatch.setattr(module, "Template", FakeTemplate)
    return FakeTemplate.made


async def test_a_template_that_ended_is_replaced_and_that_is_reported(
    templates: list[FakeTemplate], tmp_path: Path
) -> None:
    reported: list[tuple[Any, ...]] = []
    async with anyio.create_task_group() as tasks:
        keeper = TemplateKeeper(
            tasks, tmp_path, {}, lambda: reported.append((keeper.key, keeper.ready, bool(keeper.failure)))
        )
        await keeper.ensure(KEY)
        assert reported == [(KEY, True, False)]
        templates[0].dies()
        await anyio.sleep(5.0)
        assert reported[1:] == [(KEY, False, False), (KEY, True, False)]
        await keeper.ensure(OTHER)
        assert reported[-1] == (OTHER, True, False)
        keeper.close()
        tasks.cancel_scope.cancel()


async def test_one_that_keeps_dying_is_said_until_a_successor_lasts(
    templates: list[FakeTemplate], tmp_path: Path
) -> None:
    async with anyio.create_task_group() as tasks:
        keeper = TemplateKeeper(tasks, tmp_path, {}, lambda: None)
        await keeper.ensure(KEY)
        for deaths in range(1, DEATHS_MAX + 2):
            templates[-1].dies()
            await anyio.sleep(0.0)
            await anyio.wait_all_tasks_blocked()
            assert bool(keeper.failure) is (deaths >= DEATHS_MAX)
            await wait_until_async(lambda: keeper.ready, description="a successor")
        assert "4 exits in a row: the worker template exited with code -9" in keeper.failure
        await anyio.sleep(SETTLED_S + 1.0)
        assert keeper.failure == ""
        templates[-1].dies()
        await anyio.sleep(0.5)
        assert keeper.failure == "", "the first in a row again"
        keeper.close()
        tasks.cancel_scope.cancel()


async def test_one_with_learned_modules_is_not_started_again(templates: list[FakeTemplate], tmp_path: Path) -> None:
    """Nothing needs it, and what killed it may be what it has imported."""
    async with anyio.create_task_group() as tasks:
        keeper = TemplateKeeper(tasks, tmp_path, {}, lambda: None, restarts=False)
        await keeper.ensure(KEY)
        templates[-1].dies()
        await anyio.sleep(60.0)
        assert (len(templates), keeper.ready) == (1, False)
        await keeper.ensure(KEY)
        assert keeper.serves(KEY), "when it is needed"
        keeper.close()
        tasks.cancel_scope.cancel()


async def test_one_whose_files_have_changed_is_replaced(templates: list[FakeTemplate], tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        keeper = TemplateKeeper(tasks, tmp_path, {}, lambda: None)
        old = await keeper.ensure(KEY)
        new = await keeper.renewed(old)
        assert new is not old
        assert keeper.serves(KEY)
        await anyio.sleep(5.0)
        assert len(templates) == 2, "the old one has ended, and has no successor"
        assert await keeper.ensure(KEY) is new
        await keeper.end()
        await anyio.sleep(60.0)
        assert (len(templates), keeper.ready) == (2, False)
        keeper.close()
        tasks.cancel_scope.cancel()
