"""Saving and restoring one rank's state as a shard image (`holdfast.shards`).

A save is one copy of every tensor into shared memory; everything after that is the replicator's work. A restore reads
the file that the replicator has verified and named in the environment. A save that cannot happen (both images are being
read, no memory left) is skipped, counted and said: training goes on.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.domain.errors import IntegrityError, InvalidSpec
from holdfast.shards import Image, ImageSet, Plan, Reader, Skipped, Staged, TensorSpec
from holdfast.train import rng, state
from holdfast.train.channels import Notes
from holdfast.train.environment import Environment, RestoreTarget

log = logging.getLogger("holdfast.train")

# Room for the non-tensor part of the state to grow without a new image (a longer history, one more entry).
EXTRA_RESERVE_MIN = 64 * 1024


@dataclass(frozen=True, slots=True)
class Restored:
    step: int
    rank: int  # the rank that saved the shard; another one than ours after a resize


class Checkpointer:
    """One worker's saves and its one restore. `stall_s` sums the time that training has waited for saves."""

    def __init__(self, environment: Environment, device: torch.device, notes: Notes) -> None:
        self._environment = environment
        self._device = device
        self._notes = notes
        self._images: ImageSet | None = None
        self.stall_s = 0.0
        self.missed = 0

    @property
    def enabled(self) -> bool:
        return bool(self._environment.images)

    def save(self, live: Mapping[str, Any], step: int) -> bool:
        """Copy the state of `step` into an image; False when the save had to be skipped.

        Raises `InvalidSpec` when the state holds something that cannot be saved: a save that never works is the
        user's to fix, one that does not work now is not.
        """
        began = time.perf_counter()
        collected = state.collect(live, rng=rng.capture())
        outcome = self._stage(self._open_images(), collected, step)
        stall_s = time.perf_counter() - began
        self.stall_s += stall_s
        match outcome:
            case Staged():
                self._notes.saved(
                    step=step, attempt=self._environment.attempt, image=str(outcome.path), stall_s=stall_s
                )
                return True
            case Skipped():
                self.miss(step, outcome.reason)
                return False

    def miss(self, step: int, reason: str) -> None:
        """Say that a save that was due did not happen."""
        self.missed += 1
        log.warning("the save of step %d did not happen: %s", step, reason)
        self._notes.missed(step, reason)

    def _open_images(self) -> ImageSet:
        """Opened by the first save, not at the start: mapping what is there must not delay the first step of a restart."""
        if self._images is None:
            target = self._environment.restore
            self._images = ImageSet(
                Path(self._environment.images),
                restored=(target.attempt, target.step) if target else None,
                producer=f"torch {torch.__version__}",
            )
        return self._images

    def _stage(self, images: ImageSet, collected: state.Collected, step: int) -> Staged | Skipped:
        specs = tuple(
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), state.nbytes(tensor))
            for name, tensor in collected.tensors.items()
        )

        def fill(image: Image) -> None:
            for name, tensor in collected.tensors.items():
                if tensor.numel():
                    _as_tensor(image.view(name), tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return images.stage(
            Plan(specs, _reserve_for(len(collected.extra))),
            self._environment.attempt,
            step,
            self._environment.world.rank,
            self._environment.world.mesh,
            fill,
            collected.extra,
        )

    def restore(self, live: Mapping[str, Any], target: RestoreTarget) -> Restored:
        """Load the shard into the live objects and the random number generators.

        Raises `IntegrityError` when the file is not the shard that was promised, `InvalidSpec` when it does not fit
        `live`.
        """
        with Reader(Path(target.path)) as shard:
            key = shard.key
            if (key.step, key.attempt) != (target.step, target.attempt):
                raise IntegrityError(
                    f"{target.path} holds step {key.step} of attempt {key.attempt}, "
                    f"not step {target.step} of attempt {target.attempt}"
                )
            also = _load(shard, live)
        rank = self._environment.world.rank
        if key.rank == rank:
            rng.restore(also["rng"])
        else:
            rng.derive(also["rng"]["seed"], target.step, rank)
        return Restored(target.step, key.rank)


def _load(shard: Reader, live: Mapping[str, Any]) -> Mapping[str, Any]:
    """Everything into the live objects; returns the plain values saved beside the state."""
    specs = {spec.fqn: spec for spec in shard.tensors}
    lent: list[weakref.ref[memoryview]] = []

    def tensor(name: str) -> torch.Tensor:
        spec = specs[name]
        dtype = getattr(torch, spec.dtype)
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=dtype)
        view = shard.view(name)
        lent.append(weakref.ref(view))
        return _as_tensor(view, dtype, torch.Size(spec.shape))

    tree, also = state.disassemble(shard.extra, tensor)
    state.apply(live, tree)
    del tree
    _insist_returned(lent)
    return also


def _insist_returned(lent: list[weakref.ref[memoryview]]) -> None:
    """Make sure that nothing in the live state still lies in the shard: a later save would change it silently.

    A tensor made by `torch.frombuffer` keeps the view that it was made from alive, so a view that is gone has no tensor.
    """
    if any(view() is not None for view in lent):
        gc.collect()
    if any(view() is not None for view in lent):
        raise InvalidSpec(
            "state",
            "an object that kept a tensor of the checkpoint",
            "a load_state_dict that copies what it is given: the checkpoint's memory is used again",
        )


def _as_tensor(buffer: memoryview, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """A tensor over the shard's own memory: no copy."""
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)


def _reserve_for(extra_bytes: int) -> int:
    """A power of two with room to grow, so that the plan, and with it the image, stays the same from save to save."""
    reserve = EXTRA_RESERVE_MIN
    while reserve < 2 * extra_bytes:
        reserve *= 2
    return reserve
