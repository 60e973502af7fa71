"""Runs of one rank that are started again and again in one process: the next one restores what the last one saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast.train as hf
from holdfast.domain.mesh import Mesh
from holdfast.shards import peek
from holdfast.train.channels import Control, Notes
from holdfast.train.environment import Environment, RestoreTarget, World


class Killed(BaseException):
    """In place of SIGKILL."""


def starting(directory: Path, monkeypatch: pytest.MonkeyPatch, *, dp: int) -> Callable[..., hf.Run]:
    """What starts a generation, whose run `hf.attach` returns from then on. It dies after the save of step `kill_after`; with
    an empty `job` it is a run outside of Holdfast."""
    images = directory / "images"
    replicas = dp

    def start(generation: int, dp: int = replicas, kill_after: int = 0, job: str = "t") -> hf.Run:
        headers = {path: header for path in images.glob("*.image") if (header := peek(path)) is not None}
        restore = None
        if headers:
            path, header = max(headers.items(), key=lambda item: item[1].stamp.key.step)
            restore = RestoreTarget(header.stamp.key.step, header.stamp.key.attempt, str(path))
        run = hf.Run(
            environment=Environment(
                World(Mesh.of({"dp": dp}), 0, generation),
                job=job,
                attempt=generation,
                images=str(images) if job else "",
                interval_steps=1,
                restore=restore,
            ),
            device=torch.device("cpu"),
            notes=Notes(agent="", replicator="", job="t", generation=generation, rank=0),
            control=Control(None),
            process_group_s=0.0,
        )
        save = run.checkpoint

        def save_and_die(state: Any, step: int, **how: Any) -> bool:
            saved = save(state, step, **how)
            if step == kill_after:
                raise Killed
            return saved

        monkeypatch.setattr(run, "checkpoint", save_and_die)
        monkeypatch.setattr(hf, "attach", lambda **_: run)
        return run

    return start
