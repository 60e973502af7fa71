"""DCP's own calls through a run: what they save, what they load, and what is refused."""

from __future__ import annotations

import gc
import io
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_now

import holdfast.train as hf
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.mesh import Mesh
from holdfast.integrations.dcp import Reader, Stager, Writer
from holdfast.integrations.loaders import PerRank
from holdfast.shards import peek
from holdfast.train import run as run_module
from holdfast.train.channels import Control, Notes
from holdfast.train.environment import Environment, RestoreTarget, World

StartRun = Callable[..., hf.Run]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@pytest.fixture
def start_run(tmp_path: Path) -> StartRun:
    def start(**changes: Any) -> hf.Run:
        images = tmp_path / "images"
        environment = replace(
            Environment(World(Mesh.of({"dp": 2}), 1, 3), job="t", attempt=1, images=str(images), interval_steps=5),
            **changes,
        )
        notes = Notes(agent="", replicator="", job="t", generation=3, rank=1)
        return hf.Run(
            environment=environment, device=torch.device("cpu"), notes=notes, control=Control(None), process_group_s=0.0
        )

    return start


class App:
    """As in torch's own tutorial: model and optimizer as one Stateful."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.model(torch.ones(4)).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Loader:
    """A loader that has no state before it was used, as torchdata's."""

    def __init__(self) -> None:
        self.at: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.at)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = dict(state)


def state_of(run: hf.Run, seed: int) -> dict[str, Any]:
    return {"app": App(seed), "data": PerRank(Loader(), run.world), "seen": seed, "more": {"w": torch.rand(2)}}


def steps(run: hf.Run, count: int) -> None:
    for step in range(run.steps_finished, run.steps_finished + count):
        with run.step(step):
            pass


def newest(images: Path) -> RestoreTarget:
    headers = {path: peek(path) for path in images.glob("*.image")}
    keys = {path: header.stamp.key for path, header in headers.items() if header is not None}
    path = max(keys, key=lambda path: keys[path].step)
    return RestoreTarget(keys[path].step, keys[path].attempt, str(path))


def save(state: dict[str, Any], run: hf.Run, how: str) -> None:
    if how == "save":
        save_now(state, storage_writer=Writer(run))
    else:
        saving: Any = async_save(state, storage_writer=Writer(run))
        saving.result()


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_load_continues_what_a_save_has_saved(how: str, start_run: StartRun, tmp_path: Path) -> None:
    run = start_run()
    state = state_of(run, 1)
    state["data"]._loader.at = {"read": 17}
    steps(run, 3)
    save(state, run, how)
    expected = torch.rand(3)

    again = start_run(restore=newest(tmp_path / "images"))
    other = state_of(again, 2)
    reader = Reader(again, first=tmp_path / "not-read")
    assert reader.available
    assert again.restore_step == 3
    load(other, storage_reader=reader)
    assert torch.equal(torch.rand(3), expected)
    assert (other["seen"], other["data"]._loader.at) == (1, {"read": 17})
    for name, tensor in state["app"].model.state_dict().items():
        assert torch.equal(other["app"].model.state_dict()[name], tensor)
    assert torch.equal(other["more"]["w"], state["more"]["w"])
    moments = other["app"].optimizer.state_dict()["state"][0]
    assert torch.equal(moments["exp_avg"], state["app"].optimizer.state_dict()["state"][0]["exp_avg"])
    steps(again, 1)
    assert again.steps_finished == 4
    with pytest.raises(Conflict, match="has finished a step"):
        again.restore_by(lambda shards: {})


def test_what_dcp_loaded_is_what_run_restore_loads(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run()
    state = {"app": App(1), "seen": 1}
    steps(run, 5)
    save_now(state, storage_writer=Writer(run))
    again, other = start_run(restore=newest(tmp_path / "images")), {"app": App(2), "seen": 2}
    assert again.restore(other) == 5
    assert other["seen"] == 1
    assert torch.equal(other["app"].model.weight, state["app"].model.weight)  # type: ignore[attr-defined]


def test_a_state_can_be_loaded_in_parts(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run()
    steps(run, 5)
    save_now({"a": torch.ones(2), "b": torch.ones(3)}, storage_writer=Writer(run))
    again = start_run(restore=newest(tmp_path / "images"))
    a, b = {"a": torch.zeros(2)}, {"b": torch.zeros(3)}
    reader = Reader(again)
    load(a, storage_reader=reader)
    load(b, storage_reader=reader)
    assert (a["a"].tolist(), b["b"].tolist()) == ([1.0] * 2, [1.0] * 3)


def test_a_first_start_reads_a_checkpoint_that_dcp_wrote(start_run: StartRun, tmp_path: Path) -> None:
    app = App(1)
    save_now({"app": app}, checkpoint_id=tmp_path / "theirs")
    run, fresh = start_run(), App(2)
    load({"app": fresh}, storage_reader=Reader(run, first=tmp_path / "theirs"))
    assert torch.equal(fresh.model.weight, app.model.weight)
    assert run.steps_finished == 0


def test_nothing_to_load_is_said(start_run: StartRun) -> None:
    reader = Reader(start_run())
    assert not reader.available
    with pytest.raises(CheckpointException, match=r"reader\.available"):
        load({"w": torch.ones(1)}, storage_reader=reader)


def test_the_stager_lends_the_image_to_the_scripts_own_files(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run()
    app, stager = App(1), Stager(run)
    steps(run, 4)
    kept = app.model.weight.detach().clone()
    saving: Any = async_save({"app": app, "at": 4}, checkpoint_id=tmp_path / "own", async_stager=stager)
    with torch.no_grad():
        app.model.weight.zero_()  # training goes on
    saving.result()
    loaded = {"app": App(2), "at": 0}
    load(loaded, checkpoint_id=tmp_path / "own")
    assert torch.equal(loaded["app"].model.weight, kept)  # type: ignore[attr-defined]
    assert (loaded["at"], newest(tmp_path / "images").step) == (4, 4)


def test_an_image_that_is_lent_is_not_overwritten_and_comes_back(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "DEMANDED_WAIT_S", 0.02)
    run = start_run()
    weight, stager = torch.ones(3), Stager(run)
    staged = []
    for step in range(3):  # the third finds one image lent, and the other with the newest save
        steps(run, 1)
        weight.fill_(step)
        staged.append(stager.stage({"w": weight, "step": step}))
    assert [one["w"].tolist() for one in staged] == [[float(step)] * 3 for step in range(3)]
    assert [one["step"] for one in staged] == [0, 1, 2]
    assert newest(tmp_path / "images").step == 2
    del staged
    gc.collect()
    steps(run, 1)
    stager.stage({"w": weight})
    assert newest(tmp_path / "images").step == 4


def test_a_state_that_another_stager_has_copied_is_refused(start_run: StartRun) -> None:
    run = start_run()
    saving: Any = async_save({"w": torch.ones(1)}, storage_writer=Writer(run), async_stager=Stager(run))
    with pytest.raises(CheckpointException, match="without async_stager"):
        saving.result()


def test_a_stop_is_raised_by_the_next_step(start_run: StartRun) -> None:
    run = start_run()
    steps(run, 1)
    run._orders.stop = True
    save_now({"w": torch.ones(1)}, storage_writer=Writer(run))
    with pytest.raises(hf.Interrupted) as caught:
        run.step(1)
    assert (caught.value.step, caught.value.saved) == (1, True)


def test_a_save_is_due_at_the_interval_and_when_it_was_asked_for(start_run: StartRun) -> None:
    run = start_run()
    writer, due = Writer(run), []
    run._orders._take({"type": "checkpoint_now", "at_step": 7}, 0)
    for _ in range(11):
        steps(run, 1)
        due.append(writer.due)
        if due[-1]:
            save_now({"w": torch.ones(1)}, storage_writer=writer)
    assert [step + 1 for step, is_due in enumerate(due) if is_due] == [5, 7, 10]


def test_a_run_that_saves_nothing_has_no_writer(start_run: StartRun) -> None:
    with pytest.raises(Conflict, match=r"run\.saves"):
        Writer(start_run(images=""))


def test_a_position_of_another_number_of_replicas_is_refused() -> None:
    saved = PerRank(Loader(), World(Mesh.of({"dp": 2}), 1)).state_dict()
    with pytest.raises(InvalidSpec, match="ElasticSampler"):
        PerRank(Loader(), World(Mesh.of({"dp": 3}), 1)).load_state_dict(saved)
    with pytest.raises(InvalidSpec, match="StatefulDataLoader"):
        PerRank(object(), World(Mesh.of({"dp": 2}), 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "worker_state", [np.int64(3), np.random.RandomState(1).get_state(), deque([1], 2), b"", bytearray(b"x"), {1}]
)
def test_a_position_that_is_saved_can_be_restored(worker_state: Any) -> None:
    """The position of a data set of the user's: what NumPy counts in, its generator, a buffer."""
    saved, restored = Loader(), Loader()
    saved.at = {"workers": [worker_state], "next": torch.arange(3)}
    world = World(Mesh.of({"dp": 2}), 1)
    PerRank(restored, world).load_state_dict(PerRank(saved, world).state_dict())
    assert repr(restored.at) == repr(saved.at)


def test_a_position_that_cannot_be_restored_is_refused_when_it_is_saved() -> None:
    loader = Loader()
    loader.at = {"workers": [{"of": Path("x")}]}
    with pytest.raises(InvalidSpec, match=r"loader\.workers\.0\.of.*Path"):
        PerRank(loader, World(Mesh.of({"dp": 2}), 1)).state_dict()


def test_a_position_that_an_earlier_release_saved_is_restored() -> None:
    """It saved the loader's state as it was."""
    buffer, loader = io.BytesIO(), Loader()
    torch.save({"read": 7, "seed": torch.ones(1)}, buffer)
    saved = {"position": {"replicas": 2, "state": buffer.getvalue()}}
    PerRank(loader, World(Mesh.of({"dp": 2}), 1)).load_state_dict(saved)
    assert loader.at == {"read": 7, "seed": torch.ones(1)}
