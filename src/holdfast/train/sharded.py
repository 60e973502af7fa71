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
    """Which part of a whole: the box at `offsets` of size `shape` in a tensor of `global_shape`."""

    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """How a tensor is spread over the ranks of this run."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def piece(self, global_shape: tuple[int, ...]) -> Piece:
        """This rank's part; it may be empty."""
        return _piece(global_shape, self.mesh, self.placements)

    def assemble(self, local: torch.Tensor, global_shape: tuple[int, ...]) -> torch.Tensor:
        """The DTensor of which `local` is this rank's part. Other ranks need not take part."""
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
    """Whether there can be a DTensor in this process."""
    return "torch.distributed.tensor" in sys.modules


def is_sharded(value: object) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def place_of(tensor: DTensor) -> Place:
    return Place(tensor.device_mesh, tuple(tensor.placements))


def take_apart(tensor: DTensor, path: str) -> tuple[torch.Tensor, Piece]:
    """This rank's part, sharing memory with the tensor, and what it is a part of.

    Raises InvalidSpec for a sum that is still to be made: what a rank holds of it is no part of the tensor.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise InvalidSpec(f"state: {path}", f"a DTensor with placements {tensor.placements}", "shards or replicas")
    local = tensor.to_local().detach()
    wait = getattr(local, "wait", None)  # a collective that is still running
    if wait is not None:
        local = wait()
    piece = place_of(tensor).piece(tuple(tensor.shape))
    if tuple(local.shape) != piece.shape:
        raise InvalidSpec(
            f"state: {path}", f"a local part of shape {tuple(local.shape)}", f"{piece.shape}, as its placements say"
        )
    return local, piece


# ------------------------------------------------------------ as plain values, to be saved beside the tensors


def describe(tensor: DTensor) -> dict[str, Any]:
    """How the tensor is spread, by names and numbers: enough to spread its like over the ranks of another run."""
    return _describe(tensor.device_mesh, tuple(tensor.placements))


@lru_cache(maxsize=1024)  # one object for all alike, so that a pickle holds it once
def _describe(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> dict[str, Any]:
    return {"mesh": tuple(mesh.mesh_dim_names or ()), "placements": tuple(_encode(each) for each in placements)}


def find_place(described: dict[str, Any], meshes: list[DeviceMesh]) -> Place | None:
    """The same spread over the first of `meshes` with the same dimensions; None when there is none."""
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
