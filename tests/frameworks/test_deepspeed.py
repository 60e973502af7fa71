"""DeepSpeed's integration in one process: training is ended after chosen steps, and the rest must be equal."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from restarted_runs import Killed, starting
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast.train as hf
from holdfast.domain.errors import Conflict, IncompatibleVersion, InvalidSpec
from holdfast.integrations import deepspeed as subject
from holdfast.integrations.deepspeed_state import Partitioned

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


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        deepspeed.init_distributed("gloo")
        yield
    dist.destroy_process_group()


@pytest.fixture
def start_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., hf.Run]:
    return starting(tmp_path, monkeypatch, dp=1)


def engine_of(**configuration: Any) -> Any:
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 40}},
            **configuration,
        },
    )
    return engine


def train(seen: list[str], **configuration: Any) -> str:
    engine = engine_of(**configuration)
    dtype = next(engine.module.parameters()).dtype
    loader = DataLoader(Samples(), BATCH, shuffle=True)
    run = subject.attach(engine)
    for epoch in range(run.epoch, EPOCHS):
        for batch in run.batches(loader):
            drawn = torch.rand(1).item()
            scale = getattr(engine.optimizer, "cur_scale", 1.0)
            counted = f"{engine.micro_steps} {engine.skipped_steps} {scale}"
            seen.append(f"{epoch} {batch.sum().item():.4f} {drawn:.4f} {engine.get_lr()[0]:.6f} {counted}")

            engine.backward(engine(batch.to(dtype)).square().mean())
            engine.step()
    run.run.finish()
    parameters = [each.detach().float().numpy().tobytes() for each in engine.module.parameters()]
    return hashlib.sha256(b"".join(parameters)).hexdigest()


BF16 = {"bf16": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0},
    "stage 1 in bf16": {"zero_optimization": {"stage": 1}, **BF16},
    "stage 2 in bf16": {"zero_optimization": {"stage": 2}, **BF16},
    "stage 2 in fp16": {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1},
    },
    "accumulated": {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_a_loop_that_is_killed_after_any_step_ends_as_one_that_was_not(
    case: str, tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch computes in fp16 on every CPU; DeepSpeed admits it only where that is fast.
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
    calm: list[str] = []
    run = start_run(1)
    expected = train(calm, **CASES[case])
    micro = CASES[case].get("gradient_accumulation_steps", 1)
    skipped = calm[-1].split()[-2] != "0"
    assert skipped == ("fp16" in case), "a loss scale that was too large"
    steps = run.steps_finished
    assert steps == 7 * EPOCHS // micro  # batches of an epoch: 7; a step goes across the end of an epoch
    for killed_after in sorted({1, 2, 6, 7, steps} if micro == 1 else {1, 2, 3, steps}):  # 7 ends an epoch
        for image in (tmp_path / "images").glob("*"):
            image.unlink()
        seen: list[str] = []
        start_run(1, kill_after=killed_after)
        with pytest.raises(Killed):
            train(seen, **CASES[case])
        assert len(seen) == killed_after * micro
        run = start_run(2)
        assert run.restore_step == killed_after
        digest = train(seen, **CASES[case])
        assert seen == calm, f"killed after {killed_after}"
        assert digest == expected, f"killed after {killed_after}"
        assert run.steps_finished == steps


def test_a_step_reports_the_loss_of_its_micro_batches_and_the_gradient_norm(
    start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(1)
    reported: list[dict[str, Any]] = []
    end = run.end_step

    def noted(**values: Any) -> None:
        reported.append(values)
        end(**values)

    monkeypatch.setattr(run, "end_step", noted)
    engine = engine_of(zero_optimization={"stage": 1}, gradient_accumulation_steps=2)
    subject.attach(engine)
    losses = []
    for _ in range(2):
        assert not reported
        loss = engine(torch.ones(BATCH, 4)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert len(reported) == 1
    assert float(reported[0]["loss"]) == pytest.approx(sum(losses) / 2)
    assert float(reported[0]["grad_norm"]) == pytest.approx(float(engine.get_global_grad_norm()))
    assert reported[0]["grad_norm"] > 0


def test_the_state_of_the_loss_scaler_is_restored() -> None:
    engine = engine_of(zero_optimization={"stage": 1})
    held = Partitioned(engine.optimizer, 1)
    engine.optimizer.loss_scaler.cur_scale = 7.0
    saved = held.state_dict()
    engine.optimizer.loss_scaler.cur_scale = 1.0
    held.load_state_dict(saved)
    assert engine.optimizer.loss_scaler.cur_scale == 7.0


def test_the_engines_own_files_are_left_to_it(
    tmp_path: Path, start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(1)
    engine = engine_of(zero_optimization={"stage": 1})
    run = subject.attach(engine)
    phases: list[str] = []
    phase = run.run.phase

    def noted(name: Any) -> Any:
        phases.append(str(name))
        return phase(name)

    monkeypatch.setattr(run.run, "phase", noted)
    engine.save_checkpoint(str(tmp_path / "own"), tag="t")
    assert (tmp_path / "own" / "latest").read_text() == "t"
    assert phases == ["checkpoint"]
    with pytest.raises(Conflict, match="before attach"):
        engine.load_checkpoint(str(tmp_path / "own"))


def test_a_checkpoint_of_another_run_shape_is_refused(start_run: Callable[..., hf.Run]) -> None:
    start_run(1, kill_after=2)
    with pytest.raises(Killed):
        train([], zero_optimization={"stage": 1})
    start_run(2)
    with pytest.raises(InvalidSpec, match="optimizer: made_by: 'DeepSpeedZeroOptimizer of stage 2'"):
        train([], zero_optimization={"stage": 2})
    start_run(2, dp=3)
    with pytest.raises(InvalidSpec, match="3"):
        train([], zero_optimization={"stage": 1})


REFUSED: dict[str, dict[str, Any]] = {
    "zero_optimization.stage: 3": {"zero_optimization": {"stage": 3}},
    "optimizer: .*FP16_UnfusedOptimizer": BF16,
    "zero_optimization.elastic_checkpoint: True": {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_supported_is_named(message: str, start_run: Callable[..., hf.Run]) -> None:
    start_run(1)
    engine = engine_of(**REFUSED[message])
    with pytest.raises(InvalidSpec, match=message):
        subject.attach(engine)


def test_a_deepspeed_that_differs_is_named(start_run: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    start_run(1)
    engine = engine_of()
    engine._config._param_dict["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
    with pytest.raises(InvalidSpec, match=r"zero_optimization\.offload_optimizer"):
        subject.attach(engine)
    engine._config._param_dict["data_efficiency"] = {"enabled": True}
    with pytest.raises(InvalidSpec, match="data_efficiency"):
        subject.attach(engine)
    engine._config._param_dict["data_efficiency"] = {"enabled": False}
    engine._config._param_dict["zero_optimization"] = {"offload_optimizer": {"device": "none"}}
    subject.attach(engine)
    first, second = DataLoader(Samples()), DataLoader(Samples())
    run = subject.attach(engine)
    next(run.batches(first))
    with pytest.raises(Conflict, match="another loader"):
        next(run.batches(second))
    monkeypatch.setattr(subject, "HELD", ("_no_such",))
    with pytest.raises(IncompatibleVersion, match=r"DeepSpeedEngine\._no_such"):
        subject.attach(engine)
    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "step", lambda self: None)
    with pytest.raises(IncompatibleVersion, match=r"DeepSpeedEngine\.step"):
        subject.attach(engine)
