"""A loop over prepared loaders that is ended after any step and begun again: the same batches and weights as without."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DataLoaderConfiguration
from restarted_runs import Killed, starting
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast.train as hf
from holdfast.domain.errors import Conflict, IncompatibleVersion, InvalidSpec
from holdfast.integrations import accelerate as subject

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SAMPLES, BATCH, EPOCHS = 26, 4, 3


class Samples(Dataset[torch.Tensor]):
    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.full((4,), float(index))
        return sample + self.noise * torch.rand(4) if self.noise else sample


class Counter:
    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


@pytest.fixture
def start_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., hf.Run]:
    return starting(tmp_path, monkeypatch, dp=2)


def train(
    seen: list[str], *, noise: float = 1.0, stateful: bool = False, seedable: bool = False, accumulated: int = 1
) -> str:
    torch.manual_seed(3)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulated,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=seedable),
    )
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader: Any = DataLoader(Samples(noise), BATCH, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    run = subject.attach(accelerator)
    for epoch in range(run.epoch, EPOCHS):
        for batch in run.batches(loader):
            with run.step() as step, accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step.log(loss=loss)
                counter.batches += 1
                seen.append(f"{epoch} {counter.batches} {batch.sum().item():.4f} {torch.rand(1).item():.4f}")
    run.run.finish()
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without random data": {"noise": 0.0},
    "stateful": {"stateful": True, "seedable": True, "noise": 0.0},
    "stateful with random data": {"stateful": True, "seedable": True},
    "stateful with an order from the process": {"stateful": True, "noise": 0.0},
    "accumulated": {"accumulated": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_a_loop_that_is_killed_after_any_step_ends_as_one_that_was_not(
    case: str, tmp_path: Path, start_run: Callable[..., hf.Run]
) -> None:
    calm: list[str] = []
    run = start_run(1)
    expected = train(calm, **CASES[case])
    steps = run.steps_finished
    assert steps == (12 if "accumulated" in CASES[case] else 21)
    for killed_after in sorted({1, 2, 6, 7, 8, 11, steps}):  # 7 ends an epoch
        for image in (tmp_path / "images").glob("*"):
            image.unlink()
        seen: list[str] = []
        start_run(1, kill_after=killed_after)
        with pytest.raises(Killed):
            train(seen, **CASES[case])
        # The batches of a step count when it is finished, and so do what follows in the script.
        run = start_run(2)
        assert run.restore_step == killed_after
        digest = train(seen, **CASES[case])
        assert seen == calm, f"killed after {killed_after}"
        assert digest == expected, f"killed after {killed_after}"
        assert run.steps_finished == steps


def test_another_number_of_replicas_is_refused(start_run: Callable[..., hf.Run]) -> None:
    start_run(1, kill_after=2)
    with pytest.raises(Killed):
        train([])
    start_run(2, dp=3)
    with pytest.raises(InvalidSpec, match="replicas: 3"):
        train([])


def test_what_is_not_supported_is_named(start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    start_run(1)
    run = subject.attach(accelerator)
    with pytest.raises(InvalidSpec, match="DataLoaderShard"):
        next(run.batches(DataLoader(Samples(0.0))))
    first, second = accelerator.prepare(DataLoader(Samples(0.0)), DataLoader(Samples(0.0)))
    next(run.batches(first))
    with pytest.raises(Conflict, match="another loader"):
        next(run.batches(second))
    monkeypatch.setattr(subject, "TYPES", ())
    with pytest.raises(InvalidSpec, match="distributed_type: 'NO'"):
        subject.attach(accelerator)
    monkeypatch.setattr(subject, "HELD", ("_no_such",))
    with pytest.raises(IncompatibleVersion, match=r"Accelerator\._no_such"):
        subject.attach(accelerator)
    monkeypatch.setattr(DataLoaderShard, "set_epoch", lambda self: None)
    with pytest.raises(IncompatibleVersion, match=r"DataLoaderShard\.set_epoch"):
        subject.attach(accelerator)


def test_an_accelerator_that_uses_no_other_rank_is_refused(
    start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate without a GPU and without `cpu=True`: each rank would train a model of its own."""
    start_run(1)
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidSpec, match=r"accelerator\.num_processes: 1 .* 2, the number of ranks"):
        subject.attach(accelerator)
