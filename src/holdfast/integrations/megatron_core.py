"""Model chunks, optimizer and random numbers of Megatron-Core as parts of the state of a run.

Megatron-Core describes what it saves by a sharded state dict: a `ShardedTensor` is this rank's part of a tensor, a
`ShardedObject` a value, and the rest is common. `Sharded` saves what this rank has, by those names, without communication: the
distributed optimizer is asked for `dp_reshardable`, which are this rank's buckets as they lie in memory. Loading builds the
sharded state dict again, replaces each part by the saved one, and lets Megatron-Core do the rest, as its own loading does.

So a checkpoint is for the same layout: tensor, pipeline, context, expert and data parallel sizes. Another one is refused."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.utils import unwrap_model

from holdfast.domain.errors import InvalidSpec

METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}
BYTES = "holdfast: io.BytesIO"  # key of what stands for a buffer, which Transformer Engine has in its extra state


class Sharded:
    """This rank's part of model chunks and of their optimizer, which may be None.

    `state_dict` shares memory with them, so it is to be copied before the next step. Loading raises `InvalidSpec` if another
    layout saved, or if a part is missing or differs in shape or data type."""

    def __init__(self, model: Sequence[Any], optimizer: Any) -> None:
        self._model = list(model)
        self._optimizer = None if getattr(optimizer, "is_stub_optimizer", False) else optimizer

    def state_dict(self) -> dict[str, Any]:
        parts, common = save_preprocess(self._sharded(is_loading=False), validate_access_integrity=False)
        tensors: dict[str, torch.Tensor] = {}
        objects: dict[str, Any] = {}
        for part in nested_values(parts):
            if isinstance(part, ShardedTensor):
                tensors[_name(part)] = part.data
            else:
                objects[part.unique_key] = _plain(part.data)
        return {"layout": layout(), "tensors": tensors, "objects": objects, "common": _plain(common)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["layout"] != layout():
            raise InvalidSpec("parallel sizes", layout(), f"{state['layout']}, with which the checkpoint was saved")
        with torch.no_grad():
            wanted, not_saved, factories = load_preprocess(self._sharded(is_loading=True))
            wanted, _ = extract_sharded_base(wanted)
            loaded = merge(_live(state["common"]), not_saved)
            merge(loaded, dict_list_map_outplace(lambda part: _saved(part, state), wanted))
            loaded = apply_factory_merges(loaded, factories)
            for key, chunk in self._chunks():
                chunk.load_state_dict(loaded[key], strict=True)
            if self._optimizer is not None:
                self._optimizer.load_state_dict(loaded["optimizer"])
                self._set_steps()

    def _sharded(self, *, is_loading: bool) -> dict[str, Any]:
        self._allocate()
        metadata = {**METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in self._chunks()}
        if self._optimizer is not None:
            state["optimizer"] = self._optimizer.sharded_state_dict(dict(state), is_loading, metadata=metadata)
        return state

    def _allocate(self) -> None:
        """Give the optimizer the state of one that has made no step: without Transformer Engine or Apex, Megatron-Core cannot
        describe it before."""
        for each in _distributed(self._optimizer):
            inner = each.optimizer
            if inner.state:
                continue
            rates = [group["lr"] for group in inner.param_groups]
            for group in inner.param_groups:
                group["lr"] = 0.0  # no weight decay
            each._init_optimizer_states_with_dummy_values()
            for group, rate in zip(inner.param_groups, rates, strict=True):
                group["lr"] = rate
            for state in inner.state.values():
                if isinstance(step := state.get("step"), torch.Tensor):
                    step.zero_()

    def _set_steps(self) -> None:
        """Without Transformer Engine or Apex, Megatron-Core loads the step of torch's Adam into the groups, and leaves one
        tensor with the step before the loading as that of every parameter."""
        for each in _distributed(self._optimizer):
            for group in each.optimizer.param_groups:
                for parameter in group["params"]:
                    state = each.optimizer.state.get(parameter, {})
                    if isinstance(step := state.get("step"), torch.Tensor) and "step" in group:
                        state["step"] = torch.full_like(step, float(group["step"]))

    def _chunks(self) -> list[tuple[str, Any]]:
        chunks = unwrap_model(self._model)
        return [(f"model{index}" if len(chunks) > 1 else "model", chunk) for index, chunk in enumerate(chunks)]


class Tracker:
    """The generators of Megatron-Core's random number tracker: of tensor parallel regions, of experts, of data parallelism."""

    def state_dict(self) -> dict[str, Any]:
        states = tensor_parallel.get_cuda_rng_tracker().get_states()
        return {name: tensor_parallel.convert_cuda_rng_state(state).clone() for name, state in states.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        tracker = tensor_parallel.get_cuda_rng_tracker()
        graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
        tracker.set_states(
            {name: tensor_parallel.convert_cuda_rng_state(each.clone(), graphable) for name, each in state.items()}
        )


def _distributed(optimizer: Any) -> list[Any]:
    """Return the distributed optimizers of torch's or others' optimizers; of chained ones, each."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each for each in every if hasattr(each, "_init_optimizer_states_with_dummy_values")]


def layout() -> dict[str, int]:
    """Return the sizes of this run's parallel groups."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }


def _name(part: ShardedTensor) -> str:
    return f"{part.key} at {','.join(map(str, part.global_offset))}"


def _saved(part: Any, state: Mapping[str, Any]) -> Any:
    """Return what was saved of this part."""
    if isinstance(part, ShardedObject):
        if part.unique_key not in state["objects"]:
            raise InvalidSpec("model", f"an object {part.key}", "the model that was saved, which has none")
        return _live(state["objects"][part.unique_key])
    saved = state["tensors"].get(_name(part))
    if saved is None:
        raise InvalidSpec("model", f"a tensor {_name(part)}", "the model that was saved, which has none")
    if tuple(saved.shape) != tuple(part.local_shape) or saved.dtype != part.dtype:
        raise InvalidSpec(
            _name(part),
            f"{part.dtype} {tuple(part.local_shape)}",
            f"{saved.dtype} {tuple(saved.shape)}, as in the checkpoint",
        )
    return saved


def _plain(value: Any) -> Any:
    """Replace buffers by what a state may contain."""
    if isinstance(value, io.BytesIO):
        return {BYTES: value.getvalue()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _live(value: Any) -> Any:
    """The inverse of `_plain`. Copies containers, because Megatron-Core changes them."""
    if isinstance(value, dict):
        return io.BytesIO(value[BYTES]) if BYTES in value else {key: _live(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_live(item) for item in value)
    return value
