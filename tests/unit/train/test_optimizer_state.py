"""Optimizers by the names of their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from holdfast.domain.errors import InvalidSpec
from holdfast.train.saves.state import apply, collect, disassemble


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return optimizer


def moments(state: dict[str, Any]) -> set[str]:
    return {name for name in collect(state).tensors if name.endswith("exp_avg")}


def restored(saved: dict[str, Any], live: dict[str, Any]) -> None:
    collected = collect(saved)
    apply(live, *disassemble(collected.extra, lambda name, _: collected.tensors[name].clone()))


def test_moments_are_called_as_torch_calls_them() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    ours = {name for name in collect({"model": model, "optim": optimizer}).tensors if name.startswith("optim.")}
    theirs: dict[str, Any] = get_optimizer_state_dict(model, optimizer)["state"]  # type: ignore[assignment]
    assert ours == {f"optim.state.{name}.{key}" for name, slots in theirs.items() for key in slots}


def test_parameters_of_several_modules_are_distinguished_by_their_paths() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = stepped(torch.optim.AdamW([*one.parameters(), *other.parameters()]))
    assert moments({"nets": {"one": one, "other": other}, "optim": optimizer}) == {
        f"optim.state.nets.{module}.{name}.exp_avg" for module in ("one", "other") for name in ("weight", "bias")
    }


def test_parameters_of_no_module_keep_their_numbers() -> None:
    optimizer = stepped(torch.optim.AdamW([torch.zeros(2, requires_grad=True)]))
    assert moments({"model": nn.Linear(1, 1), "optim": optimizer}) == {"optim.state.0.exp_avg"}


def test_an_optimizer_finds_its_moments_though_its_groups_come_in_another_order() -> None:
    def job(seed: int, reverse: bool) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 3)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
        return {"model": model, "optim": stepped(torch.optim.AdamW(groups[::-1] if reverse else groups))}

    saved, live = job(1, reverse=False), job(2, reverse=True)
    restored(saved, live)
    for name in ("weight", "bias"):
        mine, theirs = getattr(live["model"], name), getattr(saved["model"], name)
        assert torch.equal(live["optim"].state[mine]["exp_avg"], saved["optim"].state[theirs]["exp_avg"])
    assert [group["lr"] for group in live["optim"].param_groups] == [0.2, 0.1]


def test_parameters_that_are_grouped_otherwise_are_refused() -> None:
    model = nn.Linear(2, 3)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    saved = {"model": model, "optim": torch.optim.AdamW(groups)}
    for other in ([{"params": [model.weight, model.bias]}], [*groups, {"params": []}]):
        with pytest.raises(InvalidSpec, match=r"state\['optim'\].*group"):
            restored(saved, {"model": model, "optim": torch.optim.AdamW(other)})


def test_another_optimizers_parameters_are_named() -> None:
    small, large = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    saved = {"model": small, "optim": torch.optim.AdamW(small.parameters())}
    live = {"optim": torch.optim.AdamW(large.parameters()), "model": large}
    with pytest.raises(InvalidSpec, match=r"state\['optim'\]: .*lacks \['bias'\]"):
        restored({"optim": saved["optim"], "model": small}, live)


class Own(torch.optim.SGD):
    """Writes its state down in its own way."""

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.param_groups[0]["lr"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state_dict["rate"]


def test_an_optimizer_with_a_state_dict_of_its_own_is_left_alone() -> None:
    model = nn.Linear(1, 1)
    live: dict[str, Any] = {"model": model, "optim": Own(model.parameters(), lr=0.5)}
    restored({"model": model, "optim": Own(model.parameters(), lr=0.25)}, live)
    assert live["optim"].param_groups[0]["lr"] == 0.25
