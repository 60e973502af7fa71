"""The random number that torch's DataLoader draws when an iteration begins, and a restart in the middle of an epoch
(docs/checkpoints.md, "Bit-for-bit restores")."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from restarted_runs import Killed, starting
from torch.utils.data import DataLoader, Sampler, TensorDataset

import holdfast.train as hf

SAMPLES = list(range(8))


class Remaining(Sampler[int]):
    """The samples that are left of the epoch."""

    def __init__(self) -> None:
        self.used = 0

    def __iter__(self) -> Iterator[int]:
        return iter(SAMPLES[self.used :])

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


def train(seen: list[tuple[int, float]], how: str) -> None:
    torch.manual_seed(7)
    run, sampler = hf.attach(), Remaining()
    state = {"weight": torch.zeros(1), "sampler": sampler}
    step = run.restore(state)
    own = torch.Generator().manual_seed(0) if how == "own generator" else None
    batches = iter(DataLoader(TensorDataset(torch.arange(len(SAMPLES))), sampler=sampler, generator=own))
    if how == "reapply_rng":
        run.reapply_rng()
    for (sample,) in batches:
        with run.step(step):
            seen.append((int(sample), torch.rand(1).item()))  # in place of dropout
        step, sampler.used = step + 1, sampler.used + 1
        run.checkpoint(state, step)


@pytest.mark.parametrize(("how", "same"), [("plain", False), ("own generator", True), ("reapply_rng", True)])
def test_what_a_restart_in_the_middle_of_an_epoch_draws(
    how: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start: Callable[..., hf.Run] = starting(tmp_path, monkeypatch, dp=1)
    calm: list[tuple[int, float]] = []
    start(1)
    train(calm, how)
    for image in (tmp_path / "images").glob("*"):
        image.unlink()
    seen: list[tuple[int, float]] = []
    start(1, kill_after=3)
    with pytest.raises(Killed):
        train(seen, how)
    start(2)
    train(seen, how)
    assert [sample for sample, _ in seen] == SAMPLES
    assert (seen == calm) is same
