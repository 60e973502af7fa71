"""The mesh: how ranks are laid out over the parallel dimensions of a job.

Ranks are numbered row-major, outermost dimension first, as `torch.distributed.device_mesh` does. The data-parallel
dimension `dp`, when present, is outermost: a *replica* (the ranks that share a dp index) is then a contiguous block of
ranks, and a replica can leave or return without any other replica's *position* (its index inside the replica) moving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.domain.errors import InvalidSpec

DATA_PARALLEL = "dp"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Parallel dimensions, outermost first: `(("dp", 3), ("pp", 3))` is nine ranks in three replicas of three."""

    dims: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.dims]
        if not names:
            raise InvalidSpec("mesh", self.dims, "at least one dimension, for example {dp: 2}")
        if len(set(names)) != len(names):
            raise InvalidSpec("mesh", names, "each dimension name once")
        for name, size in self.dims:
            if size < 1:
                raise InvalidSpec(f"mesh.{name}", size, "a size of at least 1")
        if DATA_PARALLEL in names[1:]:
            raise InvalidSpec(
                "mesh", names, "dp as the first (outermost) dimension, so that a replica is a block of ranks"
            )

    @classmethod
    def of(cls, dims: Mapping[str, int]) -> Mesh:
        """Build from a mapping whose order is outermost first."""
        return cls(tuple(dims.items()))

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.dims)

    @property
    def dp(self) -> int:
        """Number of replicas; 1 when the mesh has no `dp` dimension."""
        return dict(self.dims).get(DATA_PARALLEL, 1)

    @property
    def replica_size(self) -> int:
        """Ranks in one replica."""
        return self.world_size // self.dp

    def replica_of(self, rank: int) -> int:
        """The dp index of `rank`."""
        return rank // self.replica_size

    def position_of(self, rank: int) -> int:
        """The index of `rank` inside its replica: equal positions hold the same share of the model."""
        return rank % self.replica_size

    def coords(self, rank: int) -> dict[str, int]:
        """Index of `rank` along each dimension."""
        if not 0 <= rank < self.world_size:
            raise InvalidSpec("rank", rank, f"0 ≤ rank < {self.world_size} in mesh {self}")
        coords: dict[str, int] = {}
        for name, size in reversed(self.dims):
            rank, coords[name] = divmod(rank, size)
        return {name: coords[name] for name, _ in self.dims}

    def resized(self, dp: int) -> Mesh:
        """The same mesh with another number of replicas; adds a `dp` dimension when there was none."""
        rest = tuple(item for item in self.dims if item[0] != DATA_PARALLEL)
        return Mesh(((DATA_PARALLEL, dp), *rest))

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.dims)
