"""The parts of a DeepSpeed engine that are not saved as they are: its counters, and the optimizers of ZeRO stage 1 and 2.

DeepSpeed's `state_dict` of such an optimizer holds objects of its own classes: the loss scaler, and where each parameter's
piece is in the flat partition. `Partitioned` saves the values of the first, and leaves out the second, which follows from
the model and the number of ranks. Loading gives DeepSpeed its own form again, and lets it do the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from holdfast.domain.errors import InvalidSpec

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
LOSS_SCALER, DERIVED = "loss_scaler", "param_slice_mappings"
_PLAIN = (type(None), bool, int, float, str)


class Counters:
    """The counters of an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._engine, name) for name in COUNTERS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in COUNTERS:
            setattr(self._engine, name, state[name])


class Partitioned:
    """This rank's partition of a ZeRO optimizer, as part of the state of a run.

    `ranks`: number of ranks of the run. Loading raises `InvalidSpec` if another number saved, or if the optimizer is of
    another class or ZeRO stage."""

    def __init__(self, optimizer: Any, ranks: int) -> None:
        self._optimizer = optimizer
        self._ranks = ranks

    def state_dict(self) -> dict[str, Any]:
        state = dict(self._optimizer.state_dict())
        state.pop(DERIVED, None)
        scaler = state.pop(LOSS_SCALER, None)
        if "zero_stage" in state:
            state["zero_stage"] = int(state["zero_stage"])
        return {"made_by": self._made_by(), "ranks": self._ranks, "loss_scaler": _plain(scaler), "partition": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, here in (("ranks", self._ranks), ("made_by", self._made_by())):
            if state[name] != here:
                raise InvalidSpec(
                    f"optimizer: {name}",
                    here,
                    f"{state[name]!r}, with which the checkpoint was saved: it holds partitions",
                )
        partition = dict(state["partition"])
        scaler = getattr(self._optimizer, LOSS_SCALER, None)
        if scaler is not None:
            vars(scaler).update(state["loss_scaler"])
            partition[LOSS_SCALER] = scaler
        mine = dist.get_rank(group=self._optimizer.dp_process_group)
        # DeepSpeed reads the entry of this rank only, because the partitions are not elastic ones.
        self._optimizer._load_legacy_checkpoint([*[None] * mine, partition], True, True)

    def _made_by(self) -> str:
        stage = 2 if getattr(self._optimizer, "partition_gradients", False) else 1
        return f"{type(self._optimizer).__name__} of stage {stage}"


def _plain(scaler: Any) -> dict[str, Any]:
    """Return the values of a loss scaler; its configuration, such as its data type, is the script's."""
    return {} if scaler is None else {name: value for name, value in vars(scaler).items() if type(value) in _PLAIN}
