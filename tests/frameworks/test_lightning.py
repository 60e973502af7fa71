"""`trainer.fit` that is ended after any step and begun again in a new trainer: the same batches, weights and hooks as
without."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast.train as hf
from holdfast.domain.errors import IncompatibleVersion, InvalidSpec
from holdfast.domain.mesh import Mesh
from holdfast.integrations import lightning as subject
from holdfast.integrations.lightning import HoldfastCallback
from holdfast.shards import peek
from holdfast.train.channels import Control, Notes
from holdfast.train.environment import Environment, RestoreTarget, World

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SAMPLES, BATCH = 26, 4  # 7 batches, the last of 2


class Killed(BaseException):
    """In place of SIGKILL: nothing of the trainer runs afterwards that could save."""


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + torch.rand(4)  # augmented, from the global generator


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(SAMPLES).tolist():
            yield torch.full((4,), float(index))


class DrawingStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(SAMPLES):
            yield torch.full((4,), float(index)) + torch.rand(4)


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, seen: list[str], schedule: str = "step") -> None:
        super().__init__()
        self.seen = seen
        self.schedule = schedule
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(batch, dict):
            batch = torch.cat([batch["a"], batch["b"]])
        loss: torch.Tensor = self.net(batch).square().mean()
        self.log("loss", loss)
        self.seen.append(f"batch {self.current_epoch}.{batch_idx} {batch.sum().item():.4f} {torch.rand(1).item():.4f}")
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch).square().mean())

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen.append(f"validated at {self.global_step}")

    def on_train_epoch_start(self) -> None:
        self.seen.append(f"epoch {self.current_epoch} {torch.rand(1).item():.4f}")

    def on_train_epoch_end(self) -> None:
        self.seen.append(f"end of epoch {self.current_epoch}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if self.schedule == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"},
        }


class KillAfter(Callback):  # type: ignore[misc]
    """Ends the process after `steps` steps were saved."""

    def __init__(self, run: hf.Run, steps: int) -> None:
        self.run, self.steps = run, steps
        checkpoint = run.checkpoint

        def save_and_die(state: Any, step: int, **how: Any) -> bool:
            saved = checkpoint(state, step, **how)
            if step == steps:
                raise Killed
            return saved

        run.checkpoint = save_and_die  # type: ignore[method-assign]


@pytest.fixture
def start_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., hf.Run]:
    images = tmp_path / "images"

    def start(generation: int, dp: int = 2) -> hf.Run:
        restore = None
        headers = {path: header for path in images.glob("*.image") if (header := peek(path)) is not None}
        if headers:
            path, header = max(headers.items(), key=lambda item: item[1].stamp.key.step)
            restore = RestoreTarget(header.stamp.key.step, header.stamp.key.attempt, str(path))
        world = World(Mesh.of({"dp": dp}), 0, generation)
        run = hf.Run(
            environment=Environment(
                world, job="t", attempt=generation, images=str(images), interval_steps=1, restore=restore
            ),
            device=torch.device("cpu"),
            notes=Notes(agent="", replicator="", job="t", generation=generation, rank=0),
            control=Control(None),
            process_group_s=0.0,
        )
        monkeypatch.setattr(hf, "attach", lambda **_: run)
        monkeypatch.setattr(HoldfastCallback, "_had_a_fit", False)
        return run

    return start


def loader_of(kind: str) -> Any:
    match kind:
        case "stateful":
            return StatefulDataLoader(Samples(), BATCH, shuffle=True)
        case "plain":
            return DataLoader(Samples(), BATCH, shuffle=True)
        case "stream":
            return DataLoader(Stream(), BATCH)
        case "drawing stream":
            return DataLoader(DrawingStream(), BATCH)
        case "generator":
            return DataLoader(Samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
        case "two":
            return CombinedLoader(
                {
                    "a": DataLoader(Samples(), BATCH, shuffle=True),
                    "b": StatefulDataLoader(Samples(), 2 * BATCH, shuffle=True),
                },
                "max_size_cycle",
            )
    raise AssertionError(kind)


def fit(directory: Path, seen: list[str], loader: str, *callbacks: Callback, schedule: str = "step", **how: Any) -> str:
    torch.manual_seed(3)
    model = Model(seen, schedule)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=list(callbacks),
        **{"max_epochs": 3, "num_sanity_val_steps": 1, **how},
    )
    trainer.fit(model, loader_of(loader), DataLoader(Samples(), BATCH))
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stateful": ("stateful", {}),
    "plain": ("plain", {}),
    "stream": ("stream", {}),
    "accumulated": ("plain", {"accumulate_grad_batches": 2}),
    "validated within the epoch": ("stateful", {"val_check_interval": 3}),
    "own generator": ("generator", {}),
    "two loaders": ("two", {"max_epochs": 2}),
    "plateau": ("plain", {"schedule": "plateau"}),
    "by steps": ("plain", {"max_epochs": -1, "max_steps": 17}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fit_that_is_killed_after_any_step_ends_as_one_that_was_not(
    case: str, tmp_path: Path, start_run: Callable[..., hf.Run]
) -> None:
    loader, how = CASES[case]
    calm: list[str] = []
    expected = fit(tmp_path, calm, loader, **how)
    batches = [entry for entry in calm if entry.startswith("batch")]
    steps = (
        14
        if how.get("max_epochs") == 2
        else 17
        if "max_steps" in how
        else 12
        if "accumulate_grad_batches" in how
        else 21
    )
    for killed_after in sorted({1, 3, 4, 7, 8, 12, steps}):  # 7 ends an epoch, or 4 with accumulation
        for image in (tmp_path / "images").glob("*"):
            image.unlink()
        seen: list[str] = []
        run = start_run(1)
        with pytest.raises(Killed):
            fit(tmp_path, seen, loader, HoldfastCallback(), KillAfter(run, killed_after), **how)
        before = len(seen)
        run = start_run(2)
        assert run.restore_step == killed_after
        digest = fit(tmp_path, seen, loader, HoldfastCallback(), **how)
        drawn = [entry for entry in seen if entry.startswith("batch")]
        assert drawn == batches, f"killed after {killed_after}"
        assert digest == expected, f"killed after {killed_after}"
        assert seen == calm, f"killed after {killed_after}, {seen[:before]} | {seen[before:]}"
        assert run.steps_finished == steps


def test_a_covered_fit_changes_nothing(tmp_path: Path, start_run: Callable[..., hf.Run]) -> None:
    calm: list[str] = []
    covered: list[str] = []
    expected = fit(tmp_path, calm, "plain")
    run = start_run(1)
    assert fit(tmp_path, covered, "plain", HoldfastCallback()) == expected
    assert covered == calm
    assert run.steps_finished == 21


def test_another_number_of_replicas_is_refused(tmp_path: Path, start_run: Callable[..., hf.Run]) -> None:
    run = start_run(1)
    with pytest.raises(Killed):
        fit(tmp_path, [], "plain", HoldfastCallback(), KillAfter(run, 2))
    start_run(2, dp=3)
    with pytest.raises(InvalidSpec, match="replicas: 3"):
        fit(tmp_path, [], "plain", HoldfastCallback())


def test_a_lightning_with_another_signature_is_refused_by_name(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(1)
    monkeypatch.setattr(_FitLoop, "on_advance_end", lambda self, more=None: None)
    with pytest.raises(IncompatibleVersion, match=r"_FitLoop\.on_advance_end"):
        subject._require_supported(pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False))


def test_the_entry_points_callback_leaves_an_unsupported_run_alone(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(1)
    monkeypatch.setattr(subject, "STRATEGIES", ())
    fit(tmp_path, [], "plain", HoldfastCallback(optional=True), max_epochs=1)
    assert "SingleDeviceStrategy" in caplog.text
    assert run.steps_finished == 0
    monkeypatch.setattr(HoldfastCallback, "_had_a_fit", False)
    with pytest.raises(InvalidSpec, match="SingleDeviceStrategy"):
        fit(tmp_path, [], "plain", HoldfastCallback(), max_epochs=1)


def test_an_order_that_cannot_be_repeated_is_refused(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(1)
    with pytest.raises(InvalidSpec, match="DrawingStream uses random numbers"):
        fit(tmp_path, [], "drawing stream", HoldfastCallback())
    run = start_run(1)
    fit(tmp_path, [], "drawing stream", HoldfastCallback(optional=True))
    assert "saves nothing of this fit" in caplog.text
    assert run.steps_finished == 21


def test_a_trainer_that_uses_no_other_rank_is_left_alone_or_refused(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    fit(tmp_path, [], "plain", HoldfastCallback(optional=True), max_epochs=1)
    assert "trainer.world_size: 1" in caplog.text
    assert run.steps_finished == 0
    monkeypatch.setattr(HoldfastCallback, "_had_a_fit", False)
    with pytest.raises(InvalidSpec, match=r"2, the number of ranks"):
        fit(tmp_path, [], "plain", HoldfastCallback(), max_epochs=1)
