"""Nodes that are away had newer steps than those at hand: waited for as long as the steps between them would take again."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.evolve import evolve
from holdfast.domain.generations import StoredStep
from holdfast.domain.job import CheckpointSpec
from holdfast.domain.orders import Inventory
from holdfast.supervisor.protocol import JobPhase

STORED, NEWEST, STEP_S = 10, 110, 0.1


def _without_holders() -> Fleet:
    """The store has step 10; step 110 was with two nodes, which are lost, and two spares are free."""
    spec = job(dp=1, pp=2)
    spec = evolve(spec, checkpoint=CheckpointSpec(store="file:///store", interval_steps=5, keep=2))
    fleet = running(spec, spares=2, saved=STORED)
    generation = fleet.job.generation
    assert generation is not None
    held = fleet.state.nodes["n0"].inventory[JOB]
    there = (StoredStep(generation.attempt, STORED, generation.mesh, False),)
    fleet.report("n0", Inventory(JOB, held, there))
    fleet.train(NEWEST, save=True)
    for name in ("n0", "n1"):
        fleet.lose(name)
    return fleet


def test_nodes_that_come_back_at_once_bring_the_newest_step() -> None:
    fleet = _without_holders()
    fleet.wait(fleet.state.config.change_grace_s + 1.0)
    assert fleet.job.phase is not JobPhase.RUNNING
    assert f"nodes that are away had step {NEWEST}, those at hand have step {STORED}" in fleet.job.reason
    for name in ("n0", "n1"):
        shards = fleet.state.nodes[name].inventory[JOB]
        fleet.connect(name)
        fleet.report(name, Inventory(JOB, shards))
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == NEWEST


@pytest.mark.parametrize(("waited", "steps"), [(0.9, None), (1.1, STORED)])
def test_nodes_that_stay_away_cost_no_more_than_the_steps_they_had(waited: float, steps: int | None) -> None:
    fleet = _without_holders()
    first = fleet.job.number
    fleet.wait((NEWEST - STORED) * STEP_S * waited)
    generation = fleet.job.generation
    assert generation is not None
    assert (generation.restore.step if generation.number > first else None) == steps
