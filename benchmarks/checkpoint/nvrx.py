"""nvidia-resiliency-ext's local checkpoint manager, on host tensors.

The manager is made for CUDA: it waits for the device and copies tensors by `.to("cpu")`, which does not copy a host tensor, so
that training would change the bytes that are being written. Here a clone replaces the copy from the device, and waiting for the
device does nothing. The measured stall is therefore not that on a GPU, but durable time, slow-down and memory are valid. The
manager never calls fsync, so "durable" means renamed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict, dict_list_map_inplace
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

from benchmarks.checkpoint.contenders import Progress, Sequential, copy_tree, timed
from benchmarks.checkpoint.training import State


class HostStateDict(BasicTensorAwareStateDict):  # type: ignore[misc]  # untyped
    """The library's state dict for tensors that are on the host already."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        dict_list_map_inplace(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, self.state_dict)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Does nothing, because the tensors are on the host."""


class NvrxLocal(Sequential):
    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        torch.cuda.synchronize = lambda *_: None
        self._manager = LocalCheckpointManager(directory)
        self._queue = AsyncCallsQueue()

    def save(self, step: int) -> None:
        self._progress = Progress()
        request = self._manager.save(HostStateDict(_containers(self._state.tree)), step, is_async=True)
        self._queue.schedule_async_request(request)

    def poll(self) -> object:
        if self._progress.durable_at is None and self._queue.maybe_finalize_async_calls(no_dist=True):
            self._progress = Progress.at(time.monotonic())
        return None

    def load(self) -> float:
        def load() -> None:
            self._manager.find_latest()
            loaded, _ = self._manager.load()
            copy_tree(loaded.state_dict, self._state.tree)

        return timed(load)

    def close(self) -> None:
        self._queue.close()


def _containers(tree: Any) -> Any:
    """Return new dicts with the same tensors, because the library replaces values in place."""
    return {key: _containers(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
