"""Pieces of sharded tensors: converts a DTensor to this rank's piece, and a piece back to a DTensor.

No communication: every rank computes its piece from the mesh and the placements. `torch.distributed.tensor` is imported only
when a script uses it, or a shard contains pieces, because the import takes half a second."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh

from holdfast.domain.errors import InvalidSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class Piece:
    """Location of a piece: the box at `offsets` of size `shape` in a tensor of `global_shape`."""

    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Placement of a tensor on the ranks of this run."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def piece(self, global_shape: tuple[int, ...]) -> Piece:
        """Return this rank's piece, which may be empty."""
        return _piece(global_shape, self.mesh, self.placements)

    def assemble(self, local: torch.Tensor, global_shape: tuple[int, ...]) -> torch.Tensor:
        """Return the DTensor of which `local` is this rank's piece. Involves no other rank."""
        from torch.distributed.tensor import DTensor

        shape = torch.Size(global_shape)
        stride = torch.empty(shape, device="meta").stride()
        local = local.to(self.mesh.device_type)
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)


@lru_cache(maxsize=65536)
def _piece(global_shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Piece:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(global_shape, mesh, placements)
    return Piece(tuple(shape), tuple(global_shape), tuple(offsets))


def is_loaded() -> bool:
    """Whether this process may have DTensors."""
    return "torch.distributed.tensor" in sys.modules


def is_sharded(value: object) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def place_of(tensor: DTensor) -> Place:
    return Place(tensor.device_mesh, tuple(tensor.placements))


def take_apart(tensor: DTensor, path: str) -> tuple[torch.Tensor, Piece]:
    """Return this rank's piece, which shares memory with the tensor, and its location in the complete tensor.

    Raises InvalidSpec for a partial placement: a rank then holds a summand, not a piece of the tensor.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise InvalidSpec(f"state: {path}", f"a DTensor with placements {tensor.placements}", "shards or replicas")
    local = tensor.to_local().detach()
    wait = getattr(local, "wait", None)  # the result of a collective that is still running
    if wait is not None:
        local = wait()
    piece = place_of(tensor).piece(tuple(tensor.shape))
    if tuple(local.shape) != piece.shape:
        raise InvalidSpec(
            f"state: {path}",
            f"a local part of shape {tuple(local.shape)}",
            f"{piece.shape}, according to its placements",
        )
    return local, piece


# ------------------------------------------------------------ as plain values, to be saved with the tensors


def describe(tensor: DTensor) -> dict[str, Any]:
    """Describe the placement with names and numbers, so that a tensor can be placed in the same way on the ranks of
    another run."""
    return _describe(tensor.device_mesh, tuple(tensor.placements))


@lru_cache(maxsize=1024)  # one object for all tensors with this placement, so that the pickle contains it once
def _describe(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> dict[str, Any]:
    return {"mesh": tuple(mesh.mesh_dim_names or ()), "placements": tuple(_encode(each) for each in placements)}


def find_place(described: dict[str, Any], meshes: list[DeviceMesh]) -> Place | None:
    """Return the described placement on the first of `meshes` that has the same dimensions; None if none has."""
    placements = tuple(_decode(each) for each in described["placements"])
    for mesh in meshes:
        if tuple(mesh.mesh_dim_names or ()) == described["mesh"] and mesh.ndim == len(placements):
            return Place(mesh, placements)
    return None


def _encode(placement: Placement) -> tuple[Any, ...]:
    if placement.is_replicate():
        return ("replicate",)
    split = getattr(placement, "split_factor", 1)  # of FSDP over a dimension that TP has already sharded
    return ("shard", placement.dim, split)  # type: ignore[attr-defined]


def _decode(raw: tuple[Any, ...]) -> Placement:
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    match raw:
        case ("replicate",):
            return Replicate()
        case ("shard", dim, 1):
            return Shard(dim)
        case ("shard", dim, split):
            return _StridedShard(dim, split_factor=split)
        case _:
            raise InvalidSpec("placement", raw, "a shard or a replica")
