"""Converts an optimizer's state from parameter numbers to parameter names.

`Optimizer.state_dict` numbers the parameters. A name identifies the tensor of the model that a moment belongs to, so the
moment can be sharded like that parameter, and has the key that
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` would give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from holdfast.domain.errors import InvalidSpec


class ParameterNames:
    """Names of all parameters of the modules in a state."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._modules = dict(_modules(state, ""))

    def of(self, optimizer: torch.optim.Optimizer) -> list[str] | None:
        """Return a name for each of the optimizer's parameters: the name in the one module that has all of them, otherwise the
        name prefixed with the module's path. None if a parameter is in no module of the state, or if a name occurs twice.
        """
        parameters = parameters_of(optimizer)
        everywhere: dict[int, str] = {}
        for path, module in self._modules.items():
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            if all(id(parameter) in names for parameter in parameters):
                return [names[id(parameter)] for parameter in parameters]
            for key, name in names.items():
                everywhere.setdefault(key, f"{path}.{name}")
        named = [everywhere.get(id(parameter), "") for parameter in parameters]
        return named if all(named) and len(set(named)) == len(named) else None


def _modules(value: Any, path: str) -> list[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        return [(path, value)]
    if type(value) is dict:
        return [found for key, item in value.items() for found in _modules(item, f"{path}.{key}" if path else str(key))]
    return []


def outside_modules(value: Any, modules: Mapping[str, Any], path: str = "") -> list[tuple[str, list[torch.Tensor]]]:
    """Return the path of each optimizer in `value` that has parameters of none of the modules in `modules`, with these
    parameters. `modules`: the whole state."""
    if is_plain(value):
        known = {id(parameter) for _, module in _modules(modules, "") for parameter in module.parameters()}
        outside = [parameter for parameter in parameters_of(value) if id(parameter) not in known]
        return [(path, outside)] if outside else []
    if type(value) is dict:
        below = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
        return [found for inner, item in below for found in outside_modules(item, modules, inner)]
    return []


def are_in(parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each parameter has its memory, or else a copy of its values, among `tensors`."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def is_in(parameter: torch.Tensor) -> bool:
        if parameter.untyped_storage().data_ptr() in memory:
            return True
        alike = [each for each in tensors if (each.shape, each.dtype) == (parameter.shape, parameter.dtype)]
        return any(torch.equal(each.detach().cpu(), parameter.detach().cpu()) for each in alike)

    return all(map(is_in, parameters))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_plain(value: object) -> TypeGuard[torch.optim.Optimizer]:
    """Whether the state of this object uses torch's numbering. A subclass that overrides state_dict is left unchanged."""
    return (
        isinstance(value, torch.optim.Optimizer)
        and type(value).state_dict is torch.optim.Optimizer.state_dict
        and type(value).load_state_dict is torch.optim.Optimizer.load_state_dict
    )


def to_names(numbered: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]]
    keys = dict(enumerate(names))
    return {**numbered, "state": _renamed(numbered["state"], keys), "param_groups": groups}


def to_numbers(
    named: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Sequence[str | int], path: str
) -> dict[str, Any]:
    """Return the saved state in the form that `optimizer.load_state_dict` expects: groups in this optimizer's order,
    with its numbers.

    If parameters have no names, `names` are the numbers. Raises InvalidSpec if the checkpoint has other parameters or groups
    them differently.
    """
    saved: dict[str | int, Mapping[str, Any]] = {
        name: group for group in named["param_groups"] for name in group["params"]
    }
    if saved.keys() != set(names):
        missing, unknown = sorted(set(names) - saved.keys(), key=str), sorted(saved.keys() - set(names), key=str)
        raise InvalidSpec(
            path,
            f"an optimizer of {len(names)} parameters",
            f"those of the checkpoint: it lacks {missing[:3]} and has additionally {unknown[:3]}",
        )
    groups: list[dict[str, Any]] = []
    first = 0
    for position, group in enumerate(optimizer.param_groups):
        mine = names[first : first + len(group["params"])]
        same = saved[mine[0]] if mine else _at(named["param_groups"], position)
        if set(same["params"]) != set(mine):
            raise InvalidSpec(path, f"a group of {list(mine[:3])} …", f"the checkpoint's, {list(same['params'][:3])} …")
        groups.append({**same, "params": list(range(first, first + len(mine)))})
        first += len(mine)
    if len(groups) != len(named["param_groups"]):
        raise InvalidSpec(path, f"{len(groups)} parameter groups", f"the checkpoint's {len(named['param_groups'])}")
    numbers = {name: number for number, name in enumerate(names)}
    return {**named, "state": _renamed(named["state"], numbers), "param_groups": groups}


def _renamed(state: Mapping[Any, Any], keys: Mapping[Any, Any]) -> dict[Any, Any]:
    return {keys.get(key, key): value for key, value in state.items()}


def _at(groups: Sequence[Mapping[str, Any]], position: int) -> Mapping[str, Any]:
    """Return the saved group that replaces an empty one."""
    return groups[position] if position < len(groups) else {"params": ()}
