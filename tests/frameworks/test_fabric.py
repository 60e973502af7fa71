"""Fabric's integration in one process: training is ended after chosen steps, and the rest must be equal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from restarted_runs import Killed, starting
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast.train as hf
from holdfast.domain.errors import Conflict, IncompatibleVersion, InvalidSpec
from holdfast.integrations import fabric as subject

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SAMPLES, BATCH, EPOCHS = 26, 4, 3


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + torch.rand(4)


@pytest.fixture
def start_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., hf.Run]:
    return starting(tmp_path, monkeypatch, dp=2)


def train(seen: list[str], *, accumulated: int = 1, distributed: bool = False) -> str:
    torch.manual_seed(3)
    fabric = Fabric(accelerator="cpu", devices=1)
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    sampler: Any = torch.utils.data.DistributedSampler(Samples(), 1, 0) if distributed else None
    loader = fabric.setup_dataloaders(DataLoader(Samples(), BATCH, shuffle=sampler is None, sampler=sampler))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": 0}
    run = subject.attach(fabric, state)
    for epoch in range(run.epoch, EPOCHS):
        for batch in run.batches(loader):
            with run.step() as step:
                state["batches"] += 1
                loss = model(batch).square().mean()
                fabric.backward(loss)
                if state["batches"] % accumulated == 0:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                step.log(loss=loss)
                drawn, rate = torch.rand(1).item(), optimizer.param_groups[0]["lr"]
                seen.append(f"{epoch} {state['batches']} {batch.sum().item():.4f} {drawn:.4f} {rate:.6f}")
    run.run.finish()
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in module.parameters())).hexdigest()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "order by epoch": {"distributed": True},
    "accumulated": {"accumulated": 3},  # a step goes across the end of an epoch
}


@pytest.mark.parametrize("case", CASES)
def test_a_loop_that_is_killed_after_any_step_ends_as_one_that_was_not(
    case: str, tmp_path: Path, start_run: Callable[..., hf.Run]
) -> None:
    calm: list[str] = []
    run = start_run(1)
    expected = train(calm, **CASES[case])
    batches = CASES[case].get("accumulated", 1)
    steps = run.steps_finished
    assert steps == 7 * EPOCHS // batches
    for killed_after in sorted({1, 2, 3, steps} | ({6, 7, 8, 14} if batches == 1 else set())):  # 7 ends an epoch
        for image in (tmp_path / "images").glob("*"):
            image.unlink()
        seen: list[str] = []
        start_run(1, kill_after=killed_after)
        with pytest.raises(Killed):
            train(seen, **CASES[case])
        assert len(seen) == killed_after * batches
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


def set_up(fabric: Fabric) -> tuple[dict[str, Any], Any]:
    module = nn.Linear(4, 1)
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters()))
    return {"model": model, "optimizer": optimizer}, fabric.setup_dataloaders(DataLoader(Samples()))


def test_fabrics_own_files_are_left_to_it(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(1)
    phases: list[str] = []
    phase = run.phase

    def noted(name: Any) -> Any:
        phases.append(str(name))
        return phase(name)

    monkeypatch.setattr(run, "phase", noted)
    fabric = Fabric(accelerator="cpu", devices=1)
    state, _ = set_up(fabric)
    subject.attach(fabric, state)
    fabric.save(tmp_path / "own.ckpt", state)
    assert phases == ["checkpoint"]
    assert set(fabric.load(tmp_path / "own.ckpt")) == {"model", "optimizer"}
    with pytest.raises(Conflict, match="before attach"):
        fabric.load(tmp_path / "own.ckpt", state)


def test_what_is_not_supported_is_named(start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    start_run(1)
    fabric = Fabric(accelerator="cpu", devices=1)
    state, loader = set_up(fabric)
    with pytest.raises(InvalidSpec, match=r"state: \['model'\]"):
        subject.attach(fabric, {"model": state["model"]})
    with pytest.raises(InvalidSpec, match=r"state\['loader'\]: 'a data loader'"):
        subject.attach(fabric, {**state, "loader": loader})
    run = subject.attach(fabric, state)
    next(run.batches(loader))
    with pytest.raises(Conflict, match="another loader"):
        next(run.batches(fabric.setup_dataloaders(DataLoader(Samples()))))
    monkeypatch.setattr(subject, "STRATEGIES", ())
    with pytest.raises(InvalidSpec, match="strategy: 'SingleDeviceStrategy'"):
        subject.attach(fabric, state)
    monkeypatch.setattr(Fabric, "save", lambda self: None)
    with pytest.raises(IncompatibleVersion, match=r"Fabric\.save"):
        subject.attach(fabric, state)


def test_a_fabric_that_uses_no_other_rank_is_refused(
    start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidSpec, match=r"fabric\.world_size: 1 .* 2, the number of ranks"):
        train([])
