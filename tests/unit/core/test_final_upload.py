"""A job that completes while its last checkpoint is on its way to the object store."""

from __future__ import annotations

from dataclasses import replace

from fleet import JOB, Fleet, job, running

from holdfast.domain.generations import StoredStep
from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import CheckpointNow, Inventory, Stop
from holdfast.supervisor.protocol import JobPhase


def completed(*, saved: int = 20, late: bool = False) -> Fleet:
    """Two nodes; the last save is at step 20. `late`: it is reported after the workers have ended."""
    spec = job(dp=2)
    fleet = running(replace(spec, checkpoint=replace(spec.checkpoint, store="gs://bucket/p")), saved=10)
    if not late:
        fleet.train(saved, save=True)
    fleet.finish()
    if late:
        fleet.save(saved)
    return fleet


def store(fleet: Fleet, step: int, damage: str = "") -> None:
    generation = fleet.job.running
    assert generation is not None
    held = fleet.state.nodes["n0"].inventory[JOB]
    stored = StoredStep(generation.attempt, step, generation.mesh, False, damage)
    fleet.report("n0", Inventory(JOB, held, (stored,)))


def asked(fleet: Fleet) -> dict[str, int]:
    orders = fleet.orders(CheckpointNow)
    return {
        node: order.at_step
        for node, order in orders.items()
        if isinstance(order, CheckpointNow) and order.to_object_store
    }


def over(fleet: Fleet) -> bool:
    """Whether every node is informed that the job has ended, and none is ordered to delete its files."""
    orders = fleet.orders(Stop)
    stops = [order for order in orders.values() if isinstance(order, Stop)]
    return set(orders) == {"n0", "n1"} and all(order.ended and not order.forget for order in stops)


def status(fleet: Fleet) -> str:
    assert fleet.job.final_upload is not None
    return fleet.job.final_upload.status


def test_its_files_stay_until_the_last_step_is_in_the_store() -> None:
    fleet = completed()
    assert fleet.job.phase is JobPhase.COMPLETED
    assert asked(fleet) == {"n0": 20, "n1": 20}
    assert not fleet.orders(Stop)
    assert status(fleet) == "step 20 is going to the object store"
    assert {node.state for node in fleet.state.nodes.values()} == {NodeState.SPARE}, "its nodes are free meanwhile"
    fleet.answer_orders()
    store(fleet, 10)
    assert not fleet.orders(Stop)
    store(fleet, 20)
    assert status(fleet) == "step 20 is in the object store"
    assert over(fleet)
    fleet.answer_orders()
    assert not list(fleet.state.sends())
    assert not fleet.state.timers


def test_a_last_save_that_is_reported_after_the_end_is_uploaded() -> None:
    fleet = completed(late=True)
    assert asked(fleet) == {"n0": 20, "n1": 20}
    store(fleet, 20)
    assert over(fleet)


def test_a_store_that_does_not_answer_is_waited_for_and_not_for_ever() -> None:
    fleet = completed()
    fleet.answer_orders()
    fleet.wait(fleet.state.config.report_store_s - 1)
    assert not fleet.orders(Stop)
    fleet.wait(2)
    assert status(fleet) == "step 20 did not reach the object store in time"
    assert set(fleet.orders(Stop)) == {"n0", "n1"}
    assert "completed: step 20 did not reach the object store in time" in fleet.notes()


def test_what_is_in_the_store_already_is_not_waited_for() -> None:
    fleet = running(replace(job(dp=2), checkpoint=replace(job(dp=2).checkpoint, store="gs://bucket/p")), saved=10)
    store(fleet, 10)
    fleet.finish()
    assert fleet.job.final_upload is None
    assert set(fleet.orders(Stop)) == {"n0", "n1"}


def test_a_damaged_copy_in_the_store_is_none() -> None:
    fleet = running(replace(job(dp=2), checkpoint=replace(job(dp=2).checkpoint, store="gs://bucket/p")), saved=10)
    store(fleet, 10, damage="rank 0")
    fleet.finish()
    assert asked(fleet) == {"n0": 10, "n1": 10}


def test_the_name_is_free_for_another_run_meanwhile() -> None:
    fleet = completed()
    fleet.submit(job(dp=2))
    assert fleet.job.phase is JobPhase.PREPARING
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    fleet.wait(fleet.state.config.report_store_s + 1)
    assert not any(isinstance(order, Stop) and order.ended for order in fleet.orders(Stop).values())
