"""A name that has checkpoints is submitted again: it goes on from one of them, or starts beside them, and says which."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.domain.findings import FindingKind
from holdfast.domain.generations import ShardKey, StoredStep
from holdfast.domain.job import JobSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import OrderDone, Prepare, Stop
from holdfast.supervisor.core import check_earlier
from holdfast.supervisor.protocol import JobPhase, JobStopRequested, JobSubmitted, StartFrom

SPEC = job(dp=2)


def stopped(spec: JobSpec = SPEC) -> Fleet:
    fleet = running(spec, saved=10)
    fleet.train(20, save=True)
    stop(fleet)
    return fleet


def stop(fleet: Fleet) -> None:
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough", save=False))
    fleet.answer_orders()
    assert fleet.job.phase is JobPhase.STOPPED
    fleet.answer_orders()


def again(
    fleet: Fleet, start: StartFrom = StartFrom.CHECKPOINT, step: int | None = None, spec: JobSpec = SPEC
) -> JobSubmitted:
    """As the shell does it: what is refused raises, what is not is folded."""
    fleet.now += 1
    event = JobSubmitted(fleet.now, spec, "another token", start=start, step=step)
    check_earlier(fleet.state, event)
    fleet.fold(event)
    return event


def prepares(fleet: Fleet) -> list[Prepare]:
    return [order for order in fleet.orders(Prepare).values() if isinstance(order, Prepare)]


def test_a_name_that_has_checkpoints_is_refused_until_it_is_said_what_becomes_of_them() -> None:
    fleet = stopped()
    with pytest.raises(
        Conflict, match=r"job has checkpoints, the newest of step 20 \(on n0, n1\): .* --resume .* --fresh .*"
    ):
        again(fleet, StartFrom.NOTHING)


def test_it_goes_on_from_the_newest_complete_step_with_the_key_to_what_is_there() -> None:
    fleet = stopped()
    saved_by = fleet.job.running
    assert saved_by is not None
    again(fleet)
    orders = prepares(fleet)
    assert {order.restore_step for order in orders} == {20}
    assert {restore.shard.attempt for order in orders for restore in order.restore} == {saved_by.attempt}
    assert {order.token for order in orders} == {"token"}, "the nodes hand their shards out to who has it"
    assert all(saved_by.attempt < order.first_attempt == order.attempt for order in orders)
    assert all(order.generation > saved_by.number for order in orders)
    assert (fleet.job.progress.step, fleet.job.checkpoints.resumed) == (
        20,
        StoredStep(saved_by.attempt, 20, Mesh.of({"dp": 2}), False),
    )
    fleet.run()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert {order.restore_step for order in prepares(fleet)} == {20}, "until it has saved itself"


def test_it_starts_at_step_0_when_that_is_said_and_its_steps_are_no_part_of_the_others_lineage() -> None:
    fleet = stopped()
    again(fleet, StartFrom.SCRATCH)
    assert {order.restore_step for order in prepares(fleet)} == {0}
    fleet.run()
    fleet.train(10, save=True)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert {order.restore_step for order in prepares(fleet)} == {10}, "and not the 20 of the submission before"
    fleet.run()
    stop(fleet)
    again(fleet)
    assert {order.restore_step for order in prepares(fleet)} == {10}


def test_a_step_can_be_named_also_one_of_an_earlier_submission() -> None:
    fleet = stopped()
    again(fleet, StartFrom.SCRATCH)
    fleet.run()
    fleet.train(10, save=True)
    stop(fleet)
    again(fleet, step=20)
    assert {order.restore_step for order in prepares(fleet)} == {20}


def test_a_submission_that_saved_nothing_leaves_the_ones_before_it_to_go_on_from() -> None:
    fleet = stopped()
    again(fleet, StartFrom.SCRATCH)
    fleet.run()
    stop(fleet)
    again(fleet)
    assert {order.restore_step for order in prepares(fleet)} == {20}


def test_what_the_last_run_gave_up_is_not_gone_on_from_unless_it_is_named() -> None:
    fleet = running(SPEC, saved=10)
    fleet.train(20, save=True)
    fleet.find(FindingKind.NUMERICAL, "n0", rank=0, verified_step="10")
    fleet.run()
    stop(fleet)
    again(fleet)
    assert {order.restore_step for order in prepares(fleet)} == {10}
    fleet.run()
    stop(fleet)
    again(fleet, step=20)
    assert {order.restore_step for order in prepares(fleet)} == {20}


@pytest.mark.parametrize("step", [None, 15])
def test_a_step_that_is_not_there_is_answered_with_those_that_are(step: int | None) -> None:
    fleet = stopped() if step else Fleet(2)
    with pytest.raises(NotFound, match="complete steps: 20, 10" if step else "no complete checkpoint of job .* none"):
        again(fleet, step=step)


def test_another_mesh_cannot_go_on_from_it_another_number_of_replicas_can() -> None:
    fleet = stopped(job(dp=2, pp=2))
    with pytest.raises(InvalidSpec, match=r"the mesh that saved step 20"):
        again(fleet, spec=job(dp=4))
    again(fleet, spec=job(dp=1, pp=2))
    assert {order.restore_step for order in prepares(fleet)} == {20}


def test_a_step_whose_nodes_are_away_is_not_replaced_by_an_older_one() -> None:
    fleet = stopped()
    fleet.gone("n0", "n1")
    with pytest.raises(Conflict, match="step 20 of job needs shards of n0, n1, which cannot be reached now"):
        again(fleet)


def test_it_waits_for_a_node_that_has_gone_before_it_could_start_and_does_not_go_further_back() -> None:
    fleet = stopped()
    fleet.gone("n0")
    again(fleet)  # n1 has the copies: complete, and one node is too few
    fleet.gone("n1")
    fleet.connect("n0")  # with nothing on its disks
    fleet.connect("n2")
    assert not prepares(fleet)
    assert fleet.job.phase is JobPhase.PENDING
    assert (
        fleet.job.reason
        == "step 20, from which the job must continue, cannot be restored now: no connected node holds any of it"
    )


def test_a_step_that_turns_out_to_be_damaged_is_replaced_by_the_one_before_it() -> None:
    fleet = stopped()
    again(fleet)
    send = next(send for send in fleet.sent if isinstance(send.order, Prepare))
    fleet.report(send.node, OrderDone(send.command_id, False, "checksum", unrestorable=True))
    assert {order.restore_step for order in prepares(fleet)} == {10}


def test_what_is_in_the_object_store_alone_is_gone_on_from_too() -> None:
    spec = replace(SPEC, checkpoint=replace(SPEC.checkpoint, store="gs://bucket/p"))
    fleet = Fleet(2)
    found = StoredStep(700, 1200, Mesh.of({"dp": 2}), False)
    event = JobSubmitted(fleet.now, spec, "token", found=found)
    with pytest.raises(Conflict, match=r"the newest of step 1200 \(in its object store\)"):
        check_earlier(fleet.state, event)
    fleet.fold(replace(event, start=StartFrom.CHECKPOINT))
    for order in prepares(fleet):
        assert [restore.shard for restore in order.restore] == [ShardKey(700, 1200, order.placement.first_rank)]


def test_a_supervisor_that_has_forgotten_the_job_goes_by_what_the_nodes_hold() -> None:
    fleet = stopped()
    attempt = fleet.job.numbering.attempt_base + fleet.job.number
    fleet.state = replace(fleet.state, jobs={}, outbox={}).indexed(None)  # type: ignore[arg-type]
    fleet.now = 5.0  # and its clock is behind
    with pytest.raises(Conflict, match="the newest of step 20"):
        again(fleet, StartFrom.NOTHING)
    again(fleet)
    assert {(order.restore_step, order.attempt > attempt) for order in prepares(fleet)} == {(20, True)}


def test_a_supervisor_that_has_forgotten_the_job_starts_beside_what_the_nodes_hold() -> None:
    """Its clock is behind: the time alone would name the attempt of files that are there already."""
    fleet = stopped()
    attempt = fleet.job.numbering.attempt_base + fleet.job.number
    fleet.state = replace(fleet.state, jobs={}, outbox={}).indexed(None)  # type: ignore[arg-type]
    fleet.now = 5.0
    again(fleet, StartFrom.SCRATCH)
    assert {(order.restore_step, order.attempt > attempt) for order in prepares(fleet)} == {(0, True)}


def test_nothing_tells_a_node_to_delete_anything() -> None:
    fleet = stopped()
    for start in (StartFrom.CHECKPOINT, StartFrom.SCRATCH):
        again(fleet, start)
        fleet.run()
        stops = [send.order for send in fleet.sent if isinstance(send.order, Stop)]
        assert not any(order.forget for order in stops)
        stop(fleet)
