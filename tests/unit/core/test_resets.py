"""A GPU that must be reset: who is asked, what waits for it, what follows when it fails. Every fold goes through a snapshot."""

from __future__ import annotations

import dataclasses

import pytest
from fleet import JOB, Fleet, job

from holdfast.domain.findings import FindingKind, Remedy, Severity
from holdfast.domain.incidents import Action, ActionKind, IncidentState
from holdfast.domain.job import JobSpec
from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import OrderDone, Prepare, ResetGpu, Start, Stop
from holdfast.policy import check, gpu_reset, hot_swap, notify, restart
from holdfast.supervisor.core.model.indexing import index_of
from holdfast.supervisor.core.model.lifecycle import Replanning, Resetting
from holdfast.supervisor.core.model.state import ResetDue
from holdfast.supervisor.protocol import (
    BreakerResetRequested,
    JobPhase,
    JobStopRequested,
    LeaderStarted,
    NodeCordonRequested,
    NodeRepaired,
    Send,
)

RESET_CLASS = (Remedy.RESET_GPU, Remedy.REBOOT_NODE, Remedy.REPLACE_NODE)


def running(spec: JobSpec, spares: int = 0, *, decide: bool = True, resets_gpus: bool = True) -> Fleet:
    fleet = Fleet(spec.nodes + spares, capacity=spec.nproc_per_node, decide=decide, resets_gpus=resets_gpus)
    fleet.submit(spec)
    fleet.run()
    fleet.train(20, save=True)
    return fleet


def xid(fleet: Fleet, node: str, gpu: int | None = 0, **changes: object) -> None:
    fleet.now += 0.1
    fleet.find(FindingKind.GPU_ERROR, node, gpu=gpu, recommended_actions=RESET_CLASS, generation=0, **changes)  # type: ignore[arg-type]


def stop_answered(fleet: Fleet, *nodes: str) -> None:
    for node in nodes:
        fleet.done(node, Stop)


def answer_reset(fleet: Fleet, node: str, *, ok: bool = True, reason: str = "") -> None:
    send = next(send for send in fleet.sent if send.node == node and isinstance(send.order, ResetGpu))
    phases = (("gpu_reset", 4.0), ("self_test", 1.5)) if ok else ()
    fleet.report(node, OrderDone(send.command_id, ok, reason, at=fleet.now, phases_s=phases))


def resets(fleet: Fleet) -> dict[str, tuple[int, ...]]:
    return {node: order.gpus for node, order in fleet.orders(ResetGpu).items() if isinstance(order, ResetGpu)}


# ---------------------------------------------------------------- the way through


def test_workers_stop_then_the_gpu_is_reset_then_the_same_nodes_start() -> None:
    fleet = running(job(dp=3), spares=1)
    xid(fleet, "n1")
    assert fleet.incident.action is not None
    assert (fleet.incident.action.kind, fleet.incident.decided_by) == (ActionKind.GPU_RESET, "default policy")
    assert "GPU 0 of n1 must be reset before it is used again" in fleet.incident.action.reason
    fleet.expect(JobPhase.PREPARING)
    assert isinstance(fleet.job.doing, Resetting)
    assert set(fleet.orders(Stop)) == {"n0", "n1", "n2"}
    assert not resets(fleet), "its workers may still run"

    stop_answered(fleet, "n1")
    assert resets(fleet) == {"n1": (0,)}, "it does not wait for the other nodes"
    stop_answered(fleet, "n0", "n2")
    assert not fleet.orders(Prepare)
    answer_reset(fleet, "n1")
    assert set(fleet.orders(Prepare)) == {"n0", "n1", "n2"}
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.nodes() == ("n0", "n1", "n2")
    assert fleet.incident.state is IncidentState.RESOLVED
    assert fleet.incident.action.kind is ActionKind.GPU_RESET
    assert (fleet.incident.restored_step, fleet.incident.phases_s["gpu_reset"]) == (20, 4.0)
    assert fleet.state.nodes["n1"].reset_due is None


@pytest.mark.parametrize("state", [Resetting])
def test_a_job_that_waits_for_a_reset_can_be_stopped(state: type) -> None:
    fleet = running(job(dp=2))
    xid(fleet, "n1")
    assert isinstance(fleet.job.doing, state)
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough"))
    fleet.answer_orders()
    fleet.expect(JobPhase.STOPPED)
    assert fleet.state.nodes["n1"].reset_due is None, "an idle node is reset, too"
    assert not [timer for timer in fleet.state.timers if str(timer).startswith("reset:")]


def test_a_worker_crash_that_was_found_first_does_not_restart_on_the_gpu() -> None:
    """The crash is decided in milliseconds, and the kernel's line follows: the change in flight is given up."""
    fleet = running(job(dp=3))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert set(fleet.orders(Prepare)) == {"n0", "n1", "n2"}
    xid(fleet, "n1")
    assert not fleet.orders(Prepare)
    assert isinstance(fleet.job.doing, Resetting)
    assert (fleet.incident.kind, fleet.incident.action and fleet.incident.action.kind) == (
        FindingKind.GPU_ERROR, ActionKind.GPU_RESET,
    )  # fmt: skip
    fleet.answer_orders()
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.job.number == 3


def test_a_second_gpu_is_reset_before_the_job_goes_on() -> None:
    fleet = running(job(dp=2, nproc=2))
    xid(fleet, "n0", 0)
    stop_answered(fleet, "n0")
    assert resets(fleet) == {"n0": (0,)}
    xid(fleet, "n0", 1)
    answer_reset(fleet, "n0")
    assert resets(fleet) == {"n0": (1,)}
    answer_reset(fleet, "n0")
    assert fleet.state.nodes["n0"].reset_due is None
    assert fleet.orders(Prepare)


def test_an_answer_says_nothing_of_what_was_found_since_the_order() -> None:
    """The reset was over, its answer on the way, and the GPU failed again."""
    fleet = running(job(dp=2))
    xid(fleet, "n1")
    stop_answered(fleet, "n0", "n1")
    first = next(send for send in fleet.sent if isinstance(send.order, ResetGpu))
    xid(fleet, "n1")
    answer_reset(fleet, "n1")
    assert not fleet.orders(Prepare)
    [second] = [send for send in fleet.sent if isinstance(send.order, ResetGpu)]
    assert second.command_id != first.command_id
    answer_reset(fleet, "n1")
    assert fleet.orders(Prepare)


def test_a_gpu_that_no_line_names_means_all_of_the_node() -> None:
    fleet = running(job(dp=2))
    xid(fleet, "n1", 3)
    xid(fleet, "n1", None)
    stop_answered(fleet, "n1")
    assert resets(fleet) == {"n1": ()}


def test_two_nodes_are_reset_together() -> None:
    fleet = running(job(dp=3))
    xid(fleet, "n1")
    xid(fleet, "n2", since=fleet.now + 5)
    fleet.now += 5
    fleet.answer_orders()
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.nodes() == ("n0", "n1", "n2")
    assert fleet.job.number == 2


def test_an_older_line_says_nothing_of_a_gpu_that_was_reset_since() -> None:
    fleet = running(job(dp=2))
    began = fleet.now
    xid(fleet, "n1")
    fleet.now += 5
    fleet.answer_orders()
    fleet.step_all()
    xid(fleet, "n1", since=began, name="late")
    assert "its GPUs were reset or repaired since" in fleet.notes()
    fleet.expect(JobPhase.RUNNING)


# ---------------------------------------------------------------- no rank without a reset


@pytest.mark.parametrize(
    "answer", [restart("no patience"), hot_swap("a spare", "n0"), Action(ActionKind.SCALE_UP, "more")]
)
def test_no_answer_of_a_policy_starts_ranks_on_the_gpu(answer: Action) -> None:
    fleet = running(job(dp=3), spares=2, decide=False)
    xid(fleet, "n1")
    fleet.answer(answer, "policy.py")
    fleet.answer_orders()
    if "n1" in fleet.nodes():
        assert "default policy, because policy.py answered" in fleet.incident.decided_by
        assert fleet.state.nodes["n1"].reset_at


def test_without_a_command_a_spare_takes_over_and_the_node_waits_for_an_operator() -> None:
    fleet = running(job(dp=3), spares=1, resets_gpus=False)
    xid(fleet, "n1")
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.HOT_SWAP
    assert "not possible (its agent has no command that resets GPUs)" in fleet.incident.action.reason
    fleet.run()
    assert fleet.nodes() == ("n0", "n3", "n2")
    assert (fleet.state.nodes["n1"].state, fleet.view.spares) == (NodeState.CORDONED, ())
    assert not resets(fleet)
    fleet.fold(NodeRepaired(fleet.now, "n1"))
    assert (fleet.state.nodes["n1"].state, fleet.view.spares) == (NodeState.SPARE, ("n1",))


def test_without_command_and_spare_the_job_shrinks_or_waits() -> None:
    fleet = running(job(dp=3), resets_gpus=False)
    xid(fleet, "n1")
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.SCALE_DOWN
    fleet = running(job(dp=2, min_dp=2), resets_gpus=False)
    xid(fleet, "n1")
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.WAIT
    fleet.answer_orders()
    fleet.expect(JobPhase.WAITING)


def test_an_idle_node_is_reset_and_after_its_hold_down_is_a_spare_again() -> None:
    fleet = running(job(dp=2), spares=1)
    xid(fleet, "n2")
    assert (fleet.view.spares, resets(fleet)) == ((), {"n2": (0,)})
    fleet.expect(JobPhase.RUNNING)
    answer_reset(fleet, "n2")
    assert not fleet.view.spares
    fleet.wait(fleet.state.config.returns.hold_s)
    assert fleet.view.spares == ("n2",)
    assert fleet.state.nodes["n2"].probation is not None


def test_a_warning_demands_no_reset() -> None:
    fleet = running(job(dp=2))
    fleet.find(
        FindingKind.GPU_ERROR,
        "n1",
        gpu=0,
        severity=Severity.WARNING,
        recommended_actions=(Remedy.WATCH, Remedy.RESET_GPU),
    )
    assert fleet.state.nodes["n1"].reset_due is None
    fleet.expect(JobPhase.RUNNING)


def test_a_run_that_a_policy_lets_go_on_keeps_its_gpu_until_it_ends() -> None:
    fleet = running(job(dp=2), decide=False)
    xid(fleet, "n1")
    fleet.answer(notify("it still steps"), "policy.py")
    fleet.expect(JobPhase.RUNNING)
    assert not fleet.orders(Stop)
    assert not resets(fleet)
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0)
    fleet.answer()
    assert isinstance(fleet.job.doing, Resetting), "the next generation does not start on it"


# ---------------------------------------------------------------- the next rung


FAILED = "`nvidia-smi --gpu-reset -i 0` ended with exit code 255: Unknown Error"


@pytest.mark.parametrize(
    ("spares", "dp", "min_dp", "then"),
    [(1, 3, 1, ActionKind.HOT_SWAP), (0, 3, 1, ActionKind.SCALE_DOWN), (0, 2, 2, ActionKind.WAIT)],
)
def test_a_reset_that_fails_leads_to_the_next_rung(spares: int, dp: int, min_dp: int, then: ActionKind) -> None:
    fleet = running(job(dp=dp, min_dp=min_dp), spares=spares)
    xid(fleet, "n1")
    stop_answered(fleet, "n1")
    answer_reset(fleet, "n1", ok=False, reason=FAILED)
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is then
    assert FAILED in fleet.incident.action.reason
    assert FAILED in fleet.incident.evidence["gpu_reset"]
    assert FAILED in fleet.state.nodes["n1"].unschedulable_reason
    fleet.answer_orders()
    assert not resets(fleet), "it is not tried again by itself"
    if then is not ActionKind.WAIT:
        fleet.step_all()
        fleet.expect(JobPhase.RUNNING)
        assert "n1" not in fleet.nodes()


def test_a_reset_that_is_late_leads_to_the_next_rung() -> None:
    fleet = running(job(dp=3), spares=1)
    xid(fleet, "n1")
    stop_answered(fleet, "n0", "n1", "n2")
    fleet.wait(fleet.state.config.reset_s - 1)
    assert isinstance(fleet.job.doing, Resetting)
    fleet.wait(2)
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.HOT_SWAP
    assert "it was not done within 240 s" in fleet.state.nodes["n1"].unschedulable_reason
    assert not resets(fleet)


def test_a_second_node_whose_reset_is_demanded_meanwhile_is_waited_for_whatever_incident_it_belongs_to() -> None:
    """Simulated seed 513091: the finding was a part of the incident that the reset resolves, and ranks started there."""
    fleet = running(job(dp=2))
    xid(fleet, "n0")
    stop_answered(fleet, "n0", "n1")
    n1 = fleet.state.nodes["n1"]
    due = ResetDue((0,), "Xid 95 on GPU 0 of n1")
    fleet.state = dataclasses.replace(
        fleet.state, nodes={**fleet.state.nodes, "n1": dataclasses.replace(n1, reset_due=due)}
    )
    fleet.state = fleet.state.indexed(index_of(fleet.state))
    answer_reset(fleet, "n0")
    assert not fleet.orders(Prepare)
    assert set(resets(fleet)) == {"n1"}
    answer_reset(fleet, "n1")
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def breaker_opens(fleet: Fleet, *nodes: str) -> None:
    for node in nodes:
        fleet.now += 1.0
        fleet.find(FindingKind.GPU_ERROR, node, severity=Severity.FATAL, recommended_actions=(Remedy.REPLACE_NODE,))
    assert fleet.state.breaker.open_until is not None


def test_the_time_for_a_reset_does_not_pass_while_the_breaker_keeps_it_from_being_ordered() -> None:
    fleet = running(job(dp=2), spares=6)
    xid(fleet, "n1")
    breaker_opens(fleet, *(f"n{index}" for index in range(2, 6)))
    stop_answered(fleet, "n0", "n1")
    assert not resets(fleet)
    fleet.wait(fleet.state.config.reset_s + 1)
    assert fleet.state.nodes["n1"].unschedulable_reason == "", "nobody has tried"
    fleet.fold(BreakerResetRequested(fleet.now, "looked"))
    assert resets(fleet) == {"n1": (0,)}
    fleet.wait(fleet.state.config.reset_s / 2)
    answer_reset(fleet, "n1")
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.nodes() == ("n0", "n1")


def test_resets_that_are_done_while_the_breaker_is_open_are_not_given_up_when_their_time_is_over() -> None:
    """Simulated seed 909935: the job waited for ever, with a reset that "did not come about" for no reason."""
    fleet = running(job(dp=2, min_dp=2), spares=6)
    xid(fleet, "n1")
    stop_answered(fleet, "n0", "n1")
    breaker_opens(fleet, *(f"n{index}" for index in range(2, 8)))
    answer_reset(fleet, "n1")
    fleet.wait(fleet.state.config.reset_s + 1)
    assert "did not come about" not in fleet.job.reason
    fleet.wait(fleet.state.config.breaker_window_s)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_a_node_that_is_lost_while_its_gpu_is_reset_is_replaced() -> None:
    fleet = running(job(dp=3), spares=1)
    xid(fleet, "n1")
    stop_answered(fleet, "n1")
    fleet.lose("n1")
    fleet.answer_orders("n1")
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.nodes() == ("n0", "n3", "n2")


def test_another_node_that_is_lost_meanwhile_is_planned_around() -> None:
    fleet = running(job(dp=3), spares=2)
    xid(fleet, "n1")
    fleet.now += 5
    stop_answered(fleet, "n1")
    fleet.lose("n2")
    fleet.answer_orders("n2")
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)
    assert "n2" not in fleet.nodes()


def test_an_agent_that_restarts_answers_the_same_order() -> None:
    """Its ledger knows whether it carried the order out; another order would be another reset."""
    fleet = running(job(dp=2))
    xid(fleet, "n1")
    stop_answered(fleet, "n0", "n1")
    [before] = [send for send in fleet.sent if isinstance(send.order, ResetGpu)]
    fleet.gone("n1")
    fleet.resets_gpus = True
    fleet.connect("n1")
    [after] = [send for send in fleet.sent if isinstance(send.order, ResetGpu)]
    assert after == before


def test_a_second_reset_within_a_day_goes_to_a_spare() -> None:
    fleet = running(job(dp=2), spares=1)
    xid(fleet, "n1")
    fleet.now += 5
    fleet.answer_orders()
    fleet.step_all()
    fleet.now += 3600
    xid(fleet, "n1")
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.HOT_SWAP
    assert "n1 was reset within the last day already" in fleet.incident.action.reason


def test_an_operator_tries_a_failed_reset_again_or_says_that_the_gpu_is_good() -> None:
    fleet = running(job(dp=2), spares=1)
    xid(fleet, "n1")
    stop_answered(fleet, "n1")
    answer_reset(fleet, "n1", ok=False, reason=FAILED)
    fleet.answer_orders()
    fleet.step_all()
    fleet.fold(NodeCordonRequested(fleet.now, "n1", cordoned=False, reason="dcgm is stopped"))
    assert resets(fleet) == {"n1": (0,)}
    answer_reset(fleet, "n1", ok=False, reason=FAILED)
    assert not resets(fleet)
    fleet.fold(NodeRepaired(fleet.now, "n1"))
    assert fleet.view.spares == ("n1",)


# ---------------------------------------------------------------- another leader


@pytest.mark.parametrize("answered", [0, 1, 2, 3])
def test_another_leader_goes_on_wherever_the_last_one_ended(answered: int) -> None:
    fleet = running(job(dp=3))
    xid(fleet, "n1")
    for node in ("n1", "n0", "n2")[:answered]:
        stop_answered(fleet, node)
    fleet.sent.clear()
    fleet.fold(LeaderStarted(fleet.now, 2, "secret"))
    for node in ("n0", "n1", "n2"):
        fleet.hello(node)
        fleet.inventory(node)
    assert ("n1" in resets(fleet)) is (answered > 0)
    fleet.answer_orders()
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.nodes() == ("n0", "n1", "n2")
    assert fleet.job.number == 2


def test_the_time_for_a_reset_begins_anew_with_a_leader() -> None:
    fleet = running(job(dp=2))
    xid(fleet, "n1")
    fleet.now += 200.0
    fleet.fold(LeaderStarted(fleet.now, 2, "secret"))
    for node in ("n0", "n1"):
        fleet.hello(node, running=1)
    fleet.wait(200.0)
    assert isinstance(fleet.job.doing, Resetting)


def test_a_node_that_is_given_back_for_want_of_nodes_is_reset_at_once() -> None:
    """Its job waits for it, and nothing else may ever happen."""
    fleet = running(job(dp=2, min_dp=2), spares=1)
    due = ResetDue((0,), "Xid 48")
    offender = dataclasses.replace(
        fleet.state.nodes["n2"], unschedulable_reason="quarantined: 3 faults", quarantined=True, reset_due=due
    )
    state = dataclasses.replace(fleet.state, nodes={**fleet.state.nodes, "n2": offender})
    fleet.state = state.indexed(index_of(state))
    fleet.lose("n1")
    assert not fleet.state.nodes["n2"].quarantined
    assert resets(fleet) == {"n2": (0,)}
    answer_reset(fleet, "n2")
    fleet.wait(fleet.state.config.returns.hold_s)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert "n2" in fleet.nodes()


def test_no_order_goes_to_an_agent_that_does_not_know_it() -> None:
    fleet = running(job(dp=2), resets_gpus=False)
    commands = []
    xid(fleet, "n1")
    fleet.answer_orders()
    commands += [send for send in fleet.sent if isinstance(send, Send) and isinstance(send.order, ResetGpu)]
    assert commands == []


# ---------------------------------------------------------------- what a policy can answer


def test_a_policy_may_want_a_reset_that_nobody_demanded() -> None:
    fleet = running(job(dp=2), decide=False)
    fleet.find(FindingKind.GPU_ERROR, "n1", gpu=1, recommended_actions=(Remedy.RESTART_PROCESS, Remedy.RESET_GPU))
    fleet.answer(gpu_reset("we always reset"), "policy.py")
    stop_answered(fleet, "n1")
    assert resets(fleet) == {"n1": (1,)}


def test_a_node_that_needs_no_reset_gets_none() -> None:
    """The crash on n0 is decided while n2 is due: n0 has done nothing."""
    fleet = running(job(dp=3), decide=False)
    xid(fleet, "n2")
    fleet.answer(notify("later"), "policy.py")
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0)
    fleet.answer()
    assert isinstance(fleet.job.doing, Resetting)
    stop_answered(fleet, "n0", "n1", "n2")
    assert resets(fleet) == {"n2": (0,)}


def test_what_gpu_reset_refuses_and_why() -> None:
    fleet = running(job(dp=3), decide=False)
    fleet.find(FindingKind.WORKER_CRASH, rank=1)
    incident = fleet.incident
    assert "names no node" in check(gpu_reset("why not"), incident, fleet.view)
    assert "n9 has no ranks" in check(gpu_reset("why not", "n9"), incident, fleet.view)
    xid(fleet, "n1")
    fleet.fold(NodeCordonRequested(fleet.now, "n2", cordoned=True, reason="?"))
    assert "but n2 cannot be used" in check(gpu_reset("why not"), incident, fleet.view)
    fleet = running(job(dp=3), decide=False, resets_gpus=False)
    xid(fleet, "n1")
    assert "no command that resets GPUs" in check(gpu_reset("why not"), fleet.incident, fleet.view)
    planned = fleet.incident.__class__("i", JOB, "straggler", "slow", IncidentState.OPEN, 1, severity=Severity.WARNING)
    assert "is for faults" in check(gpu_reset("why not"), planned, fleet.view)


def test_replanning_follows_a_reset_that_did_not_come_about() -> None:
    fleet = running(job(dp=2, min_dp=2), decide=False)
    xid(fleet, "n1")
    fleet.answer(gpu_reset("no recipe"))
    stop_answered(fleet, "n1")
    answer_reset(fleet, "n1", ok=False, reason=FAILED)
    assert isinstance(fleet.job.doing, Replanning)
    assert (fleet.incident.state, fleet.incident.action) == (IncidentState.OPEN, None)


def test_start_never_goes_out_with_a_reset_due() -> None:
    """The line comes between Prepare and Start of a change for something else."""
    fleet = running(job(dp=3))
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0)
    fleet.done("n0", Prepare)
    fleet.done("n1", Prepare)
    xid(fleet, "n2", since=fleet.now + 3)
    assert not fleet.orders(Start)
    assert not fleet.orders(Prepare)
    fleet.now += 4
    fleet.answer_orders()
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.state.nodes["n2"].reset_due is None


def test_every_incident_that_a_reset_was_to_resolve_is_asked_about_when_it_does_not_come_about() -> None:
    """Found by the simulator: the second one was only asked about after the next event."""
    fleet = running(job(dp=3), spares=2, decide=False)
    xid(fleet, "n1")
    fleet.answer(gpu_reset("no recipe"))
    stop_answered(fleet, "n0", "n1", "n2")
    xid(fleet, "n2")
    fleet.answer(gpu_reset("no recipe"))
    assert isinstance(fleet.job.doing, Resetting)
    fleet.lose("n2")
    assert len(fleet.questions) == len(fleet.state.questions) == 2
    assert fleet.questions[0].incident == fleet.incident.id, "that of the node that was lost comes first"
    fleet.answer(hot_swap("n2 is gone"))
    assert not fleet.state.questions, "one answer covers both"
