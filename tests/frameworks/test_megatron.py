"""Megatron-Bridge's checkpoint manager and callbacks with a real GPT of Megatron-Core, in one process: what is restored, whose
files are read and written, what is refused. `bridge_stand_in` is Bridge's training loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from restarted_runs import Killed, starting

import holdfast.train as hf
from holdfast.domain.errors import Conflict, IncompatibleVersion, InvalidSpec
from holdfast.domain.signals import Phase

sys.path.insert(0, str(Path(__file__).parent))
import bridge_stand_in  # type: ignore[import-not-found]

bridge_stand_in.install()

from holdfast.integrations import megatron_bridge as subject  # noqa: E402
from holdfast.integrations import megatron_core  # noqa: E402

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
STEPS = 12


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    bridge_stand_in.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def start_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., hf.Run]:
    start = starting(tmp_path, monkeypatch, dp=1)

    def begin(*args: Any, **kwargs: Any) -> hf.Run:
        monkeypatch.setattr(subject, "_training", None)  # a new process
        return start(*args, **kwargs)

    return begin


def train(out: Path, *, steps: int = STEPS, **options: Any) -> Any:
    config = bridge_stand_in.configuration(steps=steps, out=out, **options)
    trainer = bridge_stand_in.Trainer(config, subject.attach(config))
    trainer.setup()
    trainer.train()
    return trainer


def state_of(trainer: Any) -> tuple[Any, ...]:
    for chunk in trainer.model:
        chunk.start_param_sync(force_sync=True)
    weights = [value for each in trainer.model[0].module.parameters() for value in each.flatten().tolist()]
    (optimizer,) = trainer.optimizer.chained_optimizers
    moments = [value for each in optimizer.optimizer.state.values() for value in each["exp_avg_sq"].flatten().tolist()]
    rate = trainer.scheduler.optimizer.param_groups[0]["lr"]
    tracker = bridge_stand_in.tensor_parallel.get_cuda_rng_tracker()
    with tracker.fork():
        drawn = torch.rand(1).item()
    return weights, moments, rate, vars(trainer.state.train_state), drawn, torch.rand(1).item()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("killed_after", [1, 7, 10, STEPS - 1])
def test_a_killed_loop_ends_as_one_that_was_not(
    killed_after: int, overlap: bool, tmp_path: Path, start_run: Callable[..., hf.Run]
) -> None:
    start_run(1)
    expected = state_of(train(tmp_path / "calm", overlap=overlap))
    for image in (tmp_path / "images").glob("*"):
        image.unlink()
    start_run(1, kill_after=killed_after)
    with pytest.raises(Killed):
        train(tmp_path / "killed", overlap=overlap)
    run = start_run(2)
    assert run.restore_step == killed_after
    assert state_of(train(tmp_path / "killed", overlap=overlap)) == expected
    assert run.steps_finished == STEPS
    assert not (tmp_path / "killed").exists(), "Bridge's checkpoints are off"


def test_bridge_writes_its_own_files_and_holdfasts_checkpoint_takes_precedence(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    original = bridge_stand_in.DefaultCheckpointManager.load

    def noted(self: Any, ctx: Any) -> tuple[int, int]:
        loaded.append(ctx.state.train_state.step)
        return original(self, ctx)  # type: ignore[no-any-return]

    monkeypatch.setattr(bridge_stand_in.DefaultCheckpointManager, "load", noted)
    start_run(1, kill_after=6)
    with pytest.raises(Killed):
        train(tmp_path, own=True)
    assert sorted(place.name for place in (tmp_path / "own").iterdir()) == ["iter_0000004"]
    start_run(2)
    trainer = train(tmp_path, own=True)
    assert not loaded, "the run's checkpoint was restored instead"
    assert trainer.state.train_state.step == STEPS
    for image in (tmp_path / "images").glob("*"):
        image.unlink()
    run = start_run(3)
    trainer = train(tmp_path, own=True, steps=STEPS + 3)
    assert loaded == [0], "without a checkpoint of the run, Bridge's own is loaded"
    assert (trainer.state.train_state.step, run.steps_finished) == (STEPS + 3, STEPS + 3)


def test_outside_of_holdfast_the_manager_is_bridges(tmp_path: Path, start_run: Callable[..., hf.Run]) -> None:
    run = start_run(0, job="")
    assert run.inert
    trainer = train(tmp_path, own=True, overlap=True)
    assert trainer.manager._own.finalized == STEPS + 1
    assert len(list((tmp_path / "own").iterdir())) == STEPS // 4
    assert not (tmp_path / "images").exists()


def test_losses_norms_and_phases_are_reported(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss is read when Bridge logs, every fifth step here."""
    run = start_run(1)
    reported: list[hf.Step] = []
    phases: list[Any] = []
    finish, phase = run._finish, run.phase

    def noted(step: hf.Step) -> None:
        reported.append(step)
        finish(step)

    def answer(name: Any) -> Any:
        phases.append(name)
        return phase(name)

    monkeypatch.setattr(run, "_finish", noted)
    monkeypatch.setattr(run, "phase", answer)
    config = bridge_stand_in.configuration(steps=STEPS, out=tmp_path, own=True)
    config.logger.log_interval = 5
    trainer = bridge_stand_in.Trainer(config, subject.attach(config))
    trainer.setup()
    trainer.train()
    assert len(reported) == STEPS
    assert [index for index, step in enumerate(reported, 1) if step.loss is not None] == [5, 10]
    assert all(step.grad_norm > 0 for step in reported if step.loss is not None and step.grad_norm is not None)
    own = [each for each in phases if each in (Phase.EVAL, Phase.CHECKPOINT)]
    assert own.count(Phase.EVAL) == trainer.evaluations == 1


@pytest.mark.parametrize(
    ("section", "field", "value", "error", "message"),
    [
        ("", "peft", object(), InvalidSpec, "peft: "),
        ("dist", "use_torch_fsdp2", True, InvalidSpec, r"dist\.use_torch_fsdp2: True"),
        ("ddp", "use_megatron_fsdp", True, InvalidSpec, r"ddp\.use_megatron_fsdp: True"),
        ("dataset", "dataloader_type", "external", InvalidSpec, "dataloader_type: 'external'"),
        ("checkpoint", "custom_manager_class", "mine.Manager", Conflict, r"mine\.Manager: there can be one"),
    ],
)
def test_what_is_not_supported_is_named(
    section: str, field: str, value: Any, error: type[Exception], message: str
) -> None:
    config = bridge_stand_in.configuration(steps=1)
    setattr(getattr(config, section) if section else config, field, value)
    with pytest.raises(error, match=message):
        subject.attach(config)


def test_a_bridge_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = bridge_stand_in.configuration(steps=1)
    monkeypatch.setattr(bridge_stand_in.DefaultCheckpointManager, "load", lambda self, path: (0, 0))
    with pytest.raises(IncompatibleVersion, match=r"DefaultCheckpointManager\.load takes \(path\)"):
        subject.attach(config)
    del config.checkpoint.custom_manager_class
    with pytest.raises(IncompatibleVersion, match=r"no checkpoint\.custom_manager_class \(0\.3\.1 does not\)"):
        subject.attach(config)


def test_another_layout_and_another_model_are_refused(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(1)
    saved = megatron_core.Sharded(*_parts(train(tmp_path))).state_dict()
    trainer = train(tmp_path, steps=0)
    part = megatron_core.Sharded(*_parts(trainer))
    with pytest.raises(InvalidSpec, match=r"parallel sizes: .*'dp': 1.*'dp': 2"):
        part.load_state_dict({**saved, "layout": {**saved["layout"], "dp": 2}})
    name = next(iter(saved["tensors"]))
    with pytest.raises(InvalidSpec, match="the model that was saved, which has none"):
        part.load_state_dict(
            {**saved, "tensors": {key: value for key, value in saved["tensors"].items() if key != name}}
        )
    with pytest.raises(InvalidSpec, match="as in the checkpoint"):
        part.load_state_dict({**saved, "tensors": {**saved["tensors"], name: torch.zeros(3)}})


def _parts(trainer: Any) -> tuple[Any, Any]:
    return trainer.model, trainer.optimizer
