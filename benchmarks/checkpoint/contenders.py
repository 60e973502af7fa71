"""The ways to save, one class each. They run in the process of a trial.

A contender is created once per trial, saves a few times and loads once. A save is "durable" at the strongest guarantee that
each contender gives: on the local disk and fsynced, with all files that are needed to load it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported without `__all__`
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from benchmarks.checkpoint.pages import PAGE, populate
from benchmarks.checkpoint.training import State


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the last save, in time.monotonic. `settled_at`: end of all background work."""

    durable_at: float | None = None
    settled_at: float | None = None

    @classmethod
    def at(cls, moment: float) -> Progress:
        return cls(moment, moment)


class Contender(Protocol):
    warm_saves: int  # saves until the duration is stable

    def step(self, number: int) -> AbstractContextManager[object]:
        """Context of each training step."""

    def poll(self) -> object:
        """Called after each training step, as a training loop would check its saves."""

    def tidy(self) -> None:
        """Delete the files of the previous save. Called before a counted save, and not timed."""

    def save(self, step: int) -> None:
        """Save. Returns when training may continue."""

    def progress(self) -> Progress: ...

    def load(self) -> float | None:
        """Load the last save into the state. Returns the seconds that this took; None if another process does it."""

    def close(self) -> None:
        """End all background work."""


class Sequential:
    """Base of most contenders, which need no action between steps."""

    warm_saves = 1

    def __init__(self, state: State, directory: Path) -> None:
        self._state = state
        self._directory = directory
        self._progress = Progress()

    def step(self, number: int) -> AbstractContextManager[object]:
        return nullcontext(number)

    def poll(self) -> object:
        return None

    def tidy(self) -> None:
        """Does nothing, because there are no files to delete."""

    def progress(self) -> Progress:
        return self._progress

    def close(self) -> None:
        """Does nothing, because no background work is running."""


class Copy(Sequential):
    """Not a checkpoint, but the limit of all of them: the same bytes, copied into warm mapped memory and back."""

    def __init__(self, state: State, directory: Path, memory: Path) -> None:
        super().__init__(state, directory)
        offsets, end = _offsets(state.tensors)
        with tempfile.TemporaryFile(dir=memory) as file:
            os.posix_fallocate(file.fileno(), 0, end)
            self._map = mmap.mmap(file.fileno(), end)
        populate(self._map)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._places = [
            whole[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, state.tensors, strict=True)
        ]

    def save(self, step: int) -> None:
        for place, tensor in zip(self._places, self._state.tensors, strict=True):
            place.copy_(tensor)
        self._progress = Progress.at(time.monotonic())

    def load(self) -> float:
        return timed(self._copy_back)

    def _copy_back(self) -> None:
        for place, tensor in zip(self._places, self._state.tensors, strict=True):
            tensor.copy_(place)


class TorchSave(Sequential):
    """`torch.save`, fsync, rename. Training waits until the end."""

    def save(self, step: int) -> None:
        part = self._directory / "state.part"
        with part.open("wb") as file:
            torch.save(self._state.tree, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._directory / "state.pt")
        self._progress = Progress.at(time.monotonic())

    def load(self) -> float:
        return timed(lambda: copy_tree(torch.load(self._directory / "state.pt"), self._state.tree))


class DcpAsync(Sequential):
    """`dcp.async_save`. The writer's defaults: one thread, fsync of every file."""

    def __init__(self, state: State, directory: Path, **options: Any) -> None:
        super().__init__(state, directory)
        self._options = options
        self._newest: Path | None = None

    def tidy(self) -> None:
        if self._newest is not None:
            shutil.rmtree(self._newest)

    def save(self, step: int) -> None:
        self._newest = self._directory / f"step-{step}"
        self._progress = Progress()
        saved = async_save(self._state.tree, checkpoint_id=self._newest, **self._options)
        _future_of(saved).add_done_callback(self._saved)

    def _saved(self, future: Future[Any]) -> None:
        future.result()
        self._progress = Progress.at(time.monotonic())

    def load(self) -> float:
        return timed(lambda: load(self._state.tree, checkpoint_id=self._newest))


def dcp_async(state: State, directory: Path) -> Contender:
    """The documented use: a new staging buffer for each save."""
    return DcpAsync(state, directory)


def dcp_async_cached(state: State, directory: Path) -> Contender:
    """With a stager that keeps its buffers. Pinning is disabled, because the stager rejects it without an accelerator."""
    return DcpAsync(state, directory, async_stager=DefaultStager(StagingOptions(False, False, False, False)))


def dcp_async_process(state: State, directory: Path) -> Contender:
    """In a separate process, through persistent staging buffers in shared memory."""
    return DcpAsync(
        state,
        directory,
        async_stager=DefaultStager(StagingOptions(False, True, False, False)),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )


def alone() -> None:
    """Create a process group of one rank, as for every contender."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copy_tree(source: Any, target: Any) -> None:
    """Copy every tensor of a nested dict to its counterpart in another."""
    for key, value in target.items():
        if isinstance(value, torch.Tensor):
            value.copy_(source[key])
        else:
            copy_tree(source[key], value)


def _future_of(saved: Any) -> Future[Any]:
    future: Future[Any] = getattr(saved, "upload_completion", saved)
    return future


def _offsets(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // 64) * 64
    return offsets, -(-end // PAGE) * PAGE
