"""A GPU that should be reset when the job next stops: the run goes on until a checkpoint, and no step is done twice."""

from __future__ import annotations

from fleet import JOB, Fleet, job

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.incidents import Action, ActionKind, Incident, IncidentState
from holdfast.domain.orders import CheckpointNow, OrderDone, Prepare, ResetGpu, Stop
from holdfast.policy import gpu_reset, hot_swap, restart
from holdfast.supervisor.core.model.lifecycle import Resetting
from holdfast.supervisor.protocol import FindingArrived, JobPhase

STEPS = 1_000_000
GPU = 2


def running(spares: int, *, resets_gpus: bool = True, dp: int = 3, min_dp: int = 1, decide: bool = True) -> Fleet:
    fleet = Fleet(dp + spares, resets_gpus=resets_gpus, decide=decide)
    fleet.submit(evolve(job(dp=dp, min_dp=min_dp), steps=STEPS))
    fleet.run()
    fleet.train(20, save=True)
    return fleet


def pending(fleet: Fleet, node: str = "n1", *, confidence: float = 0.95, since: float | None = None) -> Finding:
    """A memory row waits for a reset: nothing is wrong with the run."""
    fleet.finding_count += 1
    finding = Finding(
        id=f"pending{fleet.finding_count}",
        kind=FindingKind.GPU_ERROR,
        severity=Severity.WARNING,
        at=fleet.now,
        since=fleet.now if since is None else since,
        summary=f"GPU {GPU} of {node} waits for a reset.",
        node=node,
        job=JOB,
        generation=fleet.job.number,  # as diagnostics knows it
        gpu=GPU,
        confidence=confidence,
        recommended_actions=(Remedy.WATCH, Remedy.RESET_GPU),
    )
    fleet.fold(FindingArrived(fleet.now, finding))
    return finding


def decided(fleet: Fleet) -> list[ActionKind]:
    known: list[Incident] = [*fleet.state.closed, *fleet.state.incidents.values()]
    return [incident.action.kind for incident in known if incident.action is not None]


def stop_all(fleet: Fleet) -> None:
    for node in fleet.orders(Stop):
        fleet.done(node, Stop)


def answer_reset(fleet: Fleet, *, ok: bool = True) -> None:
    send = next(send for send in fleet.sent if isinstance(send.order, ResetGpu))
    fleet.report(send.node, OrderDone(send.command_id, ok, "" if ok else "in use by python (pid 7)", at=fleet.now))


def test_a_spare_takes_over_at_a_checkpoint_and_the_node_is_reset_then() -> None:
    fleet = running(1)
    pending(fleet)
    [incident] = fleet.state.incidents.values()
    assert incident.action is not None
    assert (incident.action.kind, incident.planned) == (ActionKind.HOT_SWAP, True)
    fleet.expect(JobPhase.RUNNING)
    assert fleet.orders(CheckpointNow).keys() == {"n0", "n1", "n2"}
    assert not fleet.orders(ResetGpu), "no GPU is reset under its workers"
    at_step = fleet.save_asked()
    assert set(fleet.orders(Prepare)) == {"n0", "n2", "n3"}
    assert not fleet.orders(ResetGpu), "its workers may still run"
    fleet.done("n1", Stop)
    assert fleet.orders(ResetGpu).keys() == {"n1"}
    order = fleet.orders(ResetGpu)["n1"]
    assert isinstance(order, ResetGpu)
    assert order.gpus == (GPU,)
    fleet.run()
    assert fleet.nodes() == ("n0", "n3", "n2")
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == at_step, "no step is done twice"
    node = fleet.state.nodes["n1"]
    assert (node.reset_due, node.reset_at > 0) == (None, True)
    assert fleet.incident.state is IncidentState.RESOLVED
    fleet.train(fleet.job.progress.step + 1)
    fleet.wait(7200.0)
    assert decided(fleet) == [ActionKind.HOT_SWAP], "once"


def test_without_a_spare_the_node_is_reset_in_place_after_a_save() -> None:
    fleet = running(0)
    pending(fleet)
    assert decided(fleet) == [ActionKind.GPU_RESET]
    fleet.expect(JobPhase.RUNNING)
    at_step = fleet.save_asked()
    assert isinstance(fleet.job.doing, Resetting)
    assert fleet.orders(Stop).keys() == {"n0", "n1", "n2"}
    stop_all(fleet)
    answer_reset(fleet)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.nodes() == ("n0", "n1", "n2")
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == at_step
    assert fleet.incident.state is IncidentState.RESOLVED
    fleet.train(fleet.job.progress.step + 1)
    fleet.wait(7200.0)
    assert decided(fleet) == [ActionKind.GPU_RESET], "once"


def test_a_reset_that_fails_after_the_save_does_not_keep_the_job_from_running() -> None:
    fleet = running(0)
    pending(fleet)
    fleet.save_asked()
    stop_all(fleet)
    answer_reset(fleet, ok=False)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.nodes() == ("n0", "n2"), "the node is out of service, and the others go on"


def test_a_gpu_that_cannot_be_reset_stays_and_the_operators_are_notified_once() -> None:
    for spares in (0, 1):
        fleet = running(spares, resets_gpus=False)
        pending(fleet)
        for _ in range(20):
            fleet.wait(600.0)
            fleet.train(fleet.job.progress.step + 1)
        assert decided(fleet) == [ActionKind.NOTIFY]
        assert fleet.job.number == 1
        assert fleet.notes().count("cannot reset GPUs") == 1


def test_a_second_opinion_changes_no_run() -> None:
    fleet = running(1)
    pending(fleet, confidence=0.7)
    assert decided(fleet) == [ActionKind.NOTIFY]
    assert fleet.job.number == 1


def test_what_was_found_before_the_last_reset_is_history() -> None:
    fleet = running(0)
    pending(fleet)
    fleet.save_asked()
    stop_all(fleet)
    answer_reset(fleet)
    fleet.run()
    fleet.now += 3600.0
    pending(fleet, since=fleet.state.nodes["n1"].reset_at - 10.0)
    assert decided(fleet) == [ActionKind.GPU_RESET]
    assert "were reset or repaired since" in fleet.notes()


def test_two_gpus_lead_to_two_changes_ten_minutes_apart() -> None:
    fleet = running(0)
    pending(fleet, "n1")
    pending(fleet, "n2")
    fleet.save_asked()
    stop_all(fleet)
    answer_reset(fleet)
    fleet.run()
    fleet.train(fleet.job.progress.step + 1, save=True)
    fleet.wait(300.0)
    assert decided(fleet) == [ActionKind.GPU_RESET]
    fleet.wait(400.0)
    assert decided(fleet) == [ActionKind.GPU_RESET, ActionKind.GPU_RESET]
    assert fleet.incident.node == "n2"


def test_a_fault_comes_first_and_the_reset_is_asked_for_again() -> None:
    fleet = running(0)
    pending(fleet)
    fleet.now += 0.2
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert not fleet.orders(ResetGpu)
    fleet.train(fleet.job.progress.step + 5, save=True)
    fleet.wait(602.0)
    assert decided(fleet)[-1] is ActionKind.GPU_RESET
    fleet.save_asked()
    assert isinstance(fleet.job.doing, Resetting)


def test_a_young_job_is_asked_about_later() -> None:
    """How long it still runs is not known: as long again as it has run."""
    fleet = Fleet(3, resets_gpus=True)
    fleet.submit(job(dp=3))
    fleet.run()
    fleet.train(20, save=True)
    pending(fleet)
    assert decided(fleet) == [ActionKind.WAIT]
    fleet.train(30, save=True)
    fleet.wait(400.0)
    assert ActionKind.GPU_RESET in decided(fleet)


def answered(action: Action) -> Fleet:
    fleet = running(1, decide=False)
    pending(fleet)
    fleet.answer(action, "policy.py")
    return fleet


def test_a_policy_may_choose_either() -> None:
    fleet = answered(gpu_reset("spares are dear"))
    fleet.save_asked()
    assert isinstance(fleet.job.doing, Resetting)
    fleet = answered(hot_swap("a spare is free", "n1"))
    fleet.save_asked()
    assert set(fleet.orders(Prepare)) == {"n0", "n2", "n3"}
    fleet = answered(restart("it restarts for anything"))
    fleet.save_asked()
    fleet.run()
    assert fleet.nodes() == ("n0", "n1", "n2")
    assert not fleet.orders(ResetGpu)
