"""One rank's saves and restores through real shard images."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import OrderedDict
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
from holdfast.train.environment import Environment, RestoreTarget, World
from holdfast.train.saves import copying
from holdfast.train.saves.checkpoint import Checkpointer


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
    headers = {path: peek(path) for path in images.glob("*.image")}
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


class Wrapper:
    """Saves a copy of the model that it has, and a number."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"weights": {name: value.clone() for name, value in self.model.state_dict().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["weights"])


MODEL, HEAD = nn.Linear(3, 2), nn.Linear(2, 1)
BOTH = [*MODEL.parameters(), *HEAD.parameters()]


@pytest.mark.parametrize(
    ("state", "warned"),
    [
        ({"model": MODEL}, True),
        ({"model": MODEL, "head": HEAD.weight}, True),
        ({"model": MODEL, "head": HEAD}, False),
        ({"model": MODEL, "deep": {"head": HEAD.state_dict()}}, False),
        ({"model": MODEL, "head": list(HEAD.parameters())}, False),
        ({"model": Wrapper(MODEL), "head": Wrapper(HEAD)}, False),
        ({"model": Wrapper(MODEL), "head": 1}, True),
    ],
    ids=["module missing", "half", "modules", "state dict", "list", "copies", "copy missing"],
)
def test_parameters_that_are_trained_and_not_saved_are_named_once(
    state: dict[str, Any], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = checkpointer(tmp_path)
    live = {**state, "optimizers": {"all": torch.optim.SGD(BOTH)}}
    assert saves.save(live, 1)
    assert saves.save(live, 2)
    named = [record for record in caplog.records if "trains parameters that are in no" in record.message]
    assert len(named) == warned
    assert all("optimizers.all" in record.message for record in named)


def test_a_module_that_keeps_the_checkpoints_memory_is_found_out(tmp_path: Path) -> None:
    checkpointer(tmp_path).save({"model": Keeper(2, 2)}, 1)
    with pytest.raises(InvalidSpec, match="kept a tensor of the checkpoint"):
        checkpointer(tmp_path).restore({"model": Keeper(2, 2)}, newest(tmp_path))


def test_values_changed_after_the_call_are_not_in_the_save(tmp_path: Path) -> None:
    """Named after an asynchronous save elsewhere that stored what came later."""
    live: dict[str, Any] = {
        "tensor": torch.zeros(3),
        "array": np.zeros(3),
        "nested": {"list": [1, 2], "moments": OrderedDict(a=torch.zeros(()))},
        "parameter": nn.Parameter(torch.zeros(3)),
    }
    assert checkpointer(tmp_path).save(live, 1)
    live["tensor"].fill_(1)
    live["array"][:] = 1
    live["nested"]["list"].append(3)
    live["nested"]["moments"]["a"].fill_(1)
    live["parameter"].data.fill_(1)
    checkpointer(tmp_path).restore(live, newest(tmp_path))
    assert live["tensor"].tolist() == live["parameter"].tolist() == live["array"].tolist() == [0, 0, 0]
    assert live["nested"] == {"list": [1, 2], "moments": OrderedDict(a=torch.zeros(()))}


def test_images_are_made_ready_before_the_first_save_wants_them(tmp_path: Path) -> None:
    saver, state = checkpointer(tmp_path), job(1)
    train(state, 1)
    saver.prepare(state)
    saver.prepare(state)
    assert saver.save(state, 1), "waits for the preparation"
    ready = {path.name: path.stat().st_ino for path in tmp_path.glob("*.image")}
    assert sorted(ready) == ["a.image", "b.image"]
    assert saver.save(state, 2)
    assert {path.name: path.stat().st_ino for path in tmp_path.glob("*.image")} == ready, "neither save made one"


def test_two_threads_copy_what_one_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", 64)
    environment = Environment(World(Mesh.of({"dp": 2}), 0, 1), job="t", attempt=1, images=str(tmp_path), copy_threads=2)
    state = {**job(1), "strided": torch.arange(600.0).reshape(20, 30).t(), "flags": torch.rand(999) > 0.5}
    notes = Notes(agent="", replicator="", job="t", generation=1, rank=0)
    assert Checkpointer(environment, torch.device("cpu"), notes).save(state, 1)
    other = {**job(2), "strided": torch.zeros(30, 20), "flags": torch.zeros(999, dtype=torch.bool)}
    checkpointer(tmp_path).restore(other, newest(tmp_path))
    assert torch.equal(other["strided"], state["strided"])
    assert torch.equal(other["flags"], state["flags"])
    assert torch.equal(other["model"][0].weight, state["model"][0].weight)


def test_a_thread_that_cannot_copy_fails_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", 64)
    good, bad = torch.zeros(4096), torch.zeros(3)
    with pytest.raises(RuntimeError, match="size"):
        copying.copy_all([good, bad, good], [good, torch.zeros(4), good], 2)


def test_a_thousand_saves_leak_no_byte_no_file_and_no_descriptor(tmp_path: Path) -> None:
    saver, state = checkpointer(tmp_path), job(1)

    def footprint() -> tuple[int, int, int, list[str]]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count(str(tmp_path))
        files = sorted(f"{path.name} {path.stat().st_size}" for path in tmp_path.glob("*.image"))
        return len(os.listdir("/proc/self/fd")), maps, threading.active_count(), files

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for step in range(50):
        assert saver.save(state, step)
    before, resident = footprint(), resident_bytes()
    for step in range(50, 1050):
        assert saver.save(state, step)
    # Fewer descriptors or threads are those that an earlier test of this process has left behind and that are gone now.
    assert all(more <= fewer for more, fewer in zip(footprint()[:3], before[:3], strict=True))
    assert footprint()[3] == before[3]
    assert resident_bytes() - resident < 2 << 20, "less than 2 kB per save, which is the allocator's noise"


def test_a_save_that_finds_no_image_free_is_skipped_and_counted(tmp_path: Path) -> None:
    saver, state = checkpointer(tmp_path), job(1)
    assert saver.save(state, 1)
    assert saver.save(state, 2)
    (older,) = (path for path in tmp_path.glob("*.image") if str(path) != newest(tmp_path).path)
    with Reader(older):  # the replicator is still copying it
        assert not saver.save(state, 3)
    assert saver.missed == 1
    assert saver.save(state, 3)
    assert newest(tmp_path).step == 3


def test_a_save_that_was_asked_for_waits_for_an_image(tmp_path: Path) -> None:
    saver, state = checkpointer(tmp_path), job(1)
    assert saver.save(state, 1)
    assert saver.save(state, 2)
    (older,) = (path for path in tmp_path.glob("*.image") if str(path) != newest(tmp_path).path)
    with Reader(older):  # the replicator is still copying it, for longer than it may
        assert not saver.save(state, 3, wait_s=0.05)
    assert saver.missed == 1
    copying = Reader(older)
    done = threading.Timer(0.05, copying.close)
    done.start()
    assert saver.save(state, 3, wait_s=60.0)
    assert newest(tmp_path).step == 3
    assert saver.missed == 1


def test_a_state_that_changes_shape_gets_new_images(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    for step, width in ((1, 2), (2, 3), (3, 5), (4, 5)):
        assert saver.save({"model": nn.Linear(width, width)}, step)
    live = {"model": nn.Linear(5, 5)}
    assert checkpointer(tmp_path).restore(live, newest(tmp_path)).step == 4
    assert len(list(tmp_path.glob("*.image"))) == 2


def test_a_failing_save_leaves_the_last_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, state = checkpointer(tmp_path), job(1)
    saver.save(state, 1)
    with pytest.raises(InvalidSpec):
        saver.save({**state, "bad": object()}, 2)
    monkeypatch.setattr(ImageSet, "_reserve_for", lambda *_: 1)  # the extra no longer fits
    with pytest.raises(Exception, match="reserve"):
        saver.save({**state, "text": "x" * 10_000}, 2)
    assert newest(tmp_path).step == 1
