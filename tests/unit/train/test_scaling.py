"""Learning-rate scaling: whatever the history of resizes, a step uses base × factor, and the base is never changed."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from holdfast.domain.errors import InvalidSpec
from holdfast.train import scaling

PER_REPLICA = 10
REFERENCE = 30
STEPS = 5  # per life

Scheduler = Any  # LRScheduler and ReduceLROnPlateau have no common base
MakeScheduler = Callable[[torch.optim.Optimizer], Scheduler]

SCHEDULERS: dict[str, MakeScheduler] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=17, eta_min=1e-4),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.93),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=20),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, T_max=13)],
        milestones=[4],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7),
}
OPTIMIZERS: dict[str, Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def weight(value: float = 1.0) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.full((3,), value))
    parameter.grad = torch.ones(3)
    return parameter


class Life:
    """One process: built anew, restored from the state of the one before."""

    def __init__(self, dp: int | None, optimizer: str, scheduler: str, saved: dict[str, Any] | None) -> None:
        self.weight = weight()
        self.optimizer = OPTIMIZERS[optimizer]([self.weight])
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        batch = REFERENCE if dp is None else PER_REPLICA * dp
        self.rate = None if dp is None else scaling.linear(self.optimizer, batch=batch, reference_batch=REFERENCE)
        if saved is not None:
            self.weight.data.copy_(saved["weight"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.scheduler.load_state_dict(saved["scheduler"])

    def train(self, steps: int = STEPS) -> list[float]:
        """The learning rates that were used, unscaled ones if there is no scaling."""
        used = []
        for _ in range(steps):
            used.append(self.rate.rates[0] if self.rate else self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(1.0)
            else:
                self.scheduler.step()
        return used

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "weight": self.weight.data,
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
            }
        )


def lives(optimizer: str, scheduler: str, sizes: Sequence[int | None]) -> tuple[list[list[float]], dict[str, Any]]:
    saved: dict[str, Any] | None = None
    used = []
    for dp in sizes:
        life = Life(dp, optimizer, scheduler, saved)
        used.append(life.train())
        saved = life.state()
    assert saved is not None
    return used, saved


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_replicas_two_and_three_again_have_the_rates_of_an_undisturbed_run(
    optimizer: str, scheduler: str
) -> None:
    """Bit for bit: 2/3 is no binary fraction, so that anything multiplied and divided again would show."""
    base, unscaled = lives(optimizer, scheduler, [None, None, None, None])
    used, saved = lives(optimizer, scheduler, [3, 2, 2, 3])
    assert used[0] == base[0]
    assert used[1] == [rate * (2 / 3) for rate in base[1]]
    assert used[2] == [rate * (2 / 3) for rate in base[2]], "a restart without a resize applies nothing twice"
    assert used[3] == base[3]
    assert len({rate for life in used for rate in life}) > STEPS, "the schedule moved"
    assert saved["scheduler"] == unscaled["scheduler"]
    assert saved["optimizer"]["param_groups"] == unscaled["optimizer"]["param_groups"]


def test_two_replicas_one_and_two_again_change_the_weights_as_the_rates_say() -> None:
    parameter = weight(1.0)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    for dp, expected in ((2, 0.5), (1, 0.25), (2, -0.25)):
        rate = scaling.linear(optimizer, batch=8 * dp, reference_batch=16)
        assert rate.rates == (0.5 * dp / 2,)
        optimizer.step()
        assert parameter.tolist() == [expected] * 3
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_every_group_is_scaled_and_a_group_that_is_added_later() -> None:
    first, second, third = weight(), weight(), weight()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.4}, {"params": [second], "lr": 0.2}], lr=1.0)
    rate = scaling.square_root(optimizer, batch=9, reference_batch=36)
    optimizer.add_param_group({"params": [third], "lr": 0.8})
    assert rate.factor == 0.5
    assert rate.rates == (0.2, 0.1, 0.4)
    optimizer.step()
    assert [each.tolist()[0] for each in (first, second, third)] == pytest.approx([0.8, 0.9, 0.6])


def test_a_rate_that_is_a_tensor_is_scaled_and_stays_the_same_tensor() -> None:
    parameter = weight()
    own = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([parameter], lr=own, capturable=False, foreach=False)
    rate = scaling.linear(optimizer, batch=1, reference_batch=2)
    optimizer.step()
    assert rate.rates == (0.25,)
    assert optimizer.param_groups[0]["lr"] is own
    assert own.item() == 0.5
    assert 1 - parameter.tolist()[0] == pytest.approx(0.25 + 0.25 * 0.01, rel=1e-3), (
        "AdamW's first step is lr, and decay"
    )


def test_a_constant_global_batch_changes_nothing() -> None:
    assert scaling.linear_factor(36, 36) == scaling.square_root_factor(36, 36) == 1.0


@pytest.mark.parametrize(
    ("factor", "expected"), [(scaling.linear_factor, 2 / 3), (scaling.square_root_factor, math.sqrt(2 / 3))]
)
def test_factors(factor: Callable[[int, int], float], expected: float) -> None:
    assert factor(24, 36) == expected
    for batch, reference, name in ((0, 36, "batch"), (24, -1, "reference_batch")):
        with pytest.raises(InvalidSpec, match=f"^{name}: .* expected at least one sample"):
            factor(batch, reference)


def test_a_second_call_replaces_the_first_and_remove_ends_it() -> None:
    parameter = weight(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaling.linear(optimizer, batch=1, reference_batch=2)
    rate = scaling.linear(optimizer, batch=1, reference_batch=4)
    optimizer.step()
    assert parameter.tolist() == [0.75] * 3
    rate.remove()
    rate.remove()
    optimizer.step()
    assert parameter.tolist() == [-0.25] * 3


class Fails(torch.optim.SGD):
    """Raises in its first step, when the learning rate is the scaled one."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise RuntimeError("out of memory")
        super().step(closure)


def test_a_step_that_raised_leaves_the_unscaled_rate() -> None:
    parameter = weight(1.0)
    optimizer = Fails([parameter], lr=1.0)
    rate = scaling.linear(optimizer, batch=1, reference_batch=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert rate.rates == (0.5,)
    optimizer.step()
    assert parameter.tolist() == [0.5] * 3


class Decays(torch.optim.SGD):
    """Calls the step of its base class, which torch wraps in hooks of its own, and uses the learning rate after that."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["params"][0].data.sub_(group["lr"])


def test_the_whole_step_of_a_derived_optimizer_is_scaled() -> None:
    parameter = weight(1.0)
    optimizer = Decays([parameter], lr=0.5)
    scaling.linear(optimizer, batch=1, reference_batch=2)
    lr_scheduler.ExponentialLR(optimizer, 1.0)
    optimizer.step()
    assert parameter.tolist() == [0.5] * 3


def test_what_asks_for_the_arguments_of_step_gets_those_of_the_optimizer() -> None:
    """torch's GradScaler looks for `grad_scaler` among them."""
    optimizer = torch.optim.SGD([weight()], lr=1.0)
    expected = list(inspect.signature(optimizer.step).parameters)
    scaling.linear(optimizer, batch=1, reference_batch=2)
    assert list(inspect.signature(optimizer.step).parameters) == expected == ["closure"]
    lr_scheduler.ExponentialLR(optimizer, 1.0)
    scaling.linear(optimizer, batch=1, reference_batch=4)
    assert list(inspect.signature(optimizer.step).parameters) == expected


def test_a_closure_and_its_loss_pass() -> None:
    parameter = weight(1.0)
    optimizer = torch.optim.LBFGS([parameter], lr=1.0, max_iter=1)
    scaling.linear(optimizer, batch=1, reference_batch=2)

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum() / 2
        torch.autograd.backward(loss)
        return loss.item()

    step: Callable[..., Any] = optimizer.step
    assert step(closure) == 1.5
    assert parameter.tolist() == pytest.approx([1 - 0.5 / 3] * 3), "LBFGS's first step is min(1, 1 / |g|₁) · lr"


class Adapts(torch.optim.SGD):
    """Sets its own learning rate in every step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5


def test_an_optimizer_that_sets_its_own_rate_is_refused() -> None:
    optimizer = Adapts([weight()], lr=1.0)
    scaling.linear(optimizer, batch=1, reference_batch=2)
    with pytest.raises(InvalidSpec, match=r"does not set its learning rate in step\(\)"):
        optimizer.step()


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"optimizer: 'list' is not valid; expected a torch\.optim\.Optimizer"):
        scaling.linear([], batch=1, reference_batch=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidSpec, match="factor: inf"):
        scaling.ScaledRate(torch.optim.SGD([weight()], lr=1.0), math.inf)
