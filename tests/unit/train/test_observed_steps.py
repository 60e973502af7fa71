"""Optimizer steps of a script that reports none: which blocks are reported, and what may not go wrong in a user's process."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported without `__all__`
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

from holdfast.domain import worker
from holdfast.domain.notes import ObservedStepsNote, parse
from holdfast.train.channels import Notes
from holdfast.train.observing import observed_steps
from holdfast.train.observing.ddp_waits import DDPWaits
from holdfast.train.observing.observed_steps import BLOCK_S, StepObserver


@dataclass
class Script:
    """Optimizer steps in virtual time, and what an agent hears of them."""

    path: Path
    now: float = 1000.0
    waited_s: float | None = 0.0
    failure: Exception | None = None
    reads: int = 0
    weights: list[nn.Parameter] = field(default_factory=lambda: [nn.Parameter(torch.zeros(1))])

    def __post_init__(self) -> None:
        self.agent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.agent.bind(str(self.path))
        self.agent.setblocking(False)
        self.heard: list[ObservedStepsNote] = []
        self.optimizer = torch.optim.SGD(self.weights, lr=0.1)
        notes = Notes(agent=str(self.path), replicator="", job="plain", generation=3, rank=1)
        self.observer = StepObserver(notes, self, clock=lambda: self.now)  # type: ignore[arg-type]

    def take(self, every: int) -> float | None:
        """As `DDPWaits` has it."""
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        return self.waited_s

    def step(self, duration_s: float, count: int = 1) -> None:
        for _ in range(count):
            self.now += duration_s
            self.optimizer.step()
            self.listen()

    def listen(self) -> None:
        while True:
            try:
                note = parse(self.agent.recv(65536))
            except BlockingIOError:
                return
            assert isinstance(note, ObservedStepsNote)
            self.heard.append(note)

    def close(self) -> None:
        self.observer.close()
        self.agent.close()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    begun = Script(tmp_path / "agent")
    yield begun
    begun.close()
    assert not _global_optimizer_pre_hooks, "no hook is left behind"


def test_a_long_step_is_a_block_of_its_own(script: Script) -> None:
    script.waited_s = 1.5
    script.step(4.0, 4)
    assert [(note.step, note.steps, note.ended_at - note.started_at, note.comm_wait_s) for note in script.heard] == [
        (1, 1, 4.0, 1.5),
        (2, 1, 4.0, 1.5),
        (3, 1, 4.0, 1.5),
    ]
    assert (script.heard[0].sender.job, script.heard[0].sender.generation, script.heard[0].sender.rank) == (
        "plain",
        3,
        1,
    )


@pytest.mark.parametrize("step_s", [0.0001, 0.003, 0.02, 0.11, 0.4, 0.9])
def test_blocks_take_a_fraction_of_a_second_and_end_at_multiples_of_their_length(script: Script, step_s: float) -> None:
    script.waited_s = step_s / 4
    script.step(step_s, int(30 / step_s) if step_s > 0.001 else 50_000)
    settled = script.heard[-4:]
    assert settled
    for note in settled:
        assert note.step % note.steps == 0
        assert note.steps.bit_count() == 1
        assert BLOCK_S[0] <= note.ended_at - note.started_at <= BLOCK_S[1]
        assert note.comm_wait_s == pytest.approx(note.steps * step_s / 4)


@pytest.mark.parametrize("step_s", [0.0001, 0.003, 0.019])
def test_waits_of_short_steps_are_read_fifty_times_a_second(script: Script, step_s: float) -> None:
    script.step(step_s, int(2 / step_s))
    before = script.reads
    script.step(step_s, int(2 / step_s))
    assert 40 <= script.reads - before <= 2 / observed_steps.READ_S + 5


def test_blocks_grow_shorter_when_steps_grow_longer(script: Script) -> None:
    script.step(0.01, 1000)
    script.step(0.5, 200)
    assert script.heard[-1].steps <= 2


def test_steps_are_counted_where_no_wait_can_be_measured(script: Script) -> None:
    """As in a script without DistributedDataParallel."""
    script.waited_s = None
    script.step(0.5, 100)
    assert [note.step for note in script.heard] == list(range(1, 100))
    assert all(math.isnan(note.comm_wait_s) and note.steps == 1 for note in script.heard)


def test_where_waits_are_measured_every_block_has_one(script: Script) -> None:
    script.step(0.5, 10)
    script.waited_s = None  # no backward pass was timed
    script.step(0.5, 7)
    script.waited_s = 0.25
    script.step(0.5)
    assert [note.steps for note in script.heard] == [1] * 9 + [8]
    assert not any(math.isnan(note.comm_wait_s) for note in script.heard)


def test_the_first_failure_ends_the_observation_and_not_the_training(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script.step(1.0, 3)
    script.failure = OSError("no more")
    script.weights[0].grad = torch.ones(1)
    script.step(1.0, 5)
    assert script.weights[0].item() == pytest.approx(-0.5)
    assert len(script.heard) == 2
    assert [record.message for record in caplog.records] == [
        "the steps of this script are no longer observed: OSError('no more')"
    ]


def test_a_clock_that_is_set_back_yields_no_block(script: Script) -> None:
    script.step(1.0, 3)
    script.step(-1000.0)
    script.step(1.0, 2)
    assert all(note.ended_at >= note.started_at for note in script.heard)
    assert len(script.heard) == 4


def test_a_process_that_the_script_has_forked_reports_nothing(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script.step(1.0, 2)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        script.step(1.0, 5)
    assert len(script.heard) == 1


def test_a_compiler_does_not_trace_the_hook(script: Script) -> None:
    def step(tensor: torch.Tensor) -> torch.Tensor:
        script.observer._stepping(None, (), {})
        return tensor + 1

    assert torch.compile(step, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 1
    assert script.reads == 0
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("environ", "observed"),
    [
        ({}, True),
        ({worker.ENV_OBSERVE_STEPS: "0"}, False),
        ({worker.ENV_OBSERVE_STEPS: "1"}, True),
        ({worker.ENV_JOB: ""}, False),
        ({worker.ENV_NOTES: ""}, False),
        ({"WORLD_SIZE": "1"}, True),
    ],
)
def test_what_is_observed(tmp_path: Path, environ: dict[str, str], observed: bool) -> None:
    known = {worker.ENV_NOTES: str(tmp_path / "agent"), worker.ENV_JOB: "plain", "WORLD_SIZE": "2", "RANK": "1"}
    observed_steps.observe({**known, **environ})
    assert bool(_global_optimizer_pre_hooks) is observed
    observed_steps.stand_down()
    assert not _global_optimizer_pre_hooks
    observed_steps.stand_down()


def test_a_script_with_a_run_is_observed_without_waits_until_its_first_step(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    waits = SimpleNamespace(close=lambda: closed.append("waits"))
    monkeypatch.setattr(observed_steps, "_running", (script.observer, waits))
    script.waited_s = 1.5
    script.step(4.0, 3)
    observed_steps.leave_waits()
    assert closed == ["waits"]
    script.waited_s = None  # as of waits that are closed
    script.step(4.0, 2)
    assert [math.isnan(note.comm_wait_s) for note in script.heard] == [False, False, True, True]
    monkeypatch.setattr(observed_steps, "_running", None)


# ---------------------------------------------------------------- DDP's own timers


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(4, 3)).sum().backward()


def test_ddp_says_how_long_it_waited_once_for_each_backward(group: None) -> None:
    waits = DDPWaits()
    model = DistributedDataParallel(nn.Linear(3, 2))
    assert waits.take() is None, "nothing has run"
    for _ in range(15):  # by default DDP times its first ten steps and each hundredth
        trained(model)
        first = waits.take()
        assert first is not None
        assert 0 <= first < 1
        assert waits.take() is None
    with model.no_sync():
        trained(model)
    assert waits.take() is None, "nothing was reduced"
    assert waits.take(on_cpu_only=True) is None
    trained(model)
    assert waits.take(on_cpu_only=True) is not None
    del model
    waits.close()


def test_ddp_times_one_in_so_many_steps_as_it_is_asked_to(group: None) -> None:
    waits = DDPWaits()
    model = DistributedDataParallel(nn.Linear(3, 2))
    trained(model, 11)
    found = 0
    for _ in range(40):
        trained(model)
        found += waits.take(4) is not None
    assert 9 <= found <= 11
    waits.rest()
    trained(model)
    assert waits._modules[0].every == 100
    waits.close()


def test_models_that_are_gone_or_cannot_be_read_are_left_out(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = DDPWaits()
    model, other = DistributedDataParallel(nn.Linear(3, 2)), DistributedDataParallel(nn.Linear(3, 2))
    trained(model)
    trained(other)
    assert waits.take() is not None
    del other
    monkeypatch.delattr(DistributedDataParallel, "_set_ddp_runtime_logging_sample_rate")
    late = DistributedDataParallel(nn.Linear(3, 2))
    trained(model)
    trained(late)
    assert waits.take() is not None
    assert len(waits._modules) == 1
    waits.close()
    trained(model)
    assert waits.take() is None
    DistributedDataParallel(nn.Linear(3, 2))
    assert waits._modules == [], "what is built after `close` is not followed"
