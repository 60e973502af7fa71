"""Who am I: the three ways to be started, and what a wrong environment gets."""

from __future__ import annotations

import json
import os

import pytest

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.mesh import Mesh
from holdfast.train.environment import Environment, RestoreTarget, World

AGENT = {
    "HOLDFAST_JOB": "gpt",
    "HOLDFAST_GENERATION": "4",
    "HOLDFAST_ATTEMPT": "2",
    "HOLDFAST_MESH": '{"dp": 3, "pp": 3}',
    "HOLDFAST_PREVIOUS_MESH": '{"dp": 2, "pp": 3}',
    "HOLDFAST_RESTORE": '{"step": 120, "attempt": 1, "path": "/dev/shm/x"}',
    "HOLDFAST_CONTROL_FD": "5",
    "HOLDFAST_CHECKPOINT_INTERVAL_STEPS": "50",
    "RANK": "7",
    "WORLD_SIZE": "9",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4242",
}


def test_parts_of_a_restore_lead_with_the_one_that_plain_values_come_from() -> None:
    raw = {"step": 3, "attempt": 1, "path": "/b", "paths": ["/a", "/b", "/c"]}
    target = Environment.read({"HOLDFAST_RESTORE": json.dumps(raw)}).restore
    assert target is not None
    assert target.parts == ("/b", "/a", "/c")
    alone = Environment.read({"HOLDFAST_RESTORE": json.dumps({"step": 3, "attempt": 1, "path": "/b"})}).restore
    assert alone is not None
    assert alone.parts == ("/b",)


def test_started_by_an_agent() -> None:
    environment = Environment.read(AGENT, mesh={"dp": 9})
    assert environment.world == World(Mesh.of({"dp": 3, "pp": 3}), 7, 4), "the job's mesh counts, not the script's"
    assert environment.master == ("10.0.0.1", 4242)
    assert environment.restore == RestoreTarget(120, 1, "/dev/shm/x")
    assert environment.previous_mesh == Mesh.of({"dp": 2, "pp": 3})
    assert (environment.attempt, environment.interval_steps, environment.control_fd) == (2, 50, 5)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (None, {"dp": 4}),
        ({"dp": -1, "pp": 2}, {"dp": 2, "pp": 2}),
        ({"dp": 2, "pp": -1}, {"dp": 2, "pp": 2}),
        ({"dp": 1, "tp": 4}, {"dp": 1, "tp": 4}),
    ],
)
def test_started_by_torchrun_the_script_lays_out_the_ranks(
    mesh: dict[str, int] | None, expected: dict[str, int]
) -> None:
    environment = Environment.read({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, mesh)
    assert environment.world.mesh == Mesh.of(expected)
    assert environment.job == ""
    assert environment.images == ""


def test_plain_python_is_a_world_of_one_without_a_network() -> None:
    environment = Environment.read({"MASTER_ADDR": "left over"}, {"dp": -1, "pp": 1})
    assert environment.world == World(Mesh.of({"dp": 1, "pp": 1}), 0)
    assert environment.master is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"RANK": "nine"}, "RANK"),
        ({"RANK": "9"}, "RANK"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE"),
        ({"HOLDFAST_MESH": "dp3"}, "HOLDFAST_MESH"),
        ({"HOLDFAST_MESH": "[3]"}, "HOLDFAST_MESH"),
        ({"HOLDFAST_RESTORE": '{"step": 1}'}, "HOLDFAST_RESTORE"),
        ({"HOLDFAST_RESTORE": json.dumps({"step": "x", "attempt": 1, "path": "p"})}, "HOLDFAST_RESTORE"),
    ],
)
def test_a_wrong_variable_is_named(changes: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        Environment.read({**AGENT, **changes})
    assert caught.value.field == field


@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp": -1, "pp": -1}, {"dp": -1, "pp": 3}, {"dp": 0, "pp": -1}])
def test_a_mesh_that_does_not_divide_the_ranks_is_refused(mesh: dict[str, int]) -> None:
    with pytest.raises(InvalidSpec, match=r"^mesh|whose product is 4"):
        Environment.read({"RANK": "0", "WORLD_SIZE": "4"}, mesh)


def test_a_world_knows_its_coordinates() -> None:
    world = World(Mesh.of({"dp": 3, "pp": 2}), 5)
    assert (world.world_size, world.dp_size, world.dp_index) == (6, 3, 2)
    assert (world.size("pp"), world.index("pp")) == (2, 1)
    assert (world.size("tp"), world.index("tp")) == (1, 0), "a dimension that the mesh does not have"


def test_saves_are_copied_on_two_threads_where_each_rank_has_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert Environment.read({"LOCAL_WORLD_SIZE": "4"}).copy_threads == 2
    assert Environment.read({"LOCAL_WORLD_SIZE": "8"}).copy_threads == 1
    assert Environment.read({"HOLDFAST_COPY_THREADS": "3", "LOCAL_WORLD_SIZE": "8"}).copy_threads == 3
    with pytest.raises(InvalidSpec, match="HOLDFAST_COPY_THREADS"):
        Environment.read({"HOLDFAST_COPY_THREADS": "0"})
