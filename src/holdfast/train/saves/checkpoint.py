"""Saves and restores one rank's state as a shard in a memory image (`holdfast.shards`).

A save is one copy of every tensor into shared memory; the replicator does the rest. A restore reads the files that the
replicator has verified and named in the environment: this rank's own shard directly from the mapping or, after a change of the
sharding, the overlap of its pieces with all shards (`dcp_reader`). If a save is not possible (both images are being read, no
memory left), it is skipped, counted and logged, and training continues. A requested save first waits for an image, for a
bounded time."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import IntegrityError, InvalidSpec
from holdfast.shards import Image, ImageSet, Plan, Reader, Skipped, Staged
from holdfast.train.channels import Notes
from holdfast.train.environment import Environment, RestoreTarget
from holdfast.train.saves import optimizer_state, rng, state
from holdfast.train.saves.copying import copy_all
from holdfast.train.saves.ddp_buckets import DDPBuckets
from holdfast.train.saves.device_copies import CudaDriver, DeviceCopies
from holdfast.train.saves.outline import Outline
from holdfast.train.saves.sharded import Piece, is_loaded, is_sharded
from holdfast.train.saves.tensors import dtype_of, over, spec_of

log = logging.getLogger("holdfast.train")

# Room for the non-tensor part of the state to grow without a new image (a longer history, one more entry).
EXTRA_RESERVE_MIN = 64 * 1024

PREPARING_NICENESS = 10


@dataclass(frozen=True, slots=True)
class Restored:
    step: int
    rank: int  # the rank that saved the shard; after a resize it can differ from this rank


Load = Callable[[Sequence[Reader]], Mapping[str, Any]]


class Checkpointer:
    """One worker's saves and its one restore. `stall_s` sums the time that training has waited for saves."""

    def __init__(
        self, environment: Environment, device: torch.device, notes: Notes, buckets: DDPBuckets | None = None
    ) -> None:
        self._environment = environment
        self._buckets = buckets
        self._device = device
        self._notes = notes
        self._images: ImageSet | None = None
        self._preparing: threading.Thread | None = None
        self._targets: weakref.WeakKeyDictionary[Image, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        self._device_copies = DeviceCopies(CudaDriver(device)) if device.type == "cuda" else None
        self._outline: Outline | None = None  # of the state that the script gave to its restore
        self._warns_unsaved = True  # until the first save
        self.newest: Path | None = None  # image of the latest save
        self.stall_s = 0.0
        self.missed = 0

    @property
    def enabled(self) -> bool:
        return bool(self._environment.images)

    def save(self, live: Mapping[str, Any], step: int, *, wait_s: float = 0.0) -> bool:
        """Copy the state of `step` into an image. Returns False if the save was skipped. If both images are in use, wait for
        one for at most `wait_s`; for a requested save, which no later save replaces.

        Raises `InvalidSpec` if the state contains a value that can never be saved, or does not fit the state that was given to
        `restore` (`outline`), because only the user can fix that.
        A temporary failure skips the save.
        """
        began = time.perf_counter()
        collected = self._collect(live)
        self._finish_preparing()
        outcome = self._stage(self._open_images(), collected, step, wait_s)
        duration_s = time.perf_counter() - began
        self.stall_s += duration_s
        match outcome:
            case Staged():
                self.newest = outcome.path
                # the cost of a save; the automatic interval is computed from it
                stall_s = duration_s - outcome.waited_s
                self._notes.saved(
                    step=step, attempt=self._environment.attempt, image=str(outcome.path), stall_s=stall_s
                )
                return True
            case Skipped():
                self.miss(step, outcome.reason)
                return False

    def expect(self, live: Mapping[str, Any]) -> None:
        """The script restores into `live`, and nothing is loaded yet. A save must fit what the script builds at its start. Only
        the first call shows that, because only the first one loads."""
        self._outline = self._outline or Outline.of(live)

    def _collect(self, live: Mapping[str, Any]) -> state.Collected:
        if self._outline is not None:
            self._outline.require(live)
        also: dict[str, Any] = {"rng": rng.capture()}
        if self._buckets is not None:
            also["ddp_buckets"] = self._buckets.capture()
        collected = state.collect(live, **also)
        if self._warns_unsaved:
            self._warns_unsaved = False
            _warn_unsaved(live, collected)
        return collected

    def miss(self, step: int, reason: str) -> None:
        """Count, log and report a save that was due and has been skipped."""
        self.missed += 1
        log.warning("save of step %d skipped: %s", step, reason)
        self._notes.missed(step, reason)

    def prepare(self, live: Mapping[str, Any]) -> None:
        """Allocate both images in the background, once. In a save, the allocation would take ten times as long as the copy.

        Call this after the first step: only then does an optimizer have all its tensors, and the allocation does not delay the
        first step.
        """
        if self._preparing is not None or self._images is not None:
            return
        plan = _plan(self._collect(live))
        self._preparing = threading.Thread(target=self._prepare, args=(plan,), name="holdfast-images", daemon=True)
        self._preparing.start()

    def _prepare(self, plan: Plan) -> None:
        # On Linux this affects only this thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PREPARING_NICENESS)
        try:
            images = self._open_images()
            if reason := images.prepare(plan):
                log.warning("could not allocate both images: %s", reason)
            if (copies := self._device_copies) is not None:
                for image in images.images:
                    copies.adopt(image)
        except Exception:  # the first save fails in the same way and raises to its caller
            log.exception("allocating images failed")

    def _finish_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.join()

    def _open_images(self) -> ImageSet:
        """Open or create the images. Done after the first step, because mapping existing images would delay a restart."""
        if self._images is None:
            environment, target = self._environment, self._environment.restore
            self._images = ImageSet(
                Path(environment.images),
                restored=CheckpointId(target.attempt, target.step) if target else None,
                producer=f"torch {torch.__version__}",
                fallback=Path(environment.image_fallback_dir) if environment.image_fallback_dir else None,
            )
        return self._images

    def _stage(self, images: ImageSet, collected: state.Collected, step: int, wait_s: float) -> Staged | Skipped:
        plan = _plan(collected)

        def fill(image: Image) -> None:
            if image not in self._targets:
                self._targets[image] = [over(image.view(spec.fqn), spec) for spec in plan.tensors]
            sources = list(collected.tensors.values())
            if self._device_copies is not None:
                self._device_copies.copy(image, self._targets[image], sources)
            else:
                threads = self._environment.copy_threads if self._device.type == "cpu" else 1
                copy_all(self._targets[image], sources, threads)

        return images.stage(
            plan,
            self._environment.attempt,
            step,
            self._environment.world.rank,
            self._environment.world.mesh,
            fill,
            collected.extra,
            wait_s=wait_s,
        )

    def restore(self, live: Mapping[str, Any], target: RestoreTarget) -> Restored:
        """Load the shards into the live objects and the random number generators.

        Raises `IntegrityError` if a file is not the expected shard or if the shards do not cover the state, and
        `InvalidSpec` if the checkpoint does not fit `live`.
        """
        return self.restore_by(lambda parts: _load(parts, live), target)

    def restore_by(self, load: Load, target: RestoreTarget) -> Restored:
        """As `restore`, for a state that `load` fills from the open shards. `load` returns the plain values that were saved
        with the state (`state.disassemble`)."""
        with opened(target) as parts, _pages_ahead(parts[0]):
            also = load(parts)
            saved_by, mesh = parts[0].key.rank, parts[0].header.stamp.mesh
        rank = self._environment.world.rank
        if saved_by == self._environment.world.mesh.counterpart(rank, mesh):
            rng.restore(also["rng"])
        else:
            rng.derive(also["rng"]["seed"], target.step, rank)
        if self._buckets is not None:
            # On every rank, also on those whose shard another rank saved, because setting the order is collective.
            self._buckets.restored(also.get("ddp_buckets"))
        return Restored(target.step, saved_by)


@contextmanager
def opened(target: RestoreTarget) -> Iterator[list[Reader]]:
    """Lock and map the shards of a target; this rank's own comes first. Raises IntegrityError for a shard of another step."""
    with ExitStack() as stack:
        parts = [stack.enter_context(Reader(Path(path))) for path in target.parts]
        for part in parts:
            if (part.key.step, part.key.attempt) != (target.step, target.attempt):
                raise IntegrityError(
                    f"{part.path} holds step {part.key.step} of attempt {part.key.attempt}, "
                    f"not step {target.step} of attempt {target.attempt}"
                )
        yield parts


@contextmanager
def _pages_ahead(part: Reader) -> Iterator[None]:
    """Start a thread that causes the page faults of the new mapping before the copy, which take a third of its time. Only for
    the first part: of the others, a resize reads only the overlap."""
    ahead = threading.Thread(target=part.populate, name="holdfast-pages")
    ahead.start()
    try:
        yield
    finally:
        ahead.join()


def _warn_unsaved(live: Mapping[str, Any], collected: state.Collected) -> None:
    for path, parameters in optimizer_state.outside_modules(live, live):
        whole = [parameter for parameter in parameters if not is_sharded(parameter)]
        if not optimizer_state.are_in(whole, list(collected.tensors.values())):
            log.warning(
                "state: the optimizer %s trains parameters that are in no module or tensor of the state. They are not saved: a "
                "restart would continue with their initial values. Add the module that has them to the state",
                path,
            )


def _plan(collected: state.Collected) -> Plan:
    specs = tuple(spec_of(name, tensor, collected.pieces.get(name)) for name, tensor in collected.tensors.items())
    return Plan(specs, _reserve_for(len(collected.extra)))


def _load(parts: Sequence[Reader], live: Mapping[str, Any]) -> Mapping[str, Any]:
    """Load everything into the live objects. Returns the plain values that were saved with the state."""
    loading = _Loading(parts, live)
    tree, also = state.disassemble(parts[0].extra, loading.tensor)
    loading.fill_missing()
    state.apply(live, tree, also)
    del tree
    _insist_returned(loading.lent)
    return also


class _Loading:
    """Source of each restored tensor: the memory of the first part if it holds exactly this rank's piece, otherwise new
    memory that is filled from all parts."""

    def __init__(self, parts: Sequence[Reader], live: Mapping[str, Any]) -> None:
        self._parts = parts
        self._missing: dict[str, torch.Tensor] = {}
        self.lent: list[weakref.ref[memoryview]] = []
        spread = is_loaded() or any(spec.global_shape is not None for spec in parts[0].tensors)
        self._places = state.Places(live) if spread else None

    def tensor(self, name: str, described: dict[str, Any] | None) -> torch.Tensor:
        """Return this rank's tensor with that name, sharded as in this run."""
        own = self._parts[0]
        spec = own.spec(name)
        whole = spec.whole_shape
        place = None if self._places is None else self._places.of(name, whole, described)
        piece = Piece(whole, whole, (0,) * len(whole)) if place is None else place.piece(whole)
        if spec.shape == piece.shape and (spec.whole_offsets == piece.offsets or not spec.nbytes):
            view = own.view(name)
            self.lent.append(weakref.ref(view))
            local = over(view, spec)
            return local if place is None else place.assemble(local, whole)
        device = "cpu" if place is None else place.mesh.device_type
        local = torch.empty(piece.shape, dtype=dtype_of(spec), device=device)
        self._missing[name] = local if place is None else place.assemble(local, whole)
        return self._missing[name]

    def fill_missing(self) -> None:
        if self._missing:
            from holdfast.train.saves import (
                dcp_reader,  # the import takes half a second and is needed only after a resize
            )

            dcp_reader.fill(self._missing, self._parts)


def _insist_returned(lent: list[weakref.ref[memoryview]]) -> None:
    """Ensure that no tensor of the live state shares memory with the shard, because a later save would overwrite it silently.

    A tensor made by `torch.frombuffer` keeps its view alive, so a view that has been collected has no tensor.
    """
    if any(view() is not None for view in lent):
        gc.collect()
    if any(view() is not None for view in lent):
        raise InvalidSpec(
            "state",
            "an object that kept a tensor of the checkpoint",
            "a load_state_dict that copies the tensors that it is given: the checkpoint's memory is used again",
        )


def _reserve_for(extra_bytes: int) -> int:
    """Return a power of two with room to grow, so that the plan, and therefore the image, is the same for every save."""
    reserve = EXTRA_RESERVE_MIN
    while reserve < 2 * extra_bytes:
        reserve *= 2
    return reserve
