"""The interval of a running job is measured, announced ahead to every rank; a checkpoint that is asked for is answered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import JOB, Fleet, job, running, warn_of_a_slow_node

from holdfast.domain.findings import FindingKind
from holdfast.domain.generations import StoredStep
from holdfast.domain.incidents import Action
from holdfast.domain.job import JobSpec
from holdfast.domain.orders import CheckpointNow, Inventory, Prepare, SetInterval
from holdfast.policy import restart, set_interval
from holdfast.supervisor.core.rules.interval import STEPS_UNMEASURED
from holdfast.supervisor.protocol import CheckpointRequested, LeaderStarted, StepsCompleted


def auto(**settings: object) -> JobSpec:
    spec = job(dp=2)
    return replace(spec, checkpoint=replace(spec.checkpoint, interval_steps=0, **settings))  # type: ignore[arg-type]


def steps(fleet: Fleet, step: int, *, saves: int = 0, stall_s: float = 0.0, step_s: float = 0.5) -> None:
    fleet.now += 1.0
    fleet.fold(StepsCompleted(fleet.now, JOB, fleet.job.number, step, fleet.now, 1, step_s, saves, stall_s))


def agree(fleet: Fleet) -> None:
    """All ranks agree to the save after which the interval changes."""
    for node in sorted(fleet.orders(CheckpointNow)):
        fleet.done(node, CheckpointNow)


def test_a_fresh_job_begins_with_a_number_and_says_so() -> None:
    fleet = Fleet(2)
    fleet.submit(auto())
    prepare = fleet.orders(Prepare)["n0"]
    assert isinstance(prepare, Prepare)
    assert prepare.checkpoint.interval_steps == STEPS_UNMEASURED
    assert f"checkpoints every {STEPS_UNMEASURED} steps to begin with: nothing is measured yet" in fleet.notes()


def test_a_number_in_the_job_file_is_not_touched() -> None:
    fleet = running(job(dp=2, interval=10))
    for step in range(10, 400, 10):
        steps(fleet, step, saves=1, stall_s=5.0)
    assert not fleet.orders(SetInterval)
    assert fleet.job.interval_steps == 10
    assert "interval" not in fleet.notes()


def test_the_interval_follows_what_a_save_costs_and_is_announced_ahead_to_every_rank() -> None:
    fleet = running(auto())
    steps(fleet, 10)
    assert fleet.job.interval_steps == STEPS_UNMEASURED
    assert not fleet.orders(SetInterval)
    for step in (50, 100, 150):
        steps(fleet, step, saves=1, stall_s=0.5)
    agree(fleet)
    orders = fleet.orders(SetInterval)
    assert set(orders) == {"n0", "n1"}
    assert len({replace(order) for order in orders.values()}) == 1, "every rank hears the same"
    order = orders["n0"]
    assert isinstance(order, SetInterval)
    assert order.from_step >= 150 + 3.0 / 0.5
    assert order.interval_steps == fleet.job.interval_steps > 2 * STEPS_UNMEASURED
    assert "a save stalls 0.5 s" in fleet.notes()
    fleet.answer_orders()
    for step in range(160, 165):
        steps(fleet, step, saves=1, stall_s=0.55)
    assert not fleet.orders(SetInterval), "chosen again after ten saves, and only for a difference that is worth it"


def test_a_slow_step_is_known_before_the_first_save() -> None:
    fleet = running(auto(interval_max_s=100.0))
    steps(fleet, 1, step_s=20.0)
    assert fleet.job.interval_steps == 5
    agree(fleet)
    order = fleet.orders(SetInterval)["n1"]
    assert isinstance(order, SetInterval)
    assert order.interval_steps == 5


def test_the_next_generation_goes_on_with_what_was_chosen_and_has_learnt_of_the_fault() -> None:
    fleet = running(auto())
    for step in (50, 100, 150):
        steps(fleet, step, saves=1, stall_s=0.5)
    chosen = fleet.job.interval_steps
    fleet.answer_orders()
    fleet.save(150)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    prepare = fleet.orders(Prepare)["n1"]
    assert isinstance(prepare, Prepare)
    assert prepare.checkpoint.interval_steps == chosen
    fleet.run()
    assert fleet.job.checkpoints.measured.faults == {"local": 1}
    assert fleet.job.checkpoints.measured.recovery_s == pytest.approx(0.11, abs=0.02)


def test_the_policy_sees_the_interval_in_force() -> None:
    assert running(auto()).view.checkpoint_interval_steps == STEPS_UNMEASURED


def test_the_time_to_the_store_is_measured() -> None:
    fleet = running(auto(store="file:///s", store_interval_s=0.0), saved=50)
    generation = fleet.job.running
    assert generation is not None
    fleet.now += 7.0
    held = fleet.state.nodes["n0"].inventory[JOB]
    fleet.report("n0", Inventory(JOB, held, (StoredStep(generation.attempt, 50, generation.mesh, False),)))
    assert fleet.job.checkpoints.measured.upload_s == pytest.approx(7.0)


# ---------------------------------------------------------------- a checkpoint that is asked for


def asked(dp: int = 2) -> Fleet:
    """A running job of which somebody has asked for a checkpoint."""
    fleet = Fleet(dp)
    fleet.submit(job(dp=dp))
    fleet.run()
    fleet.train(3)
    fleet.fold(CheckpointRequested(fleet.now, JOB, "op-1"))
    assert fleet.answers == []
    return fleet


def wanted_step(fleet: Fleet) -> int:
    order = fleet.orders(CheckpointNow)["n0"]
    assert isinstance(order, CheckpointNow)
    return order.at_step


def test_an_asked_for_checkpoint_is_answered_with_how_far_it_came() -> None:
    fleet = asked()
    fleet.save(wanted_step(fleet))
    assert fleet.answers == [], "no disk has it yet"
    fleet.wait(60.0)
    [answer] = fleet.answers
    assert (answer.operation, answer.ok) == ("op-1", True)
    assert answer.reason.endswith("is saved: memory (all of 2 ranks), a peer (all of 2 ranks); not all of it yet: disk")


def test_when_every_copy_is_made_it_is_answered_at_once() -> None:
    fleet = asked()
    fleet.save(wanted_step(fleet))
    for node in fleet.nodes():
        held = fleet.state.nodes[node].inventory[JOB]
        fleet.report(node, Inventory(JOB, (*held, *(replace(each, tier="disk") for each in held))))
    [answer] = fleet.answers
    assert answer.reason.endswith("memory (all of 2 ranks), disk (all of 2 ranks), a peer (all of 2 ranks)")


def test_a_checkpoint_that_does_not_come_is_a_failed_operation() -> None:
    fleet = asked()
    fleet.wait(60.0)
    [answer] = fleet.answers
    assert not answer.ok
    assert "was not saved by every rank in time: nowhere" in answer.reason


def test_a_new_leader_hears_of_a_checkpoint_before_it_says_how_far_it_came() -> None:
    fleet = asked()
    step = wanted_step(fleet)
    fleet.now += 60.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.wait(1.0)
    fleet.inventory("n0")  # of before: not every agent has come back
    assert fleet.answers == []
    fleet.save(step)
    fleet.wait(60.0)
    [answer] = fleet.answers
    assert answer.ok, answer.reason


def test_a_job_that_does_not_run_answers_at_once() -> None:
    fleet = Fleet(1)
    fleet.submit(job(dp=2))
    fleet.fold(CheckpointRequested(fleet.now, JOB, "op-1"))
    assert [answer.ok for answer in fleet.answers] == [False]


# ---------------------------------------------------------------- as a policy decides


def crash(fleet: Fleet, action: Action) -> None:
    """A rank ends, and the policy answers so."""
    fleet.decide = False
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer(action, "policy.py")
    fleet.decide = True


@pytest.mark.parametrize("spec", [auto(), job(dp=2, interval=10)], ids=["auto", "fixed"])
def test_a_policy_sets_the_interval_which_holds_until_it_sets_another(spec: JobSpec) -> None:
    fleet = running(spec)
    crash(fleet, set_interval("this node has begun to fail", 7).then(restart("once more")))
    prepare = fleet.orders(Prepare)["n1"]
    assert isinstance(prepare, Prepare)
    assert prepare.checkpoint.interval_steps == 7
    interval = fleet.job.checkpoints.interval
    assert interval is not None
    assert interval.reason == "every 7 steps, as the policy decided: this node has begun to fail"
    fleet.run()
    for step in range(10, 400, 10):
        steps(fleet, step, saves=1, stall_s=5.0)
    assert not fleet.orders(SetInterval), "what a save costs changes nothing any more"
    assert fleet.view.checkpoint_interval_steps == 7
    crash(fleet, set_interval("it was replaced", 0).then(restart("as before")))
    prepare = fleet.orders(Prepare)["n1"]
    assert isinstance(prepare, Prepare)
    assert prepare.checkpoint.interval_steps == (spec.checkpoint.interval_steps or fleet.job.interval_steps)
    assert fleet.job.interval_steps != 7


@pytest.mark.parametrize(("newest", "since_s"), [(100, 3.0), (300, 4.0)], ids=["diagnostics", "beats"])
def test_an_interval_that_is_set_while_the_job_runs_is_announced_ahead_to_every_rank(
    newest: int, since_s: float
) -> None:
    fleet = running(job(dp=2, interval=10), decide=False)
    steps(fleet, 100)
    warn_of_a_slow_node(fleet)
    if newest > 100:  # diagnostics reports no steps any more
        fleet.beat(newest)
        fleet.now += since_s
    fleet.answer(set_interval("it may fail soon", 3), "policy.py")
    agree(fleet)
    orders = fleet.orders(SetInterval)
    assert set(orders) == {"n0", "n1"}
    for order in orders.values():
        assert isinstance(order, SetInterval)
        assert order.interval_steps == 3
        assert order.from_step >= newest + since_s / 0.5
    assert fleet.job.interval_steps == 3


@pytest.mark.parametrize("steps", [-1, 10**10])
def test_an_interval_that_is_none_is_refused(steps: int) -> None:
    fleet = running(job(dp=2, interval=10))
    crash(fleet, set_interval("by mistake", steps).then(restart("once more")))
    assert "set_interval" in fleet.notes() or "set_interval" in (fleet.incident.decided_by or "")
    assert fleet.job.interval_steps == 10
