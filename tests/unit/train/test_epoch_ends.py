"""Saves at the end of an epoch, in loops that take their batches from the run: a restore must not begin with an empty epoch."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from restarted_runs import Killed, starting
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import holdfast.train as hf
from holdfast.domain import worker as protocol
from holdfast.integrations.loop import LoopRun
from holdfast.integrations.replay import Replayed
from holdfast.train.channels import Control
from holdfast.train.orders import Orders

BATCHES, EPOCHS = 3, 4


class Loop(LoopRun):
    """A loop with one value as its state."""

    def __init__(self, run: hf.Run) -> None:
        self.data = Replayed(run)
        super().__init__(run, self.data)
        self.state: dict[str, Any] = {"data": self.data, "evaluations": 0}
        run.restore(self.state)

    def _given_state(self) -> Mapping[str, Any]:
        return self.state

    def train(self, loader: Any, seen: list[str], epochs: int = EPOCHS) -> None:
        for epoch in range(self.epoch, epochs):
            last = None
            for batch in self.data.batches(loader, lambda: None):
                last = batch[0].sum().item() if isinstance(batch, list) else batch.sum().item()
                with self.run.step(self.run.steps_finished):
                    seen.append(f"{epoch} {last} {torch.rand(1).item():.5f}")
                self._save()
            assert last is not None, "an epoch without batches"
            self.state["evaluations"] += 1
            seen.append(f"evaluation {self.state['evaluations']} {torch.rand(1).item():.5f}")
        self.run.finish()


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter([torch.tensor(float(each)) for each in range(BATCHES)])


def loader() -> Any:
    torch.manual_seed(5)
    own = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.arange(float(BATCHES))), shuffle=True, generator=own)


@pytest.fixture
def start_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., hf.Run]:
    return starting(tmp_path, monkeypatch, dp=1)


@pytest.mark.parametrize("killed_after", range(1, BATCHES * EPOCHS + 1))
def test_no_epoch_is_empty_and_no_evaluation_is_repeated(
    killed_after: int, tmp_path: Path, start_run: Callable[..., hf.Run]
) -> None:
    calm: list[str] = []
    Loop(start_run(1)).train(loader(), calm)
    for image in (tmp_path / "images").glob("*"):
        image.unlink()
    seen: list[str] = []
    with pytest.raises(Killed):
        Loop(start_run(1, kill_after=killed_after)).train(loader(), seen)
    run = start_run(2)
    assert run.restore_step == killed_after
    Loop(run).train(loader(), seen)
    assert seen == calm


def saved_steps(
    run: hf.Run, monkeypatch: pytest.MonkeyPatch, at: Callable[[], int] = lambda: 0, places: list[int] | None = None
) -> list[int]:
    """The steps that are saved from now on. `places`: what `at` returned at each of them."""
    saved: list[int] = []
    save = run._checkpoints.save

    def noted(live: Mapping[str, Any], step: int, *, wait_s: float = 0.0) -> bool:
        saved.append(step)
        if places is not None:
            places.append(at())
        return save(live, step, wait_s=wait_s)

    monkeypatch.setattr(run._checkpoints, "save", noted)
    return saved


def test_a_deferred_save_keeps_its_step_and_the_last_one_is_made_at_the_end(
    start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(1)
    run._orders = Orders(Control(None), BATCHES, rank=0, miss=lambda step, why: None)
    seen: list[str] = []
    made_at: list[int] = []
    saved = saved_steps(run, monkeypatch, lambda: len(seen), made_at)
    Loop(run).train(loader(), seen)
    assert saved == [BATCHES * (epoch + 1) for epoch in range(EPOCHS)]
    assert made_at == [(BATCHES + 1) * (epoch + 1) for epoch in range(EPOCHS)], "after the evaluation of the epoch"


def test_a_requested_save_at_the_end_of_an_epoch_is_not_deferred(
    start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(1)
    agent, script = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control = Control(script.detach())
    run._orders = Orders(control, BATCHES, rank=0, miss=lambda step, why: None)
    agent.send(protocol.encode("checkpoint_now", at_step=BATCHES))
    seen: list[str] = []
    made_at: list[int] = []
    saved = saved_steps(run, monkeypatch, lambda: len(seen), made_at)
    Loop(run).train(loader(), seen, epochs=2)
    agent.close()
    control.close()
    assert (saved[0], made_at[0]) == (BATCHES, BATCHES), "before the evaluation"


def test_an_epoch_of_one_batch_is_saved_too(start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(1)
    saved = saved_steps(run, monkeypatch)
    Loop(run).train(DataLoader(TensorDataset(torch.arange(1.0))), [])
    assert saved == [1, 2, 3, 4]


def test_the_end_of_a_stream_is_not_known_so_its_save_is_not_deferred(
    start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(1)
    saved = saved_steps(run, monkeypatch)
    Loop(run).train(DataLoader(Stream()), [])
    assert saved == list(range(1, BATCHES * EPOCHS + 1))


def test_a_deferred_save_is_made_at_the_next_step_at_the_latest(
    start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(1)
    run._orders = Orders(Control(None), BATCHES, rank=0, miss=lambda step, why: None)
    saved = saved_steps(run, monkeypatch)
    loop = Loop(run)
    for _ in loop.data.batches(loader(), lambda: None):
        with run.step(run.steps_finished):
            pass
        loop._save()
    assert saved == []
    with run.step(run.steps_finished):  # a step that takes no batch from the loader
        pass
    loop._save()
    assert saved == [BATCHES + 1]
