"""A run whose agent is played by the test (`run_channels`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_channels import MESH, Agent, StartRun, loop

import holdfast.train as hf
from holdfast.domain.mesh import Mesh
from holdfast.train import run as run_module
from holdfast.train.channels import Control, Notes
from holdfast.train.environment import Environment, RestoreTarget, World


@pytest.fixture
def changes_are_dropped_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "LEAVING_S_MAX", 0.02)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.close()


@pytest.fixture
def start_run(agent: Agent, tmp_path: Path) -> Iterator[StartRun]:
    channels: list[Notes | Control] = []

    def start(**changes: Any) -> hf.Run:
        environment = replace(
            Environment(World(MESH, 1, 3), job="t", attempt=1, images=str(tmp_path / "images"), interval_steps=5),
            **changes,
        )
        notes = Notes(agent=str(agent.path), replicator="", job="t", generation=3, rank=1)
        control = Control(agent.connect())
        channels.extend((notes, control))
        return hf.Run(
            environment=environment, device=torch.device("cpu"), notes=notes, control=control, process_group_s=0.25
        )

    yield start
    for channel in channels:
        channel.close()


@pytest.fixture
def restart(start_run: StartRun, agent: Agent) -> StartRun:
    """A run that continues from one saved at step 5 by the same rank of `MESH`."""
    loop(start_run(), 5, state={"w": torch.full((2,), 7.0)})
    target = RestoreTarget(5, 1, agent.notes("saved")[-1]["image"])

    def start(previous: Mesh) -> hf.Run:
        return start_run(restore=target, previous_mesh=previous)

    return start
