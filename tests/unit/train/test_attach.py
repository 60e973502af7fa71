"""`hf.attach`: the run of a process that somebody else has set up, and how it ends."""

from __future__ import annotations

import atexit
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast.train as hf
from holdfast.domain import worker
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.train import wiring

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """As in a new process: nothing is attached. Yields the handlers that run when it exits normally."""
    for name in (*LAUNCHED, worker.ENV_JOB, "HOLDFAST_CHECKPOINT_DIR"):
        monkeypatch.delenv(name, raising=False)
    handlers: list[Callable[[], None]] = []
    monkeypatch.setattr(wiring, "_current", None)
    monkeypatch.setattr(atexit, "register", handlers.append)
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    yield handlers
    for handler in handlers:
        handler()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def checkpoint(tmp_path: Path) -> hf.Checkpoints:
    return hf.Checkpoints(directory=tmp_path / "ckpt", interval_steps=2, memory=tmp_path / "memory")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The environment of torchrun, for a world of one; returns the error file."""
    values = ("0", "1", "0", "127.0.0.1", "0", str(tmp_path / "error.json"))
    for name, value in zip(LAUNCHED, values, strict=True):
        monkeypatch.setenv(name, value)
    return tmp_path / "error.json"


def of_the_framework(rank: int = 0, size: int = 1) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=size)  # type: ignore[attr-defined]


def train(run: hf.Run, state: dict[str, Any], steps: int) -> None:
    """The loop of a framework that calls back."""
    for step in range(run.restore(state), steps):
        run.begin_step(step)
        state["w"] += torch.rand(2)
        run.end_step(loss=1.0, tokens=2)
        run.checkpoint(state, step + 1)


def test_a_plain_script_gets_an_inert_run_and_no_group() -> None:
    run = hf.attach()
    assert (run.inert, run.world_size, run.rank, run.generation, run.restore_step) == (True, 1, 0, 0, 0)
    train(run, {"w": torch.zeros(2)}, 3)
    assert not dist.is_initialized()
    assert run.mesh.mesh_dim_names == ("dp",)
    assert dist.is_initialized(), "made for the mesh"


def test_it_makes_the_group_that_the_environment_describes_and_leaves_it_at_the_exit(
    launched: Path, process: list[Callable[[], None]]
) -> None:
    with hf.attach():
        assert dist.get_world_size() == 1
    assert dist.is_initialized(), "the framework may still need it"
    for handler in process:
        handler()
    assert not dist.is_initialized()


def test_it_joins_a_group_that_exists_and_never_destroys_it(launched: Path, process: list[Callable[[], None]]) -> None:
    of_the_framework()
    with hf.attach():
        pass
    for handler in process:
        handler()
    assert dist.is_initialized()


def test_a_script_may_make_its_group_later(launched: Path) -> None:
    run = hf.attach(make_group=False)
    assert not dist.is_initialized()
    of_the_framework()
    train(run, {"w": torch.zeros(2)}, 2)
    assert run.mesh.size() == 1


@pytest.mark.parametrize("attached", [True, False])
def test_a_second_group_is_refused_with_the_remedy(
    launched: Path, attached: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    sys.excepthook = sys.__excepthook__
    if not attached:
        of_the_framework()
    hf.attach()
    with pytest.raises(ValueError, match="default process group twice") as refused:
        of_the_framework()
    sys.excepthook(ValueError, refused.value, refused.value.__traceback__)
    assert ("make_group=False" in capfd.readouterr().err) is attached


def test_without_an_agent_the_group_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun and srun set no RANK."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    run = hf.attach(mesh={"dp": 2, "tp": -1})
    assert (run.rank, dict(run.world.mesh.dims)) == (3, {"dp": 2, "tp": 2})
    monkeypatch.undo()


def test_a_group_with_other_ranks_than_the_agents_is_refused(launched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(worker.ENV_JOB, "llm")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    of_the_framework()
    with pytest.raises(InvalidSpec, match="rank of the process group: 0 is not valid; expected 1"):
        hf.attach()
    assert wiring.current() is None


def test_the_ranks_need_a_group_to_select_a_checkpoint(
    launched: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: hf.Checkpoints
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidSpec, match=r"make_group: False is not valid; expected True, or hf\.attach after"):
        hf.attach(make_group=False, checkpoint=checkpoint)
    assert launched.exists(), "the error file says why the process failed"


def test_twice_is_once(checkpoint: hf.Checkpoints, tmp_path: Path) -> None:
    run = hf.attach(checkpoint=checkpoint)
    assert hf.attach() is run
    assert hf.attach(checkpoint=checkpoint) is run
    with pytest.raises(Conflict, match="already has a run with checkpoint="):
        hf.attach(checkpoint=hf.Checkpoints(directory=tmp_path / "elsewhere"))
    with pytest.raises(Conflict, match=r"already has a run with mesh=None; it cannot get mesh=\{'dp': 1\}"):
        hf.attach(mesh={"dp": 1})
    with pytest.raises(Conflict, match="already has a run"):
        hf.launch(lambda run: None)


def test_inside_of_launch_it_is_the_run_of_launch() -> None:
    seen: list[hf.Run] = []

    def main(run: hf.Run) -> None:
        seen.extend((run, hf.attach()))

    hf.launch(main)
    assert seen[0] is seen[1]


def test_the_run_of_an_agent_ends_once(launched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_framework()
    monkeypatch.setenv(worker.ENV_JOB, "llm")
    with hf.attach() as run:
        assert not run.inert
    with pytest.raises(Conflict, match="the run of this process has ended"):
        hf.attach()


def test_a_standalone_run_is_restored_late_with_its_random_numbers(checkpoint: hf.Checkpoints) -> None:
    torch.manual_seed(3)
    state = {"w": torch.zeros(2)}
    with hf.attach(checkpoint=checkpoint) as run:
        train(run, state, 5)
        at_5 = state["w"].clone()
    del run
    again = {"w": torch.zeros(2)}
    with hf.attach(checkpoint=checkpoint) as run:
        assert run.restore_step == 4, "known before the state exists"
        with pytest.raises(Conflict, match=r"call run\.restore"):
            run.begin_step(4)
        torch.rand(7)  # a framework builds its model
        assert run.restore(again) == 4
        torch.rand(5)
        random.random()  # a framework skips batches
        run.reapply_rng()
        train(run, again, 5)
        assert run.restore_step == 4
    assert torch.equal(again["w"], at_5)


def test_a_run_that_was_not_restored_keeps_its_random_numbers() -> None:
    run = hf.attach()
    run.restore({})
    before = torch.get_rng_state()
    run.reapply_rng()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_is_ended_once() -> None:
    run = hf.attach()
    run.begin_step(0)
    run.end_step()
    with pytest.raises(Conflict, match="no step has been begun"):
        run.end_step()


def test_an_exception_abandons_the_run_and_is_written_down(
    launched: Path, checkpoint: hf.Checkpoints, tmp_path: Path
) -> None:
    def script() -> None:
        with hf.attach(checkpoint=checkpoint) as run:
            train(run, {"w": torch.zeros(2)}, 2)
            raise ZeroDivisionError("the learning rate")

    with pytest.raises(ZeroDivisionError):
        script()
    written = json.loads(launched.read_text())
    assert written["message"]["message"] == "ZeroDivisionError: the learning rate"
    assert list((tmp_path / "memory").rglob("*.image")), "its images stay for the next start"
    with hf.attach(checkpoint=checkpoint) as run:
        assert run.restore_step == 2


def test_an_exception_that_ends_a_script_without_a_block_does_the_same(
    launched: Path, checkpoint: hf.Checkpoints, tmp_path: Path, process: list[Callable[[], None]]
) -> None:
    seen: list[BaseException] = []
    sys.excepthook = lambda kind, error, trace: seen.append(error)
    run = hf.attach(checkpoint=checkpoint)
    train(run, {"w": torch.zeros(2)}, 2)
    error = ZeroDivisionError("the learning rate")
    sys.excepthook(ZeroDivisionError, error, None)
    assert seen == [error], "the traceback is printed as before"
    assert "the learning rate" in launched.read_text()
    assert list((tmp_path / "memory").rglob("*.image"))
    for handler in process:
        handler()
    assert dist.is_initialized(), "other ranks may hang in a collective"


def test_a_script_that_just_ends_is_finished(
    checkpoint: hf.Checkpoints, tmp_path: Path, process: list[Callable[[], None]]
) -> None:
    run = hf.attach(checkpoint=checkpoint)
    train(run, {"w": torch.zeros(2)}, 2)
    (ending,) = process
    ending()
    assert len(list((tmp_path / "ckpt").rglob("rank-0.json"))) == 1
    assert not list((tmp_path / "memory").rglob("*.image")), "all is on disk: the memory was given back"


def test_a_stop_is_an_interruption_however_the_process_leaves(
    checkpoint: hf.Checkpoints, monkeypatch: pytest.MonkeyPatch, process: list[Callable[[], None]]
) -> None:
    ends: list[str] = []
    run = hf.attach(checkpoint=checkpoint)
    session = run._standalone
    assert session is not None
    for name in ("finish", "interrupt", "abandon"):

        def ended(self: object, name: str = name, end: Callable[[object], None] = getattr(type(session), name)) -> None:
            ends.append(name)
            end(self)

        monkeypatch.setattr(type(session), name, ended)
    run._orders.stop = False
    with pytest.raises(hf.Interrupted):
        run.begin_step(0)
    (ending,) = process
    ending()
    assert ends == ["interrupt"]


def test_a_forked_child_does_not_end_its_parents_run(
    checkpoint: hf.Checkpoints, monkeypatch: pytest.MonkeyPatch, process: list[Callable[[], None]]
) -> None:
    run = hf.attach(checkpoint=checkpoint)
    (ending,) = process
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        ending()
        sys.excepthook(ValueError, ValueError(), None)
    train(run, {"w": torch.zeros(2)}, 2)
    assert hf.attach() is run
