"""The tensors of a shard and their locations: the index, and the slots after it.

A slot is one tensor as a complete small file in the trainer's own format, so that other readers, which receive only (file,
offset, length), can read it: `prefix`, payload, `suffix`. This module does not interpret prefix and suffix. They are written
once, when an image is created; a save writes only payloads.

The index is JSON, one row per tensor, and includes the position of a piece in its global tensor. Neither index nor slots
contain the step or the rank: data-parallel replicas of one state have identical bytes there."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from holdfast.domain.errors import IntegrityError, InvalidSpec
from holdfast.shards.layout import ALIGN, INDEX_BYTES_MAX, PAGE
from holdfast.shards.sealed import UNDECODABLE


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes before and after a payload. If `prefix` is a multiple of 64 bytes, payloads are 64-byte aligned."""

    prefix: bytes = b""
    suffix: bytes = b""


BARE = Envelope()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a state: `nbytes` of contiguous elements; `dtype` is a plain name such as "float32".

    A piece of a sharded tensor also has its `global_shape`, and its `offsets` in it; None = the complete tensor.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()
    envelope: Envelope = field(default=BARE, compare=False, repr=False)  # empty in the specs of a reader

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the global tensor of which this is a piece; `shape` if the tensor is not sharded."""
        return self.shape if self.global_shape is None else self.global_shape

    @property
    def whole_offsets(self) -> tuple[int, ...]:
        """Position of this piece in the global tensor, one number per dimension."""
        return (0,) * len(self.shape) if self.global_shape is None else self.offsets


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of a worker's saves. `extra_reserve` bytes are reserved for the non-tensor state."""

    tensors: tuple[TensorSpec, ...]
    extra_reserve: int = 64 << 10


@dataclass(frozen=True, slots=True)
class Slot:
    """Bytes [offset, offset + length) of the file; the payload begins at `payload`, a position in the file too."""

    offset: int
    length: int
    payload: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan with all offsets. `slots` is parallel to `tensors`."""

    tensors: tuple[TensorSpec, ...]
    slots: tuple[Slot, ...]
    index: bytes
    tensors_end: int  # = start of extra
    extra_reserve: int

    @property
    def size_max(self) -> int:
        """Size of an image in bytes, including the reserve."""
        return self.tensors_end + self.extra_reserve


def aligned(offset: int, to: int) -> int:
    return -(-offset // to) * to


def lay_out(plan: Plan) -> Layout:
    """Place every tensor. Raises InvalidSpec for two tensors of one name."""
    names = [spec.fqn for spec in plan.tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidSpec("plan.tensors", twice, "each tensor name once")
    relative: list[int] = []  # relative to the start of the slots, so that the size of the index does not change them
    end = 0
    for spec in plan.tensors:
        relative.append(aligned(end, ALIGN))
        end = relative[-1] + len(spec.envelope.prefix) + spec.nbytes + len(spec.envelope.suffix)
    rows = [_row(spec, offset) for spec, offset in zip(plan.tensors, relative, strict=True)]
    index = json.dumps(rows, separators=(",", ":")).encode()
    if len(index) > INDEX_BYTES_MAX:
        raise InvalidSpec("plan.tensors", f"{len(rows)} tensors", f"an index of at most {INDEX_BYTES_MAX} bytes")
    start = PAGE + aligned(len(index), PAGE)
    return Layout(
        tensors=plan.tensors,
        slots=tuple(_slot(row, start) for row in rows),
        index=index,
        tensors_end=aligned(start + end, PAGE),
        extra_reserve=aligned(max(plan.extra_reserve, 1), PAGE),
    )


def _row(spec: TensorSpec, offset: int) -> list[Any]:
    prefix, suffix = spec.envelope.prefix, spec.envelope.suffix
    # With the checksum, an image with another envelope (another release of the trainer's format) does not fit and is replaced.
    checksum = zlib.crc32(suffix, zlib.crc32(prefix))
    sizes = [offset, len(prefix), spec.nbytes, len(suffix), checksum]
    whole = None if spec.global_shape is None else [list(spec.global_shape), list(spec.offsets)]
    return [spec.fqn, spec.dtype, list(spec.shape), sizes, whole]


def _slot(row: list[Any], start: int) -> Slot:
    offset, prefix, nbytes, suffix, _ = row[3]
    return Slot(start + offset, prefix + nbytes + suffix, start + offset + prefix)


def _spec(row: list[Any]) -> TensorSpec:
    fqn, dtype, shape, (_, _, nbytes, _, _), whole = row
    if whole is None:
        return TensorSpec(fqn, dtype, tuple(shape), nbytes)
    global_shape, offsets = whole
    return TensorSpec(fqn, dtype, tuple(shape), nbytes, tuple(global_shape), tuple(offsets))


def read_index(raw: bytes, tensors_end: int) -> tuple[tuple[TensorSpec, ...], tuple[Slot, ...]]:
    """Decode the index. Raises IntegrityError if it does not describe the slots after it."""
    start = PAGE + aligned(len(raw), PAGE)
    try:
        rows = json.loads(raw)
        for row in rows:
            _require_types(*row)
        tensors = tuple(_spec(row) for row in rows)
        slots = tuple(_slot(row, start) for row in rows)
        for spec, slot, row in zip(tensors, slots, rows, strict=True):
            _check(spec, slot, min(row[3]), start, tensors_end)
    except UNDECODABLE as error:
        raise IntegrityError(f"the shard's index is not readable: {error!r}") from error
    return tensors, slots


def _require_types(fqn: object, dtype: object, shape: list[object], sizes: list[object], whole: Any) -> None:
    """Raises TypeError unless names are texts and numbers are integers, because they become slices and memory sizes."""
    numbers = [*shape, *sizes, *(() if whole is None else [number for part in whole for number in part])]
    if not (type(fqn) is str and type(dtype) is str and all(type(number) is int for number in numbers)):
        raise TypeError("a tensor has a name that is not a text, or a size that is not an integer")


def _check(spec: TensorSpec, slot: Slot, smallest: int, start: int, tensors_end: int) -> None:
    if smallest < 0 or slot.offset < start or slot.offset + slot.length > tensors_end:
        raise IntegrityError(f"the shard's index places tensor {spec.fqn!r} outside of the file")
    fits = len(spec.whole_offsets) == len(spec.shape) == len(spec.whole_shape) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(spec.whole_offsets, spec.shape, spec.whole_shape, strict=True)
    )
    if not fits and 0 not in spec.shape:  # an empty piece may begin at the end
        raise IntegrityError(f"the shard's index has an invalid piece of tensor {spec.fqn!r}")
