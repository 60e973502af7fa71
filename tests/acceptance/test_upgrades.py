"""A fleet is upgraded while a job trains, as docs/upgrades.md describes it, and back again: no service stops the training, each
fault is recovered from in each mixture of versions, and no value is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import known_train
import pytest
from versions import COMMITS, MixedFleet, Version, current, earlier, mixed_fleet
from waiting import wait_until

pytestmark = pytest.mark.timeout(600)

JOB = "known"
STEPS_MORE = 20
RECOVERY_S = 120.0


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Version:
    return current(tmp_path_factory.mktemp("versions") / "current")


def job(out: Path) -> dict[str, Any]:
    return {
        "name": JOB,
        "script": known_train.__file__,
        "args": [str(out), "1000000", "0.05"],
        "nodes": 2,
        "nproc_per_node": 1,
        "mesh": {"dp": 2},
        "elastic": {"min_dp": 1, "max_dp": 2},
        "checkpoint": {"interval_steps": 10, "keep": 2},
    }


def trains(fleet: MixedFleet, out: Path) -> int:
    """Wait for more steps, whose values are right. Returns the generation."""
    begun = fleet.client.job(JOB)["step"] or 0
    view = fleet.wait_step(JOB, begun + STEPS_MORE)
    assert known_train.wrong(out) == []
    return int(view["generation"])


def recovers(fleet: MixedFleet, out: Path) -> None:
    """A rank is killed: one incident more, which a restart answers."""
    before = len(list(fleet.client.incidents(JOB)))
    saved = fleet.saved_step(JOB)
    fleet.inject.crash(JOB, 1)
    wait_until(
        lambda: [each["state"] for each in fleet.client.incidents(JOB)] == ["resolved"] * (before + 1),
        description="the recovery",
        timeout_s=RECOVERY_S,
    )
    generation = trains(fleet, out)
    assert all(line["restored"] >= saved for line in known_train.lines(out) if line["generation"] == generation)


def without_a_restart(fleet: MixedFleet, out: Path, version: Version, *services: str) -> None:
    for service in services:
        generation = fleet.client.job(JOB)["generation"]
        fleet.install(version, service)
        fleet.restart_service(service)
        assert trains(fleet, out) == generation, f"{service} was replaced, and the training was not to notice"


def agents(fleet: MixedFleet, out: Path, version: Version) -> Iterator[str]:
    """Replace the agents as docs/upgrades.md says, spares first; each node's name when it has been replaced."""
    busy = {fleet.node_of(JOB, rank) for rank in range(2)}
    [spare] = set(fleet.stack.node_names) - busy
    fleet.replace_agent(spare, version)
    yield spare
    for node in sorted(busy):
        fleet.client.cordon(node, "upgrade")
        fleet.wait(JOB, f"no rank on {node}", partial(_trains_without, node))
        fleet.replace_agent(node, version)
        fleet.client.uncordon(node, "upgraded")
        yield node


def _trains_without(node: str, view: dict[str, Any]) -> bool:
    return view["phase"] == "running" and all(rank["node"] != node for rank in view["ranks"])


def mixtures(out: Path) -> set[frozenset[str]]:
    """The versions that ranks of one generation have had."""
    found: dict[int, set[str]] = {}
    for line in known_train.lines(out):
        found.setdefault(line["generation"], set()).add(line["version"])
    return {frozenset(each) for each in found.values()}


def upgrade(fleet: MixedFleet, out: Path, old: Version, new: Version) -> None:
    """From the first service to the last agent, a fault in each mixture."""
    without_a_restart(fleet, out, new, "supervisor", "diagnostics")
    recovers(fleet, out)
    for node in agents(fleet, out, new):
        trains(fleet, out)
        recovers(fleet, out)
        assert fleet.versions()[node] == new.name
    assert frozenset({old.name, new.name}) in mixtures(out), "no generation had ranks of both versions"
    assert set(fleet.versions().values()) == {new.name}


def stop_and_resume(fleet: MixedFleet, out: Path) -> None:
    fleet.client.stop(JOB, "a pause")
    fleet.wait_end(JOB)
    saved = fleet.saved_step(JOB)
    fleet.client.resume(JOB)
    generation = trains(fleet, out)
    assert {line["restored"] for line in known_train.lines(out) if line["generation"] == generation} == {saved}


@pytest.mark.parametrize(
    "commit", [COMMITS[0], *(pytest.param(commit, marks=pytest.mark.slow) for commit in COMMITS[1:])]
)
def test_a_fleet_is_upgraded_under_a_running_job(
    commit: str, new: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_JOIN_OPTIONAL", "true")  # agents of the oldest have no token
    old, out = earlier(commit, tmp_path / "old"), tmp_path / "out"
    with mixed_fleet(tmp_path, nodes=3, default=old) as fleet:
        fleet.client.submit(job(out))
        trains(fleet, out)
        upgrade(fleet, out, old, new)
        stop_and_resume(fleet, out)
        assert fleet.complaints() == []
