"""The mesh: the layout of ranks over the parallel dimensions of a job.

Ranks are numbered row-major, outermost dimension first, as in `torch.distributed.device_mesh`. A *replica* consists of the
ranks that share an index of the data-parallel dimension `dp`. The *position* of a rank (its model-parallel index) is its index
over the other dimensions. Only `dp` changes during a job. Replica and position determine the state that a rank holds. The rank
number alone determines it only while dp is unchanged, or if dp is outermost: then a replica is a block of ranks, and the other
ranks keep their numbers when the last replica is removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce

from holdfast.domain.errors import InvalidSpec

DATA_PARALLEL = "dp"


@dataclass(frozen=True, slots=True)
class Grouping:
    """The *groups* of a mesh on nodes of equal width: the smallest sets of whole nodes that hold whole replicas.

    With `dp` outermost, a group is a row of consecutive nodes. Otherwise each of the `rows` (the dimensions outside of dp)
    contains the same number of the group's nodes. `is_fixed`: with another number of replicas, the remaining nodes could not
    keep their coordinates.
    """

    replicas: int  # per group
    rows: int
    nodes_per_row: int  # of each group
    is_fixed: bool = False

    @property
    def nodes(self) -> int:
        """Per group."""
        return self.rows * self.nodes_per_row

    def slot(self, group: int, index: int, groups: int) -> int:
        """The slot of the group's node `index`, if there are `groups` groups. Slots are in the order of the ranks."""
        row, column = divmod(index, self.nodes_per_row)
        return (row * groups + group) * self.nodes_per_row + column

    def place(self, slot: int, groups: int) -> tuple[int, int]:
        """The group of a slot, and the index of the slot's node in this group: the inverse of `slot`."""
        place, column = divmod(slot, self.nodes_per_row)
        row, group = divmod(place, groups)
        return group, row * self.nodes_per_row + column


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

    @classmethod
    def of(cls, dims: Mapping[str, int]) -> Mesh:
        """Build from a mapping whose order is outermost first."""
        return cls(tuple(dims.items()))

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.dims)

    @property
    def dp(self) -> int:
        """Number of replicas; 1 if the mesh has no `dp` dimension."""
        return _layout(self.dims)[0]

    @property
    def replica_size(self) -> int:
        """Ranks in one replica."""
        return self.world_size // self.dp

    @property
    def stride(self) -> int:
        """Distance from a rank to the one at the same position in the next replica: the size of the dimensions inside of dp."""
        return _layout(self.dims)[1]

    @property
    def is_dp_outermost(self) -> bool:
        """Whether a replica is a block of consecutive ranks."""
        return self.stride == self.replica_size

    def replica_of(self, rank: int) -> int:
        """The dp index of `rank`."""
        dp, stride = _layout(self.dims)
        return rank // stride % dp

    def position_of(self, rank: int) -> int:
        """The index of `rank` inside its replica. Ranks at equal positions hold the same part of the model."""
        dp, stride = _layout(self.dims)
        return rank // (stride * dp) * stride + rank % stride

    def ranks_at(self, position: int) -> range:
        """The ranks at this position, by replica."""
        dp, stride = _layout(self.dims)
        outside, inside = divmod(position, stride)
        first = outside * stride * dp + inside
        return range(first, first + stride * dp, stride)

    def counterpart(self, rank: int, other: Mesh) -> int | None:
        """The rank of `other` with the same coordinates, by dimension name; None if `other` has too few replicas.

        If `other` has different dimensions, ranks do not correspond; then the same rank number is returned, if it exists.
        """
        coords = {DATA_PARALLEL: 0} | self.coords(rank)
        if dict(self.resized(1).dims) != dict(other.resized(1).dims):
            return rank if rank < other.world_size else None
        if coords[DATA_PARALLEL] >= other.dp:
            return None
        return reduce(lambda outside, dim: outside * dim[1] + coords[dim[0]], other.dims, 0)

    def grouping(self, width: int) -> Grouping:
        """The groups of this mesh on full nodes of `width` consecutive ranks."""
        dp, stride = _layout(self.dims)
        rows, block = self.replica_size // stride, math.lcm(stride, width)
        if rows > 1 and dp * stride % block:  # some nodes contain the end of one row and the beginning of the next
            return Grouping(dp, 1, self.world_size // width, is_fixed=True)
        return Grouping(block // stride, rows, block // width)

    def coords(self, rank: int) -> dict[str, int]:
        """Index of `rank` along each dimension."""
        if not 0 <= rank < self.world_size:
            raise InvalidSpec("rank", rank, f"0 ≤ rank < {self.world_size} in mesh {self}")
        coords: dict[str, int] = {}
        for name, size in reversed(self.dims):
            rank, coords[name] = divmod(rank, size)
        return {name: coords[name] for name, _ in self.dims}

    def resized(self, dp: int) -> Mesh:
        """The same mesh with another number of replicas; adds an outermost `dp` if the mesh has none."""
        if not any(name == DATA_PARALLEL for name, _ in self.dims):
            return Mesh(((DATA_PARALLEL, dp), *self.dims))
        return Mesh(tuple((name, dp if name == DATA_PARALLEL else size) for name, size in self.dims))

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.dims)


@lru_cache(maxsize=256)
def _layout(dims: tuple[tuple[str, int], ...]) -> tuple[int, int]:
    """Return (number of replicas, stride). Cached, because the restore election calls it for each of 100,000 ranks."""
    names = [name for name, _ in dims]
    if DATA_PARALLEL not in names:
        return 1, math.prod(size for _, size in dims)
    place = names.index(DATA_PARALLEL)
    return dims[place][1], math.prod(size for _, size in dims[place + 1 :])
