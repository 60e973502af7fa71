"""The content of a memory image as a state dict that shares the image's memory, for an asynchronous save by DCP."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.shards import Reader
from holdfast.train.saves import state
from holdfast.train.saves.tensors import over


class LentImage:
    """The content of an image as a state dict. The image is locked against the next save until all its tensors are deleted."""

    def __init__(self, image: Path) -> None:
        self._shard = Reader(image)
        self._left = 1  # users of the image: views that are alive, and `tree` while it runs
        self._lock = threading.Lock()

    def tree(self, live: Mapping[str, Any]) -> dict[str, Any]:
        leaves = state.leaves(live)

        def leaf(name: str, described: dict[str, Any] | None) -> torch.Tensor:
            spec, view = self._shard.spec(name), self._shard.view(name)
            with self._lock:
                self._left += 1
            weakref.finalize(view, self._returned)
            tensor = over(view, spec)
            if described is None:
                return tensor
            # As DCP's stager does: the local part is on the CPU, whatever the mesh's device is.
            return DTensor(tensor, leaves[name]._spec, requires_grad=False)  # type: ignore[no-untyped-call]

        try:
            tree, _ = state.disassemble(self._shard.extra, leaf)
        finally:
            self._returned()
        return tree

    def _returned(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._shard.close()
