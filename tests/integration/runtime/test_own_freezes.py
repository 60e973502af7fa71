"""Each service notices that it did not run, and its own reaction is called: silence in that time proves nothing.

The agent's is in `tests/integration/agent/test_workers.py`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from supervising import start_supervisor
from waiting import wait_until_async

from holdfast.diagnostics import service as diagnostics
from holdfast.diagnostics.intake import Intake
from holdfast.diagnostics.settings import DiagnosticsSettings
from holdfast.log.memory import MemoryLog
from holdfast.replicator import service as replicator
from holdfast.replicator.engine import Engine
from holdfast.replicator.settings import ReplicatorSettings
from holdfast.runtime import freeze
from holdfast.supervisor.leader.timers import Timers


async def supervisor(tasks: anyio.abc.TaskGroup, directory: Path) -> None:
    await start_supervisor(tasks, directory, MemoryLog())


async def its_replicator(tasks: anyio.abc.TaskGroup, directory: Path) -> None:
    places = {"memory_dir": "memory", "disk_dir": "disk", "replicator_socket": "r.sock", "replicator_notes": "n.sock"}
    paths: dict[str, Any] = {name: directory / path for name, path in places.items()}
    tasks.start_soon(replicator.serve, ReplicatorSettings(node="n0", ready_file=directory / "ready", **paths))
    await wait_until_async((directory / "ready").exists, description="the replicator to serve")


async def its_diagnostics(tasks: anyio.abc.TaskGroup, directory: Path) -> None:
    settings = DiagnosticsSettings(redis_url="memory", diagnostics_listen="127.0.0.1:0", ready_file=directory / "ready")
    tasks.start_soon(diagnostics.run, settings, MemoryLog())
    await wait_until_async((directory / "ready").exists, description="diagnostics to serve")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("start", "owner", "reaction"),
    [
        (supervisor, Timers, "postpone"),
        (its_replicator, Engine, "unwatched"),
        (its_diagnostics, Intake, "frozen"),
    ],
    ids=["supervisor", "replicator", "diagnostics"],
)
async def test_a_service_reacts_to_its_own_freeze(
    start: Callable[[anyio.abc.TaskGroup, Path], Awaitable[None]],
    owner: type,
    reaction: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reactions: list[tuple[float, ...]] = []
    monkeypatch.setattr(owner, reaction, lambda _, *length_s: reactions.append(length_s))
    monkeypatch.setattr(freeze, "FROZEN_S", 0.2)
    async with anyio.create_task_group() as tasks:
        await start(tasks, tmp_path)
        reactions.clear()

        def frozen_and_noticed() -> bool:
            """Blocks the loop, as a SIGSTOP would; again where the service did not watch yet."""
            if not reactions:
                time.sleep(freeze.LOOK_S + 0.3)
            return bool(reactions)

        await wait_until_async(frozen_and_noticed, description=f"{owner.__name__}.{reaction}")
        tasks.cancel_scope.cancel()
