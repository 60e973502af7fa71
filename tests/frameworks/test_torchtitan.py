"""torchtitan's checkpoint manager with the loop of `faulty_torchtitan.Trainer`, in one process: what is restored, whose files
are read and written, what is refused."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from restarted_runs import Killed, starting
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config.override import OverrideConfig, apply_overrides

import holdfast.train as hf
from holdfast.domain.errors import IncompatibleVersion, InvalidSpec
from holdfast.integrations import torchtitan as subject

sys.path.insert(0, str(Path(__file__).parent))
import faulty_torchtitan  # type: ignore[import-not-found]

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
STEPS = 8


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def start_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., hf.Run]:
    return starting(tmp_path, monkeypatch, dp=1)


def train(out: Path, *, own: bool = False) -> Any:
    args = argparse.Namespace(out=out, fault=[], steps=STEPS, step_s=0.0, own=own)
    trainer = faulty_torchtitan.Trainer(args, 0, 1)
    trainer.train()
    return trainer


def state_of(trainer: Any) -> tuple[list[float], float, int, int, float]:
    weights = [value for each in trainer.model_parts[0].parameters() for value in each.full_tensor().flatten().tolist()]
    rate = trainer.optimizers.optimizers[0].param_groups[0]["lr"]
    return weights, rate, trainer.step, trainer.ntokens_seen, torch.rand(1).item()


@pytest.mark.parametrize("killed_after", [1, 4, STEPS - 1])
def test_a_killed_loop_ends_as_one_that_was_not(
    killed_after: int, tmp_path: Path, start_run: Callable[..., hf.Run]
) -> None:
    start_run(1)
    expected = state_of(train(tmp_path / "calm"))
    for image in (tmp_path / "images").glob("*"):
        image.unlink()
    start_run(1, kill_after=killed_after)
    with pytest.raises(Killed):
        train(tmp_path / "killed")
    run = start_run(2)
    assert run.restore_step == killed_after
    assert state_of(train(tmp_path / "killed")) == expected
    assert run.steps_finished == STEPS
    assert not (tmp_path / "killed").exists(), "torchtitan's checkpoints are off"


def test_torchtitan_writes_its_own_files_and_holdfasts_checkpoint_takes_precedence(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    original = CheckpointManager._load

    def noted(self: Any, step: int = -1) -> bool:
        loaded.append(step)
        return bool(original(self, step))

    noted.__wrapped__ = original  # type: ignore[attr-defined]
    monkeypatch.setattr(CheckpointManager, "_load", noted)
    start_run(1)
    train(tmp_path / "own", own=True)
    assert loaded == [-1]
    assert (tmp_path / "own" / "own" / f"step-{STEPS}" / ".metadata").exists()
    run = start_run(2)
    trainer = train(tmp_path / "own", own=True)
    assert loaded == [-1], "the run's checkpoint was restored instead"
    assert (trainer.step, run.steps_finished) == (STEPS, STEPS)


def test_outside_of_holdfast_the_manager_is_torchtitans(tmp_path: Path, start_run: Callable[..., hf.Run]) -> None:
    run = start_run(0, job="")
    assert run.inert
    assert not train(tmp_path / "off").checkpointer.enable
    train(tmp_path / "on", own=True)
    assert (tmp_path / "on" / "own" / f"step-{STEPS}").is_dir()
    assert not (tmp_path / "images").exists()


def test_what_torchtitan_logs_is_reported(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(1)
    reported: list[tuple[float | None, float | None]] = []
    finish = run._finish

    def noted(step: Any) -> None:
        reported.append((step.loss, step.grad_norm))
        finish(step)

    monkeypatch.setattr(run, "_finish", noted)
    train(tmp_path)
    assert len(reported) == STEPS
    assert all(loss is not None and norm is not None and loss > 0 and norm > 0 for loss, norm in reported)


def test_what_is_not_supported_is_named(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(1, kill_after=2)
    with pytest.raises(Killed):
        train(tmp_path)
    start_run(2, dp=3)
    with pytest.raises(InvalidSpec, match="replicas: 3"):
        train(tmp_path)
    monkeypatch.setattr(CheckpointManager, "_save", lambda self, step: False)
    with pytest.raises(IncompatibleVersion, match=r"CheckpointManager\._save takes \(step\)"):
        train(tmp_path)


def test_the_override_keeps_what_is_configured() -> None:
    config = faulty_torchtitan.Config(checkpoint=CheckpointManager.Config(interval=7, keep_latest_k=3))
    apply_overrides(OverrideConfig(imports=["holdfast.integrations.torchtitan.checkpoint"]), config)
    assert type(config.checkpoint) is subject.HoldfastCheckpointManager.Config
    assert (config.checkpoint.interval, config.checkpoint.keep_latest_k) == (7, 3)
