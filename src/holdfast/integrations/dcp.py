"""`torch.distributed.checkpoint` (DCP) through Holdfast: existing `dcp.save`, `dcp.async_save` and `dcp.load` calls.

    run = hf.attach()
    writer, reader = dcp_holdfast.Writer(run), dcp_holdfast.Reader(run, first="/data/pretrained")
    if reader.available:
        dcp.load(state, storage_reader=reader)
    run.reapply_rng()                                    # after the data loader's iterator has been made
    while run.steps_finished < total:
        with run.step(run.steps_finished):
            ...
        if writer.due:                                   # or the script's own interval
            dcp.async_save(state, storage_writer=writer, process_group=saving)    # saving = dist.new_group(backend="gloo")

**Writer.** A save is a checkpoint of the run: this rank's part of the whole state dict is copied into its memory image, which
the replicator copies to disk, to a peer and to the object store. `dcp.async_save` returns after that copy; `dcp.save` does
the same. DCP distributes tensors that all ranks hold over the ranks, and this writer does not: every rank saves all that it
holds, so that a restart restores from its own memory, and a plain value stays that of its rank. A save that finds no image
free is skipped, logged and counted, as by `run.checkpoint`; the call returns normally. `checkpoint_id` has no meaning: a save
belongs to the run's step. `async_save` in another process (`AsyncCheckpointerType.PROCESS`) is refused.

**Reader.** Reads the selected checkpoint, straight from the mapped shards; with another number of ranks, what this rank needs
from all of them. In contrast to DCP's own reader, it raises `IntegrityError` if the shards do not cover a tensor. If the run
has none, it reads the DCP checkpoint `first`, which any DCP wrote: a first start from existing checkpoints.
`checkpoint.resume` of a job file takes Holdfast's own checkpoints only.

**Stager.** For scripts that keep their own DCP files: `dcp.async_save(state, checkpoint_id=…, async_stager=Stager(run))`.
Training waits for the copy into the image, and the background write reads from there, without a second copy. Until it has
ended, that image cannot take the next save. If the image could not be written, the state is copied as DCP does.

What the state may contain is the same as for `run.checkpoint`; a value that cannot be saved is refused by its path. A planner
must be one of DCP's default planners, or derived from them. ShardedTensor is refused (FSDP1); use FSDP2. A data loader of
torchdata goes into `holdfast.integrations.loaders.PerRank`, because DCP loads only what the new object already has."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.train import Interrupted, Run
from holdfast.train.saves import state as states
from holdfast.train.saves.dcp_contents import Contents
from holdfast.train.saves.dcp_reader import ShardReader, require_covered
from holdfast.train.saves.lent_image import LentImage
from holdfast.train.saves.tensors import tensor_of

__all__ = ["Reader", "Stager", "Writer"]


class Stager(AsyncStager):
    """`dcp.async_save(state, checkpoint_id=…, async_stager=Stager(run))`: the copy that training waits for is a save of the
    run.

    `stage` raises `Interrupted` like `run.checkpoint`. One stager per run; not for several threads."""

    _synchronize_after_execute = False  # `stage` has finished when it returns

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lent: weakref.WeakSet[LentImage] = weakref.WeakSet()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the state on the CPU: the image's own memory, or DCP's copy if the image could not be written."""
        if self._lent:
            gc.collect()  # what the last background save has left behind keeps its image locked
        if not self._run.checkpoint(state_dict, self._run.steps_finished, force=True):
            return _copied(state_dict)
        image = self._run.newest_image
        assert image is not None  # there has been a save
        lent = LentImage(image)
        self._lent.add(lent)
        return lent.tree(state_dict)

    def synchronize_staging(self) -> None:
        """Part of DCP's interface; nothing is left to wait for."""

    def close(self) -> None:
        """Part of DCP's interface. An image is given back when the background save has ended."""


def _copied(state_dict: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = BlockingAsyncStager().stage(state_dict)
    return copied


class Writer(StorageWriter, AsyncStager):
    """`dcp.save(state, storage_writer=Writer(run))` and `dcp.async_save(state, storage_writer=Writer(run))`.

    Raises `Conflict` if the run cannot save: neither an agent nor a checkpoint directory. `run.saves` tells beforehand."""

    _synchronize_after_execute = False

    def __init__(self, run: Run) -> None:
        if not run.saves:
            raise Conflict(
                "this run saves nothing: run it under `holdfast run`, or give hf.attach(checkpoint=hf.Checkpoints(…)); "
                "`run.saves` tells whether to use this writer or DCP's own"
            )
        super().__init__()
        self._run = run
        self._thread = threading.get_ident()
        self._staged = False

    @property
    def due(self) -> bool:
        """Whether to save now, by the job's interval or because somebody asked for it. Equal on every rank."""
        return self._run.due()

    # ------------------------------------------------------------ async_save: in the training thread

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Save, and return the containers of the state with the live tensors, of which DCP still needs the shapes."""
        self._run.checkpoint(state_dict, self._run.steps_finished, force=True)
        self._staged = True
        return {key: _containers(value) for key, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Part of DCP's interface; nothing is left to wait for."""

    def close(self) -> None:
        """Part of DCP's interface; the run owns the images."""

    # ------------------------------------------------------------ as DCP's storage

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of DCP's interface; a save belongs to the run's step, whatever the id."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Part of DCP's interface; the memory images exist from the first save on."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save what this rank holds, not only its part of `plan`. After `async_save`, `stage` has saved it.

        A request to stop is raised by the next `run.step`, because DCP would turn it into an error of the save."""
        if threading.get_ident() == self._thread:
            with contextlib.suppress(Interrupted):
                self._run.checkpoint(_planned(planner), self._run.steps_finished, force=True)
        elif not self._staged:
            raise Conflict(
                "this state was staged by another stager, so training may have gone on before it is saved: call "
                "dcp.async_save(state, storage_writer=Writer(run)) without async_stager"
            )
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Part of DCP's interface; the checkpoint is complete when every rank's shard is committed."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Always False: this writer is created from a run, not from a path."""
        return False

    def __reduce__(self) -> str:
        raise InvalidSpec("async_checkpointer_type", "PROCESS", "THREAD: the run belongs to this process")


def _planned(planner: SavePlanner) -> dict[str, Any]:
    """Return the state dict that the planner was given, with its nesting."""
    if not isinstance(planner, DefaultSavePlanner):
        raise InvalidSpec("planner", type(planner).__qualname__, "DefaultSavePlanner, or a class derived from it")
    if not planner.mappings:
        return dict(planner.state_dict)
    nested: dict[str, Any] = unflatten_state_dict(planner.state_dict, planner.mappings)
    return nested


def _containers(value: Any) -> Any:
    """Return copies of dicts and lists around the same leaves."""
    if isinstance(value, dict):
        return {key: _containers(item) for key, item in value.items()}
    return [_containers(item) for item in value] if isinstance(value, list) else value


class Reader(StorageReader):
    """`dcp.load(state, storage_reader=Reader(run))`: from the selected checkpoint or, if the run has none, from `first`.

    `first`: the directory of a DCP checkpoint, or DCP's reader for one. Loading restores the random number generators; call
    `run.reapply_rng()` if something uses random numbers between the load and the first step."""

    def __init__(self, run: Run, first: str | os.PathLike[str] | StorageReader | None = None) -> None:
        super().__init__()
        self._run = run
        self._contents: Contents | None = None
        self._restores = run.restore_step > 0
        if first is not None and not isinstance(first, StorageReader):
            first = FileSystemReader(first)
        self._first = first

    @property
    def available(self) -> bool:
        """Whether there is something to load: the run's checkpoint, or `first`. Equal on every rank."""
        return self._restores or self._first is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of DCP's interface; `checkpoint_id` has no meaning."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises `Conflict` if there is nothing to load; DCP wraps it into its own exception."""
        if not self.available:
            raise Conflict("this run has no checkpoint, and no `first` was given: load only if `reader.available`")
        if (source := self._source) is not None:
            return source.read_metadata(*args, **kwargs)
        with self._run.restore_parts() as shards:
            self._contents = Contents.of(shards)
            return ShardReader(shards, self._contents).read_metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if (source := self._source) is not None:
            source.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan if self._source is None else self._source.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans if self._source is None else self._source.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises `IntegrityError` if the shards do not cover a tensor of the state."""
        if (source := self._source) is not None:
            return source.read_data(plan, planner)
        contents = self._contents
        assert contents is not None  # DCP reads the metadata first

        def load(shards: Any) -> Mapping[str, Any]:
            _require_covered(plan, planner, contents, shards)
            ShardReader(shards, contents).read_data(plan, planner).wait()
            _, also = states.disassemble(shards[0].extra, lambda name, _: tensor_of(shards[0], name))
            return also

        self._run.restore_by(load)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def _source(self) -> StorageReader | None:
        """Reader of the first start; None if the run's own checkpoint is read."""
        return None if self._restores else self._first

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Always False: this reader is created from a run, not from a path."""
        return False


def _require_covered(plan: LoadPlan, planner: LoadPlanner, contents: Contents, shards: Any) -> None:
    if not isinstance(planner, DefaultLoadPlanner):
        raise InvalidSpec("planner", type(planner).__qualname__, "DefaultLoadPlanner, or a class derived from it")
    tensors = {
        name: value
        for name, value in planner.state_dict.items()
        if isinstance(value, torch.Tensor) and name in contents.tensors  # DCP's planner has refused what it misses
    }
    require_covered(plan, tensors, contents.tensors, shards)
