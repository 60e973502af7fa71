"""One rank's saves and restores through real shard images."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.domain.errors import IntegrityError, InvalidSpec
from holdfast.domain.mesh import Mesh
from holdfast.shards import ImageSet, Reader, peek
from holdfast.train.channels import Notes
from holdfast.train.checkpoint import Checkpointer
from holdfast.train.environment import Environment, RestoreTarget, World


def checkpointer(images: Path, *, rank: int = 0, attempt: int = 1) -> Checkpointer:
    environment = Environment(World(Mesh.of({"dp": 2}), rank, 1), job="t", attempt=attempt, images=str(images))
    return Checkpointer(
        environment, torch.device("cpu"), Notes(agent="", replicator="", job="t", generation=1, rank=rank)
    )


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "seen": 0, "empty": torch.empty(0)}


def train(state: dict[str, Any], steps: int) -> list[float]:
    """Steps that draw from every generator, so that only an exact restore continues them."""
    losses = []
    for _ in range(steps):
        noise = random.random() + float(np.random.rand())
        loss = state["model"](torch.randn(5, 4)).square().mean() + noise
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["seen"] += 5
        losses.append(loss.item())
    return losses


def newest(images: Path) -> RestoreTarget:
    """The newest whole save below `images`."""
    headers = {path: peek(path) for path in images.iterdir()}
    keys = {path: header.stamp.key for path, header in headers.items() if header is not None}
    path = max(keys, key=lambda path: keys[path].step)
    return RestoreTarget(keys[path].step, keys[path].attempt, str(path))


def test_a_restored_run_continues_bit_for_bit(tmp_path: Path) -> None:
    state = job(1)
    train(state, 3)
    assert checkpointer(tmp_path).save(state, 3)
    expected = train(state, 4)

    other = job(2)
    train(other, 1)
    random.seed(99)
    np.random.seed(99)
    restored = checkpointer(tmp_path).restore(other, newest(tmp_path))
    assert (restored.step, other["seen"]) == (3, 15)
    assert train(other, 4) == expected
    assert torch.initial_seed() == 1


def test_the_save_is_a_copy(tmp_path: Path) -> None:
    state = job(1)
    train(state, 1)
    checkpointer(tmp_path).save(state, 1)
    kept = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    train(state, 5)
    fresh = job(2)
    checkpointer(tmp_path).restore(fresh, newest(tmp_path))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in fresh["model"].state_dict().items())


def test_a_later_save_into_the_same_file_does_not_change_what_was_restored(tmp_path: Path) -> None:
    state = job(1)
    train(state, 1)
    checkpointer(tmp_path).save(state, 1)
    target, fresh = newest(tmp_path), job(2)
    checkpointer(tmp_path).restore(fresh, target)
    before = fresh["model"].state_dict()["0.weight"].clone()
    train(state, 5)
    saver = checkpointer(tmp_path)
    for step in (2, 3):  # both images
        assert saver.save(state, step)
    assert torch.equal(fresh["model"].state_dict()["0.weight"], before)


def test_a_rank_that_did_not_exist_gets_generators_of_its_own(tmp_path: Path) -> None:
    checkpointer(tmp_path, rank=0).save(job(1), 3)
    draws = []
    for rank in (0, 1, 1):
        checkpointer(tmp_path, rank=rank).restore(job(2), newest(tmp_path))
        draws.append((torch.rand(1).item(), random.random(), float(np.random.rand())))
    same, own, again = draws
    assert own == again
    assert all(mine != others for mine, others in zip(own, same, strict=True))


def test_a_shard_of_another_step_or_lineage_is_refused(tmp_path: Path) -> None:
    checkpointer(tmp_path).save(job(1), 3)
    path = newest(tmp_path).path
    for target in (RestoreTarget(4, 1, path), RestoreTarget(3, 2, path)):
        with pytest.raises(IntegrityError, match="step 3 of attempt 1, not step"):
            checkpointer(tmp_path).restore(job(2), target)


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    checkpointer(tmp_path).save(job(1), 3)
    with pytest.raises(InvalidSpec, match="state: "):
        checkpointer(tmp_path).restore({"model": nn.Linear(1, 1)}, newest(tmp_path))
    smaller = {**job(1), "model": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))}
    with pytest.raises(RuntimeError, match="size mismatch"):
        checkpointer(tmp_path).restore(smaller, newest(tmp_path))


class Keeper(nn.Linear):
    """Keeps a tensor of the checkpoint, as no load_state_dict should."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.kept = state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_module_that_keeps_the_checkpoints_memory_is_found_out(tmp_path: Path) -> None:
    checkpointer(tmp_path).save({"model": Keeper(2, 2)}, 1)
    with pytest.raises(InvalidSpec, match="kept a tensor of the checkpoint"):
        checkpointer(tmp_path).restore({"model": Keeper(2, 2)}, newest(tmp_path))


def test_a_save_that_finds_no_image_free_is_skipped_and_counted(tmp_path: Path) -> None:
    saver, state = checkpointer(tmp_path), job(1)
    assert saver.save(state, 1)
    assert saver.save(state, 2)
    (older,) = (path for path in tmp_path.iterdir() if str(path) != newest(tmp_path).path)
    with Reader(older):  # the replicator is still copying it
        assert not saver.save(state, 3)
    assert saver.missed == 1
    assert saver.save(state, 3)
    assert newest(tmp_path).step == 3


def test_a_state_that_changes_shape_gets_new_images(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    for step, width in ((1, 2), (2, 3), (3, 5), (4, 5)):
        assert saver.save({"model": nn.Linear(width, width)}, step)
    live = {"model": nn.Linear(5, 5)}
    assert checkpointer(tmp_path).restore(live, newest(tmp_path)).step == 4
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failing_save_leaves_the_last_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, state = checkpointer(tmp_path), job(1)
    saver.save(state, 1)
    with pytest.raises(InvalidSpec):
        saver.save({**state, "bad": object()}, 2)
    monkeypatch.setattr(ImageSet, "_reserve_for", lambda *_: 1)  # the extra no longer fits
    with pytest.raises(Exception, match="reserve"):
        saver.save({**state, "text": "x" * 10_000}, 2)
    assert newest(tmp_path).step == 1
