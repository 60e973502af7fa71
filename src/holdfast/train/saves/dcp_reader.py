"""Reads shards through DCP: a storage reader over mapped shard files, and re-sharding by DCP's planner.

No communication between ranks: each rank reads the parts of all shards that overlap its own pieces.
"""

from __future__ import annotations

import io
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from holdfast.domain.errors import IntegrityError
from holdfast.shards import Reader
from holdfast.train.saves.dcp_contents import Contents, overlapping
from holdfast.train.saves.tensors import checksum, tensor_of

log = logging.getLogger("holdfast.train")


@contextmanager
def open_shards(paths: Sequence[Path], *, verify: bool) -> Iterator[list[Reader]]:
    """Lock and map the shards. With `verify`, every byte is checked against the manifest next to the shard; a warning is
    logged if there is no manifest or no CRC-32C library. Raises as `Reader` does, and IntegrityError for a damaged shard."""
    with ExitStack() as stack:
        shards = [stack.enter_context(Reader(path)) for path in paths]
        for shard in shards if verify else ():
            crc32c = checksum()
            if crc32c is None:
                log.warning("reading %s without verification: it needs google-crc32c and NumPy", shard.path)
            elif not shard.verify(crc32c):
                log.warning("reading %s without verification: it has no manifest", shard.path)
        yield shards


class ShardReader(StorageReader):
    """`torch.distributed.checkpoint.load(state, storage_reader=ShardReader(shards))`, straight from open shards of one step.

    Unlike torch's own reader it reads no pickle and copies each byte once. It reads no damaged data if the shards were opened
    with `open_shards(paths, verify=True)`.
    """

    def __init__(self, shards: Sequence[Reader], contents: Contents | None = None) -> None:
        super().__init__()
        self._shards = shards
        self._contents = Contents.of(shards) if contents is None else contents

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of DCP's interface; the shards cannot be changed."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {**self._contents.tensors}
        entries |= {name: BytesStorageMetadata() for name in self._contents.values}
        return Metadata(entries, planner_data=dict(self._contents.paths), storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Part of DCP's interface; the metadata is already known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._contents.values[item.storage_index.fqn]))
                continue
            number, name = self._contents.slots[item.storage_index]
            source = tensor_of(self._shards[number], name)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Always False: this reader is created from open shards, not from a path."""
        return False


def fill(tensors: Mapping[str, torch.Tensor], shards: Sequence[Reader]) -> None:
    """Fill tensors, or this rank's pieces of DTensors, from the shards. Names are those in the shards.

    Raises IntegrityError that names the first tensor that the shards do not cover.
    """
    reader = ShardReader(shards, Contents.of_slots(shards))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    wanted = dict(tensors)
    for name, tensor in wanted.items():
        _require_same_size(name, tensor, metadata, shards)
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    require_covered(plan, wanted, metadata.state_dict_metadata, shards)
    reader.read_data(plan, planner).wait()


def require_covered(
    plan: LoadPlan, tensors: Mapping[str, torch.Tensor], entries: Mapping[str, object], shards: Sequence[Reader]
) -> None:
    """Raise IntegrityError that names the first of these tensors that the shards do not cover. `entries`: their metadata.

    DCP's planner plans what it finds; what no shard holds would keep its old value silently."""
    found: Counter[str] = Counter()
    for item in plan.items:
        found[item.dest_index.fqn] += math.prod(item.lengths)
    for name, tensor in tensors.items():
        elements = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
        entry = entries[name]
        if found[name] != elements or (isinstance(entry, TensorStorageMetadata) and overlapping(entry)):
            ranks = sorted(shard.key.rank for shard in shards)
            raise IntegrityError(
                f"the shards do not cover the state: of the {elements} elements of {name!r} that this rank needs, those of "
                f"ranks {ranks}, saved on {shards[0].header.stamp.mesh}, hold {found[name]}"
            )


def _require_same_size(name: str, tensor: torch.Tensor, metadata: Metadata, shards: Sequence[Reader]) -> None:
    entry = metadata.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.size():
        raise IntegrityError(f"{shards[0].path} and the other shards hold no {name!r} of shape {tuple(tensor.shape)}")
