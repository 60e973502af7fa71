"""The combined contents of a set of shards of one step, in terms of `torch.distributed.checkpoint`'s planner."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.domain.errors import IntegrityError, InvalidSpec
from holdfast.shards import Reader, TensorSpec
from holdfast.train.saves import state
from holdfast.train.saves.tensors import dtype_of, tensor_of


@dataclass(frozen=True, slots=True)
class Contents:
    """Created by `of` or `of_slots`. If several shards hold the same piece, that of the first shard is used."""

    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    # Chunk → number of the shard, name in that shard.
    slots: dict[MetadataIndex, tuple[int, str]] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)  # non-tensor state, as torch.save writes it
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)  # name → keys in the nested dict

    @classmethod
    def of(cls, shards: Sequence[Reader]) -> Contents:
        """Return tensors and non-tensor state, by DCP's names.

        Raises IntegrityError if the shards are not of one step, and InvalidSpec if one name has two meanings.
        """
        _require_one_step(shards)
        contents = cls()
        for number, shard in enumerate(shards):
            tensors, values, paths = _flatten(shard)
            for name, slot in tensors.items():
                contents._add(name, number, shard.spec(slot), shards)
            for name, value in values.items():
                if name not in contents.values:
                    contents.values[name] = _saved(value)
            contents.paths.update({name: path for name, path in paths.items() if name not in contents.paths})
        for name in contents.tensors.keys() & contents.values.keys():
            raise InvalidSpec(f"state: {name}", "a tensor on one rank and none on another", "one kind on every rank")
        return contents

    @classmethod
    def of_slots(cls, shards: Sequence[Reader]) -> Contents:
        """Return only the tensors, by their names in the shards. Raises as `of` does."""
        _require_one_step(shards)
        contents = cls()
        for number, shard in enumerate(shards):
            for spec in shard.tensors:
                contents._add(spec.fqn, number, spec, shards)
        return contents

    def require_whole(self, shards: Sequence[Reader]) -> None:
        """Raises IntegrityError if the pieces of a tensor do not cover it completely."""
        for name, tensor in self.tensors.items():
            elements = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if elements != math.prod(tensor.size) or overlapping(tensor):
                ranks = sorted(shard.key.rank for shard in shards)
                raise IntegrityError(
                    f"the shards do not cover the state: of {name!r} {tuple(tensor.size)}, those of ranks {ranks}, saved on "
                    f"{shards[0].header.stamp.mesh}, hold {elements} of {math.prod(tensor.size)} elements"
                )

    def _add(self, name: str, number: int, spec: TensorSpec, shards: Sequence[Reader]) -> None:
        size, dtype = torch.Size(spec.whole_shape), dtype_of(spec)
        known = self.tensors.setdefault(name, TensorStorageMetadata(TensorProperties(dtype=dtype), size, []))
        if (known.size, known.properties.dtype) != (size, dtype):
            raise _ambiguous(name, f"{known.properties.dtype} {tuple(known.size)} and {dtype} {tuple(size)}")
        index = MetadataIndex(name, spec.whole_offsets)
        first = self.slots.get(index)
        if first is not None:
            _require_same(name, spec, shards[number], shards[first[0]], first[1])
        elif 0 not in spec.shape or 0 in size:  # empty pieces are left out
            known.chunks.append(ChunkStorageMetadata(torch.Size(spec.whole_offsets), torch.Size(spec.shape)))
            self.slots[index] = (number, spec.fqn)


def _require_one_step(shards: Sequence[Reader]) -> None:
    if not shards:
        raise InvalidSpec("shards", "none", "at least one shard")
    steps = sorted({(shard.key.attempt, shard.key.step) for shard in shards})
    if len(steps) > 1:
        raise IntegrityError(f"the shards are of different saves, (attempt, step) {steps}: together a mixed state")


def _require_same(name: str, spec: TensorSpec, shard: Reader, first: Reader, first_slot: str) -> None:
    """Check two shards that hold the same piece. Those of replicas are interchangeable, those of two pipeline stages are
    not."""
    other = first.spec(first_slot)
    if spec.shape != other.shape:
        raise _ambiguous(name, f"pieces of {other.shape} and {spec.shape} at {spec.whole_offsets}")
    position, other_position = (each.header.stamp.mesh.position_of(each.key.rank) for each in (shard, first))
    if spec.global_shape is None and position != other_position and shard.view(spec.fqn) != first.view(first_slot):
        raise _ambiguous(name, f"one tensor on rank {first.key.rank} and another on rank {shard.key.rank}")


def _ambiguous(name: str, what: str) -> InvalidSpec:
    return InvalidSpec(
        f"state: {name}",
        what,
        "one tensor per name; take the shards of one pipeline stage at a time, or name layers apart",
    )


def _flatten(shard: Reader) -> tuple[dict[str, str], dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Return name → slot for tensors, name → value for the rest, and name → path, as DCP's planner flattens the saved dict."""
    slots: dict[int, str] = {}
    pieces: set[str] = set()

    def leaf(name: str, described: dict[str, Any] | None) -> torch.Tensor:
        tensor = tensor_of(shard, name)
        slots[id(tensor)] = name  # the tree keeps it alive
        if described is not None:
            pieces.add(name)
        return tensor

    tree, _ = state.disassemble(shard.extra, leaf)
    try:
        flat, paths = flatten_state_dict(tree)
    except ValueError as error:  # both {"a.b": …} and {"a": {"b": …}}
        raise InvalidSpec("state", str(error), "keys that make one name each") from error
    tensors = {name: slots[id(value)] for name, value in flat.items() if id(value) in slots}
    hidden = pieces - set(tensors.values())
    if hidden:
        raise InvalidSpec(f"state: {min(hidden)}", "a sharded tensor inside a tuple", "dicts and lists around it")
    return tensors, {name: value for name, value in flat.items() if name not in tensors}, paths


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def overlapping(tensor: TensorStorageMetadata) -> bool:
    """Whether two pieces overlap. Counting elements would then miss a gap."""
    active: list[ChunkStorageMetadata] = []  # along the first dimension
    for chunk in sorted(tensor.chunks, key=lambda chunk: tuple(chunk.offsets)):
        if tensor.size:
            active = [each for each in active if each.offsets[0] + each.sizes[0] > chunk.offsets[0]]
        if any(_overlap(each, chunk) for each in active):
            return True
        active.append(chunk)
    return False


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + size_b and b < a + size_a
        for a, size_a, b, size_b in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
