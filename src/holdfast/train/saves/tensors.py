"""Conversions between a shard's bytes and torch: views without a copy, and type names of the index."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import cache

import torch

from holdfast.shards import Reader, TensorSpec
from holdfast.train.saves.envelope import envelope
from holdfast.train.saves.sharded import Piece

Checksum = Callable[[memoryview], int]


def spec_of(name: str, tensor: torch.Tensor, piece: Piece | None) -> TensorSpec:
    shape = tuple(tensor.shape)
    return TensorSpec(
        name,
        str(tensor.dtype).removeprefix("torch."),
        shape,
        math.prod(shape) * tensor.element_size(),
        None if piece is None else piece.global_shape,
        () if piece is None else piece.offsets,
        envelope(tensor.dtype, shape),
    )


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def over(buffer: memoryview, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor that shares memory with the shard and keeps `buffer` alive."""
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype_of(spec))
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype_of(spec)).reshape(spec.shape)


def tensor_of(shard: Reader, name: str) -> torch.Tensor:
    """Return the shard's tensor `name` without a copy, valid while the shard is locked. Raises KeyError."""
    return over(shard.view(name), shard.spec(name))


@cache
def checksum() -> Checksum | None:
    """Return CRC-32C, or None if `google-crc32c` or NumPy is missing, which the trainer does not require."""
    try:
        google_crc32c = importlib.import_module("google_crc32c")
        numpy = importlib.import_module("numpy")
    except ModuleNotFoundError:
        return None

    def crc32c(data: memoryview) -> int:
        return int(google_crc32c.value(numpy.frombuffer(data, dtype=numpy.uint8))) if len(data) else 0

    return crc32c
