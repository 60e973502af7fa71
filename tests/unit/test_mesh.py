"""The mesh in any order of its dimensions: who is in which replica, at which position, and which nodes belong together."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.job import JobSpec, LaunchSpec
from holdfast.domain.mesh import Mesh

SIZES = st.integers(1, 4)
MESHES = st.permutations([("dp", 0), ("pp", 0), ("tp", 0)]).flatmap(
    lambda names: st.tuples(SIZES, SIZES, SIZES).map(
        lambda sizes: Mesh(tuple(zip([n for n, _ in names], sizes, strict=True)))
    )
)
OUTERMOST = st.builds(lambda dp, pp, tp: Mesh.of({"dp": dp, "pp": pp, "tp": tp}), SIZES, SIZES, SIZES)


def others(mesh: Mesh, rank: int) -> tuple[int, ...]:
    return tuple(index for name, index in mesh.coords(rank).items() if name != "dp")


@given(MESHES)
def test_replica_and_position_are_the_coordinates(mesh: Mesh) -> None:
    shares = list(itertools.product(*(range(size) for name, size in mesh.dims if name != "dp")))
    for rank in range(mesh.world_size):
        assert mesh.replica_of(rank) == mesh.coords(rank)["dp"]
        assert mesh.position_of(rank) == shares.index(others(mesh, rank)), "the order of the other dimensions is kept"
        assert mesh.ranks_at(mesh.position_of(rank))[mesh.replica_of(rank)] == rank


@given(OUTERMOST)
def test_with_dp_outermost_a_replica_is_a_block_of_ranks(mesh: Mesh) -> None:
    size = mesh.world_size // mesh.dp
    assert mesh.is_dp_outermost
    for rank in range(mesh.world_size):
        assert (mesh.replica_of(rank), mesh.position_of(rank)) == (rank // size, rank % size)
        assert list(mesh.ranks_at(rank % size)) == list(range(rank % size, mesh.world_size, size))
    for width in [n for n in range(1, mesh.world_size + 1) if not (n % size and size % n)]:
        group = mesh.grouping(width)
        assert (group.replicas, group.nodes) == (max(1, width // size), max(1, size // width))
        assert [group.slot(g, i, 9) for g in range(9) for i in range(group.nodes)] == list(range(9 * group.nodes))


@given(MESHES, SIZES)
def test_another_number_of_replicas_keeps_the_order_and_the_coordinates(mesh: Mesh, dp: int) -> None:
    resized = mesh.resized(dp)
    assert [name for name, _ in resized.dims] == [name for name, _ in mesh.dims]
    assert (resized.dp, resized.replica_size) == (dp, mesh.replica_size)
    for rank in range(mesh.world_size):
        now = mesh.counterpart(rank, resized)
        assert (now is None) == (mesh.replica_of(rank) >= dp)
        assert now is None or resized.coords(now) == mesh.coords(rank)
        assert not mesh.is_dp_outermost or now == (rank if rank < resized.world_size else None)


def test_a_mesh_of_other_dimensions_has_no_counterpart_but_the_number() -> None:
    first, second = Mesh.of({"dp": 2, "tp": 2}), Mesh.of({"tp": 3})
    assert [first.counterpart(rank, second) for rank in range(4)] == [0, 1, 2, None]
    assert [first.counterpart(rank, Mesh.of({"tp": 2, "dp": 2})) for rank in range(4)] == [0, 2, 1, 3], "by name"
    assert [first.counterpart(rank, Mesh.of({"tp": 2})) for rank in range(4)] == [0, 1, None, None]


@given(MESHES, st.integers(1, 64))
def test_groups_are_the_smallest_sets_of_whole_nodes_with_whole_replicas(mesh: Mesh, seed: int) -> None:
    widths = [width for width in range(1, mesh.world_size + 1) if mesh.world_size % width == 0]
    width = widths[seed % len(widths)]
    if mesh.is_dp_outermost and mesh.replica_size % width and width % mesh.replica_size:
        return  # not accepted
    group = mesh.grouping(width)
    count = mesh.dp // group.replicas
    found = {
        (
            frozenset(group.slot(number, index, count) for index in range(group.nodes)),
            frozenset(range(number * group.replicas, (number + 1) * group.replicas)),
        )
        for number in range(count)
    }
    assert found == connected(mesh, width)


def connected(mesh: Mesh, width: int) -> set[tuple[frozenset[int], frozenset[int]]]:
    """(nodes, replicas): a node and a replica are connected when the node has ranks of the replica."""
    parts: list[tuple[set[int], set[int]]] = []
    for rank in range(mesh.world_size):
        node, replica = rank // width, mesh.coords(rank)["dp"]
        touched = [part for part in parts if node in part[0] or replica in part[1]]
        parts = [part for part in parts if part not in touched]
        parts.append(({node}.union(*(nodes for nodes, _ in touched)), {replica}.union(*(some for _, some in touched))))
    return {(frozenset(nodes), frozenset(replicas)) for nodes, replicas in parts}


def job(dims: dict[str, int], width: int, min_dp: int, max_dp: int) -> JobSpec:
    nodes = math.prod(dims.values()) // width
    return JobSpec("job", LaunchSpec("/train.py"), nodes, width, Mesh.of(dims), min_dp, max_dp)


def test_a_job_that_can_lose_no_node_is_not_elastic() -> None:
    stages = {"pp": 2, "dp": 2, "tp": 2}
    assert job(stages, 4, 2, 4).nodes == 2, "it may grow"
    assert job(stages, 2, 1, 4).nodes == 4, "a node has a stage of one replica"
    with pytest.raises(InvalidSpec, match=r"elastic\.min_dp.*no node can leave without ranks of all replicas"):
        job(stages, 4, 1, 2)
    straddling = {"pp": 2, "dp": 3}
    assert job(straddling, 2, 3, 3).nodes == 3
    with pytest.raises(InvalidSpec, match=r"elastic\.max_dp.*would change nodes"):
        job(straddling, 2, 3, 4)
    with pytest.raises(InvalidSpec, match="whole replicas per node or whole nodes per replica"):
        job({"dp": 2, "pp": 3}, 2, 2, 2)
