"""A job's life: submission, scaling, planned changes, operators' requests, the end."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.errors import Conflict
from holdfast.domain.findings import FindingKind, Severity
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.incidents import CORDONED, REPAIR, RESIZE, ActionKind, IncidentState
from holdfast.domain.job import PolicySpec
from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import CheckpointNow, Prepare, Stop
from holdfast.policy import wait
from holdfast.supervisor.core import check_submission
from holdfast.supervisor.protocol import (
    CheckpointRequested,
    JobPhase,
    JobStopRequested,
    LeaderStarted,
    NodeCordonRequested,
    NodeRepaired,
    PolicyChanged,
    PolicyChangeRequested,
    ResizeRequested,
    StepsCompleted,
)


def degraded() -> Fleet:
    """dp 2 of 3 after a dead GPU, with a checkpoint at 20 and ten steps after it."""
    fleet = running(job(dp=3), saved=10)
    fleet.find(FindingKind.GPU_ERROR, "n2", severity=Severity.FATAL)
    fleet.run()
    fleet.train(20, save=True)
    fleet.train(25)
    return fleet


# ---------------------------------------------------------------- submission


def test_a_second_job_of_the_same_name_is_refused() -> None:
    fleet = running(job(dp=2))
    with pytest.raises(Conflict, match="a job named job is running"):
        check_submission(fleet.state, job(dp=1))
    before = fleet.job
    fleet.submit(job(dp=1))
    assert fleet.job == before
    assert "submission refused" in fleet.notes()


def test_a_later_run_of_the_same_name_never_restores_the_earlier_ones_checkpoints() -> None:
    fleet = running(job(dp=2), saved=10)
    old = fleet.job.generation
    assert old is not None
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough", save=False))
    fleet.answer_orders()
    fleet.submit(job(dp=2))
    fleet.run()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    new = fleet.job.generation
    assert new is not None
    assert new.restore.step == 0
    assert (new.number, new.attempt) > (old.number + 1, old.attempt + 1)


def test_two_jobs_do_not_share_a_spare() -> None:
    fleet = Fleet(5)
    fleet.submit(job(dp=2))
    fleet.submit(job(dp=2, name="other"))
    used = [node for one in fleet.state.jobs.values() if one.generation for node in one.generation.nodes]
    assert len(used) == len(set(used)) == 4
    assert fleet.view.spares == ("n4",)


# ---------------------------------------------------------------- scaling


def test_without_a_spare_the_replica_leaves_and_its_healthy_nodes_become_spares() -> None:
    fleet = running(job(dp=3, pp=2), saved=10)
    fleet.find(FindingKind.GPU_ERROR, "n2", severity=Severity.FATAL)
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.SCALE_DOWN
    fleet.run()
    assert fleet.job.generation is not None
    assert fleet.job.generation.mesh.dp == 2
    assert fleet.job.generation.restore.step == 10
    assert fleet.view.spares == ("n3",)
    assert fleet.nodes() == ("n0", "n1", "n4", "n5")


def test_below_the_fewest_replicas_the_job_waits_and_goes_on_when_a_node_comes() -> None:
    fleet = running(job(dp=2, min_dp=2), saved=10)
    fleet.lose("n1")
    assert fleet.job.phase is JobPhase.WAITING
    assert set(fleet.orders(Stop)) == {"n0"}
    fleet.answer_orders()
    fleet.connect("n2")
    fleet.expect(JobPhase.PREPARING)
    fleet.run()
    assert fleet.incident.state is IncidentState.RESOLVED


def test_repair_waits_for_a_fresh_checkpoint_and_costs_few_steps() -> None:
    fleet = degraded()
    fleet.fold(NodeRepaired(fleet.now, "n2"))
    assert fleet.incident.kind == REPAIR
    assert fleet.job.phase is JobPhase.RUNNING
    order = fleet.orders(CheckpointNow)["n0"]
    assert isinstance(order, CheckpointNow)
    assert 40 < order.at_step <= 50, (
        "no rank has passed it when the order arrives, so that every script is notified before it"
    )
    assert order.leaving == "scale_up: 3 of 3 replicas can run now, and 2 run"
    fleet.train(order.at_step)
    assert not fleet.orders(Prepare)
    fleet.save(order.at_step)
    assert set(fleet.orders(Prepare)) == {"n0", "n1", "n2"}
    fleet.run()
    incident = fleet.incident
    assert incident.action is not None
    assert incident.action.kind is ActionKind.SCALE_UP
    assert incident.restored_step == order.at_step
    assert incident.rework_steps == 0
    assert fleet.job.generation is not None
    assert fleet.job.generation.mesh.dp == 3


def test_a_repair_without_a_checkpoint_is_postponed_not_forced() -> None:
    fleet = degraded()
    fleet.train(45)  # the saves at 30 and 40 never became complete
    fleet.fold(NodeRepaired(fleet.now, "n2"))
    for _ in range(3):
        fleet.wait(13)
    assert fleet.job.number == 2
    assert "postponed" in next(i.outcome for i in fleet.state.closed if i.kind == REPAIR)


def test_a_fault_overtakes_a_planned_change() -> None:
    fleet = degraded()
    fleet.fold(NodeRepaired(fleet.now, "n2"))
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0)
    assert fleet.job.planned is None
    fleet.run()
    repair = next(i for i in fleet.state.closed if i.kind == REPAIR)
    assert "overtaken" in repair.outcome


def test_resize_down_and_up_again() -> None:
    fleet = running(job(dp=3), saved=10)
    fleet.fold(ResizeRequested(fleet.now, JOB, 2, "the other team needs a node"))
    assert fleet.incident.kind == RESIZE
    assert fleet.incident.decided_by == "operator"
    fleet.save_asked()
    fleet.run()
    assert fleet.job.generation is not None
    assert fleet.job.generation.mesh.dp == 2
    fleet.fold(ResizeRequested(fleet.now, JOB, 3, "back"))
    fleet.save_asked()
    fleet.run()
    assert fleet.job.generation is not None
    assert fleet.job.generation.mesh.dp == 3


def test_a_resize_outside_the_jobs_range_is_refused() -> None:
    fleet = running(job(dp=3, min_dp=2))
    fleet.fold(ResizeRequested(fleet.now, JOB, 1, "less"))
    assert not fleet.state.incidents
    assert "it accepts 2 … 3 replicas" in fleet.notes()


# ---------------------------------------------------------------- operators


def test_a_cordoned_active_node_is_swapped_after_a_checkpoint() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.train(12)
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "new firmware"))
    assert fleet.incident.kind == CORDONED
    assert fleet.job.phase is JobPhase.RUNNING
    fleet.save_asked()
    fleet.run()
    assert fleet.nodes() == ("n0", "n3", "n2")
    assert fleet.state.nodes["n1"].state is NodeState.CORDONED
    fleet.fold(NodeCordonRequested(fleet.now, "n1", False, "done"))
    assert fleet.view.spares == ("n1",)


def test_a_planned_swap_waits_while_the_run_trains_for_what_a_new_leader_does_not_know_yet() -> None:
    fleet = running(job(dp=2), spares=2, saved=10)
    first = fleet.job.running
    assert first is not None
    fleet.inventory("n3", ShardRecord(ShardKey(first.attempt, 10, 0), first.mesh, "memory", 1, "10@0", "n0"))
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.hello("n2")
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "new firmware"))
    assert fleet.job.phase is JobPhase.RUNNING
    for node in ("n0", "n1"):
        fleet.hello(node, running=1)
    fleet.save_asked()
    assert fleet.job.phase is JobPhase.RUNNING, "what n3 holds is not known"
    fleet.wait(5.1)
    fleet.run()
    assert fleet.nodes() == ("n0", "n2")


def test_a_cordon_without_a_spare_leaves_a_healthy_run_alone_until_one_comes() -> None:
    fleet = running(job(dp=2, min_dp=2), saved=10)
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "new firmware"))
    assert fleet.job.phase is JobPhase.RUNNING
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.WAIT
    fleet.connect("n2")
    fleet.save_asked()
    fleet.run()
    assert fleet.nodes() == ("n0", "n2")


def test_a_cordon_that_waits_for_a_spare_is_carried_out_when_a_node_is_uncordoned() -> None:
    fleet = running(job(dp=2, min_dp=2), spares=1, saved=10)
    fleet.fold(NodeCordonRequested(fleet.now, "n2", True, "new firmware"))
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "new firmware"))
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.WAIT
    fleet.train(12)
    fleet.fold(NodeCordonRequested(fleet.now, "n2", False, "done"))
    fleet.save_asked()
    fleet.run()
    assert fleet.nodes() == ("n0", "n2")


def test_checkpoint_now_reaches_every_node_at_one_step_ahead() -> None:
    """Ahead of where the ranks may be by now: at 0.1 s a step, 16 since its report arrived here, 6 until the order is there."""
    fleet = running(job(dp=3))
    fleet.train(12)
    fleet.fold(CheckpointRequested(fleet.now, JOB))
    orders = fleet.orders(CheckpointNow)
    assert set(orders) == {"n0", "n1", "n2"}
    assert {order.at_step for order in orders.values() if isinstance(order, CheckpointNow)} == {12 + 16 + 6 + 2}


# ---------------------------------------------------------------- the end


def test_a_job_is_complete_when_every_rank_has_ended_well() -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.finish()
    assert fleet.job.phase is JobPhase.COMPLETED
    stops = [order for order in fleet.orders(Stop).values() if isinstance(order, Stop)]
    assert all(order.ended and not order.forget for order in stops), "what it has saved stays"
    fleet.answer_orders()
    assert {node.state for node in fleet.state.nodes.values()} == {NodeState.SPARE}
    assert not list(fleet.state.sends())


def test_a_stop_saves_first_then_stops_everyone() -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.train(12)
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough"))
    assert fleet.job.phase is JobPhase.STOPPING
    assert not fleet.orders(Stop)
    fleet.train(36, save=True)
    assert set(fleet.orders(Stop)) == {"n0", "n1"}
    fleet.answer_orders()
    assert (fleet.job.phase, fleet.job.reason) == (JobPhase.STOPPED, "enough")


def test_a_stop_does_not_wait_for_ever() -> None:
    fleet = running(job(dp=2))
    fleet.train(12)
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough"))
    fleet.wait(2 * fleet.state.config.save_s)
    assert set(fleet.orders(Stop)) == {"n0", "n1"}
    fleet.gone("n1")
    fleet.answer_orders("n1")
    assert fleet.job.phase is JobPhase.STOPPED
    assert [send.node for send in fleet.state.sends()] == ["n1"], "it gets the order when it comes back"


def test_a_pending_job_stops_at_once() -> None:
    fleet = Fleet(1)
    fleet.submit(job(dp=2))
    fleet.fold(JobStopRequested(fleet.now, JOB, "never mind"))
    assert fleet.job.phase is JobPhase.STOPPED
    fleet.connect("n1")
    assert fleet.job.phase is JobPhase.STOPPED


def test_a_job_that_no_node_can_prepare_fails_and_says_why() -> None:
    fleet = Fleet(1)
    fleet.submit(job(dp=1))
    for _ in range(3):
        fleet.done("n0", Prepare, ok=False, reason="/train.py does not exist")
        fleet.answer_orders()
        fleet.wait(10.1)
    assert fleet.job.phase is JobPhase.FAILED
    assert "/train.py does not exist" in fleet.job.reason


def test_when_the_holders_of_all_saved_steps_are_away_the_job_waits_for_them() -> None:
    fleet = running(job(dp=2), spares=2, saved=10)
    for number in (20, 30):
        fleet.train(number, save=True)
    fleet.wait(5)  # the spares have had the time to say what they hold
    fleet.decide = False
    fleet.lose("n0")
    fleet.lose("n1")
    while fleet.questions:
        fleet.answer()
    assert fleet.job.phase is JobPhase.WAITING
    assert "none is complete on the nodes at hand" in fleet.job.reason
    fleet.decide = True
    fleet.hello("n0", running=1)
    fleet.inventory("n0")
    fleet.expect(JobPhase.PREPARING)
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 30


def test_the_wait_for_lost_holders_ends_even_when_the_breaker_was_open_at_that_moment() -> None:
    fleet = running(job(dp=2), spares=4, saved=10)
    for number in (20, 30):
        fleet.train(number, save=True)
    fleet.wait(5)
    fleet.decide = False
    fleet.lose("n0")
    fleet.lose("n1")
    while fleet.questions:
        fleet.answer()
    assert fleet.job.phase is JobPhase.WAITING
    fleet.gone("n5")
    fleet.wait(6)
    fleet.find(FindingKind.GPU_ERROR, "n4", severity=Severity.FATAL, generation=0)
    assert fleet.state.breaker.open_until is not None
    fleet.wait(100)
    assert fleet.job.phase is JobPhase.WAITING
    fleet.decide = True
    fleet.wait(205)
    fleet.expect(JobPhase.PREPARING)
    assert "starts again from step 0" in fleet.notes()


# ---------------------------------------------------------------- workers that nobody knows


def test_workers_of_an_unknown_job_are_left_alone_until_an_operator_stops_them() -> None:
    fleet = Fleet(1)
    fleet.connect("n1", running=7)
    assert not fleet.sent
    assert "not known here: left alone" in fleet.notes()
    fleet.submit(job(dp=2, name="other"))
    before = fleet.state.jobs["other"].phase
    assert before is JobPhase.PENDING, "n1 is not free"
    fleet.fold(JobStopRequested(fleet.now, JOB, "clean up"))
    assert set(fleet.orders(Stop)) == {"n1"}
    fleet.answer_orders()
    assert fleet.state.jobs["other"].phase is JobPhase.STARTING


def test_workers_of_a_finished_job_are_stopped_when_their_node_comes_back() -> None:
    fleet = running(job(dp=2))
    fleet.gone("n1")
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough", save=False))
    fleet.answer_orders()
    assert fleet.job.phase is JobPhase.STOPPED
    fleet.hello("n1", running=1)
    assert set(fleet.orders(Stop)) == {"n1"}


def test_the_last_step_and_its_loss_are_on_record_although_they_are_reported_after_the_end() -> None:
    fleet = running(job(dp=2), saved=10)
    number = fleet.job.number
    fleet.fold(StepsCompleted(fleet.now, JOB, number, 11, fleet.now, loss=2.5))
    fleet.finish()
    assert (fleet.job.phase, fleet.job.progress.step, fleet.job.progress.loss) == (JobPhase.COMPLETED, 11, 2.5)
    fleet.fold(StepsCompleted(fleet.now, JOB, number, 13, fleet.now, loss=1.5))
    fleet.fold(StepsCompleted(fleet.now, JOB, number, 12, fleet.now, loss=9.5))
    assert (fleet.job.progress.step, fleet.job.progress.loss) == (13, 1.5), (
        "what a supervisor that is started again knows"
    )


def test_another_policy_decides_from_the_next_question_on_and_a_job_that_waits_is_decided_about_again() -> None:
    fleet = running(job(dp=2, min_dp=2), decide=False)
    fleet.lose("n1")
    fleet.answer(wait("for a person"))
    assert fleet.job.phase is JobPhase.WAITING
    assert not fleet.questions
    policy = PolicySpec("other.py", "x = 1\n", {"swaps": 3})
    fleet.fold(PolicyChangeRequested(fleet.now, JOB, policy))
    assert fleet.job.spec.policy_spec == policy
    assert PolicyChanged(fleet.now, JOB, policy) in fleet.records
    assert [question.job for question in fleet.questions] == [JOB], (
        "it waited because of what the other policy had said"
    )
    assert fleet.view.params == {"swaps": 3}


def test_the_policy_of_a_job_that_is_over_stays_as_it_was() -> None:
    fleet = running(job(dp=2))
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough", save=False))
    fleet.answer_orders()
    before = fleet.job.spec
    fleet.fold(PolicyChangeRequested(fleet.now, JOB, PolicySpec("other.py", "x = 1\n")))
    assert fleet.job.spec == before


# ---------------------------------------------------------------- the script is notified before a planned change


def leaving(fleet: Fleet) -> set[tuple[int, str]]:
    """Step and reason of every order that tells the workers of a change, without repetition over the nodes."""
    orders = [send.order for send in fleet.sent if isinstance(send.order, CheckpointNow)]
    return {(order.at_step, order.leaving) for order in orders if order.leaving}


def test_a_planned_change_is_announced_to_every_node_with_its_reason() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "new firmware"))
    orders = fleet.orders(CheckpointNow)
    assert set(orders) == {"n0", "n1", "n2"}
    ((at_step, reason),) = leaving(fleet)
    assert at_step > fleet.job.progress.step, "also when everything has just been saved"
    assert reason == "hot_swap: n1 is cordoned, and a spare node is free"


def test_a_save_that_is_ahead_already_is_announced_to_the_script() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.train(12)
    fleet.fold(CheckpointRequested(fleet.now, JOB))
    first = fleet.orders(CheckpointNow)["n0"]
    assert isinstance(first, CheckpointNow)
    assert (first.to_object_store, first.leaving) == (True, "")
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "new firmware"))
    second = fleet.orders(CheckpointNow)["n0"]
    assert isinstance(second, CheckpointNow)
    assert (second.at_step, second.to_object_store) == (first.at_step, True)
    assert second.leaving


def test_what_a_script_does_between_its_steps_counts_for_how_far_ahead_the_save_is() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.now += 0.5
    fleet.fold(StepsCompleted(fleet.now, JOB, fleet.job.number, 12, fleet.now, step_s=0.001, pace_s=0.1))
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "new firmware"))
    ((at_step, _),) = leaving(fleet)
    assert at_step == 12 + 2 + 22, "2.2 s ahead, not 2,200 steps"


def test_a_stop_that_saves_tells_the_script_and_one_that_does_not_has_nothing_to_tell_it_by() -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough", save=True))
    ((at_step, reason),) = leaving(fleet)
    assert reason == "stop: enough"
    assert at_step > 10
    fleet = running(job(dp=2), saved=10)
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough", save=False))
    assert leaving(fleet) == set()


def test_saves_that_nothing_follows_and_unplanned_losses_tell_the_script_nothing() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.fold(CheckpointRequested(fleet.now, JOB))
    fleet.find(FindingKind.GPU_ERROR, "n2", severity=Severity.FATAL)
    fleet.run()
    assert fleet.nodes() == ("n0", "n1", "n3")
    assert leaving(fleet) == set()


def test_a_start_that_a_wrong_command_line_ends_announces_no_other_change() -> None:
    fleet = Fleet(1, decide=False)
    fleet.submit(job(dp=1))
    fleet.answer_orders()
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0, blame="user", error_class="usage")
    assert fleet.job.reason.startswith("generation 1 is abandoned, and the policy is asked: worker_crash on n0")
    fleet.answer()
    fleet.expect(JobPhase.FAILED)
    assert "Correct the command line" in fleet.job.reason
