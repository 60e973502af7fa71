"""An answer with several rungs: which one is taken, what ends it, what the incident says of it. Every fold goes through a
snapshot."""

from __future__ import annotations

import json

import pytest
from fleet import JOB, Fleet, job

from holdfast.domain.findings import Blamed, Finding, FindingKind, Remedy, Severity
from holdfast.domain.incidents import WALK_MAX, Action, ActionKind, Incident, IncidentState, RungEnd
from holdfast.domain.job import JobSpec
from holdfast.domain.orders import CheckpointNow, OrderDone, Prepare, ResetGpu, Stop
from holdfast.policy import (
    checkpoint_now,
    cordon,
    default,
    gpu_reset,
    hot_swap,
    notify,
    restart,
    scale_down,
    stop,
    wait,
)
from holdfast.supervisor.core.incidents import recipes
from holdfast.supervisor.core.model.lifecycle import Resetting
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.protocol import BreakerResetRequested, FindingArrived, JobPhase, LeaderStarted
from holdfast.supervisor.timers import RungTimeout

RECIPE = (
    restart("try in place")
    .within(30)
    .otherwise(hot_swap("a spare", "n1"))
    .otherwise(scale_down("fewer", "n1"))
    .otherwise(stop("nothing is left"))
)


def running(spec: JobSpec, spares: int = 0, *, resets_gpus: bool = False) -> Fleet:
    fleet = Fleet(spec.nodes + spares, capacity=spec.nproc_per_node, decide=False, resets_gpus=resets_gpus)
    fleet.submit(spec)
    fleet.run()
    fleet.train(20, save=True)
    return fleet


def crashed(recipe: Action, spares: int = 1, first_step_timeout_s: float = 600.0) -> Fleet:
    fleet = running(job(first_step_timeout_s=first_step_timeout_s), spares)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer(recipe, "policy.py")
    return fleet


def walk(incident: Incident) -> list[tuple[int, int, str, str]]:
    return [(each.recipe, each.number, each.action.value, each.end.value if each.end else "") for each in incident.walk]


def first(fleet: Fleet) -> Incident:
    """The oldest incident, open or closed."""
    found = [*fleet.state.closed, *fleet.state.incidents.values()]
    return min(found, key=lambda incident: int(incident.id.rsplit("-", 1)[1]))


# ---------------------------------------------------------------- the walk


def test_the_first_rung_that_brings_the_job_up_ends_the_walk() -> None:
    fleet = crashed(RECIPE)
    assert RungTimeout(JOB, fleet.incident.id) in fleet.state.timers
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert walk(fleet.incident) == [(1, 1, "restart", "done")]
    [rung] = fleet.incident.walk
    assert (rung.reason, rung.within_s, rung.ended_at) == ("try in place", 30.0, fleet.now)
    assert rung.why == fleet.incident.outcome
    assert not [timer for timer in fleet.state.timers if isinstance(timer, RungTimeout)]


def test_a_rung_that_is_impossible_is_refused_with_the_reason_and_the_next_one_taken() -> None:
    fleet = crashed(hot_swap("a spare", "n1").otherwise(restart("in place")), spares=0)
    assert walk(fleet.incident) == [(1, 1, "hot_swap", "refused"), (1, 2, "restart", "")]
    assert fleet.incident.walk[0].why == "hot_swap of n1 needs 1 spare node; free: 0"
    assert fleet.incident.decided_by == "policy.py"
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_a_node_that_cannot_prepare_fails_its_rung() -> None:
    fleet = crashed(RECIPE)
    fleet.done("n1", Prepare, ok=False, reason="no memory")
    assert walk(fleet.incident) == [(1, 1, "restart", "failed"), (1, 2, "hot_swap", "")]
    assert "n1 could not prepare: no memory" in fleet.incident.walk[0].why
    assert fleet.incident.action is not None
    assert fleet.incident.action.reason.startswith("a spare (restart failed: n1 could not prepare")
    assert fleet.nodes() == ("n0", "n3", "n2")
    assert fleet.incident.decided_by == "policy.py"
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_another_node_that_cannot_prepare_is_planned_around() -> None:
    """The rung is about n1, which is fine."""
    fleet = crashed(RECIPE)
    fleet.done("n2", Prepare, ok=False, reason="no memory")
    assert walk(fleet.incident) == [(1, 1, "restart", "")]
    assert fleet.nodes() == ("n0", "n1", "n3")


def test_a_swap_goes_on_while_there_is_another_spare() -> None:
    fleet = crashed(hot_swap("a spare", "n1").otherwise(scale_down("fewer", "n1")), spares=2)
    fleet.done("n3", Prepare, ok=False, reason="no memory")
    assert walk(fleet.incident) == [(1, 1, "hot_swap", "")]
    fleet.done("n4", Prepare, ok=False, reason="no memory")
    assert walk(fleet.incident)[0] == (1, 1, "hot_swap", "failed")


def test_a_fault_of_the_same_node_before_every_rank_has_stepped_fails_the_rung() -> None:
    fleet = crashed(RECIPE)
    fleet.answer_orders()
    fleet.now += 1
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert walk(first(fleet)) == [(1, 1, "restart", "failed"), (1, 2, "hot_swap", "")]
    assert not fleet.state.questions, "the recipe has the answer"
    assert fleet.incident.decided_by == f"policy.py, together with {first(fleet).id}"
    assert fleet.incident.action == Action(ActionKind.HOT_SWAP, fleet.incident.action.reason, ("n1",))  # type: ignore[union-attr]
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert not fleet.state.incidents
    assert fleet.nodes() == ("n0", "n3", "n2")


def test_ranks_that_do_not_start_fail_the_rung() -> None:
    fleet = crashed(restart("in place").otherwise(hot_swap("a spare", "n1")), first_step_timeout_s=50)
    fleet.answer_orders()
    fleet.wait(60)
    assert walk(first(fleet)) == [(1, 1, "restart", "failed"), (1, 2, "hot_swap", "")]
    assert "ranks finished no step" in first(fleet).walk[0].why


@pytest.mark.parametrize(
    ("node", "blame", "error_class"),
    [("n2", Blamed.UNKNOWN, ""), ("n1", Blamed.USER, ""), ("", Blamed.UNKNOWN, "storage")],
)
def test_a_fault_on_another_node_or_of_the_script_or_a_service_is_the_policys_to_decide(
    node: str, blame: Blamed, error_class: str
) -> None:
    fleet = crashed(RECIPE)
    fleet.answer_orders()
    fleet.now += 1
    fleet.find(FindingKind.WORKER_EXCEPTION, node, rank=1, blame=blame.value, error_class=error_class)
    assert fleet.state.questions == (fleet.incident.id,)
    fleet.answer(restart("the policy knows"))
    assert walk(first(fleet)) == [(1, 1, "restart", "overtaken")]
    assert f"overtaken by the decision about {fleet.incident.id}" in first(fleet).walk[0].why
    assert not [timer for timer in fleet.state.timers if isinstance(timer, RungTimeout)]
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert not fleet.state.incidents


# ---------------------------------------------------------------- time limits


def test_a_rung_that_takes_too_long_is_followed_by_the_next() -> None:
    fleet = crashed(RECIPE)
    fleet.answer_orders()
    fleet.wait(29)
    assert walk(fleet.incident) == [(1, 1, "restart", "")]
    fleet.wait(2)
    assert walk(fleet.incident) == [(1, 1, "restart", "late"), (1, 2, "hot_swap", "")]
    assert (
        "not every rank had finished a step 30 s after the decision; the job was starting" in fleet.incident.walk[0].why
    )
    assert set(fleet.orders(Prepare)) == {"n0", "n3", "n2"}
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_what_a_late_swap_brought_in_leaves_with_the_next_rung() -> None:
    """The rung says n1, in whose place a spare was to come that did not."""
    fleet = crashed(hot_swap("a spare").within(30).otherwise(scale_down("fewer", "n1")).otherwise(stop("no more")))
    assert fleet.nodes() == ("n0", "n3", "n2")
    fleet.wait(31)
    assert walk(fleet.incident) == [(1, 1, "hot_swap", "late"), (1, 2, "scale_down", "")]
    assert set(fleet.nodes()) == {"n0", "n2"}
    fleet = crashed(hot_swap("a spare").within(30).otherwise(hot_swap("another")).otherwise(stop("no more")), spares=1)
    fleet.wait(31)
    assert walk(fleet.incident)[1] == (1, 2, "hot_swap", "refused"), "n1 is no spare for itself"


def test_a_run_that_steps_is_not_stopped_for_a_limit() -> None:
    """The reports of the first steps are lost, and others have seen a step that needed every rank."""
    fleet = crashed(RECIPE)
    fleet.answer_orders()
    fleet.wait(20)
    fleet.beat(23)
    fleet.beat(24)
    fleet.train(24)
    fleet.wait(15)
    assert walk(first(fleet)) == [(1, 1, "restart", "done")]
    fleet.expect(JobPhase.RUNNING)


def test_a_job_that_waits_may_wait_only_so_long() -> None:
    fleet = crashed(wait("a node may come").within(100).otherwise(stop("nobody came")))
    fleet.answer_orders()
    fleet.expect(JobPhase.WAITING)
    fleet.wait(101)
    fleet.expect(JobPhase.FAILED)
    assert walk(fleet.incident) == [(1, 1, "wait", "late"), (1, 2, "stop", "done")]


# ---------------------------------------------------------------- the end of a recipe


def test_the_policy_is_asked_again_when_no_rung_is_left_and_loses_its_say_at_last() -> None:
    fleet = crashed(restart("in place").within(5))
    for count in range(1, recipes.EXHAUSTED_MAX):
        fleet.answer_orders()
        fleet.wait(6)
        assert fleet.state.questions == (fleet.incident.id,)
        assert (fleet.incident.recipes_exhausted, fleet.incident.state) == (count, IncidentState.OPEN)
        assert [each.end for each in fleet.incident.walk] == [RungEnd.LATE] * count, "the policy sees what was tried"
        assert not fleet.orders(Prepare)
        fleet.answer(restart("in place").within(5), "policy.py")
    fleet.answer_orders()
    fleet.wait(6)
    assert not fleet.state.questions
    assert "default policy, because no rung was left of 3 recipes" in fleet.incident.decided_by
    fleet.wait(6)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert [each[0] for each in walk(fleet.incident)] == [1, 2, 3, 4]


def test_a_recipe_of_which_every_rung_is_impossible_is_replaced_by_the_default_policy() -> None:
    fleet = crashed(hot_swap("a spare", "n1").otherwise(scale_down("fewer", dp=7)), spares=0)
    assert "default policy, because policy.py answered hot_swap: no rung is possible: hot_swap of n1" in (
        fleet.incident.decided_by
    )
    assert walk(fleet.incident) == [
        (1, 1, "hot_swap", "refused"),
        (1, 2, "scale_down", "refused"),
        (2, 1, "restart", ""),
    ]


def test_a_recipe_without_a_meaning_is_refused_as_a_whole() -> None:
    fleet = crashed(restart("in place").then(hot_swap("a spare")).otherwise(restart("again")))
    assert "nothing can follow restart in a rung" in fleet.incident.decided_by
    assert fleet.incident.walk == ()


def test_the_walk_is_bounded() -> None:
    incident = crashed(RECIPE).incident
    for _ in range(2 * WALK_MAX):
        incident = incident.walked(*incident.walk[:1])
    assert len(incident.walk) == WALK_MAX


def test_an_answer_that_is_no_recipe_leaves_no_walk() -> None:
    fleet = crashed(restart("in place"))
    fleet.run()
    assert fleet.incident.walk == ()


def test_an_open_breaker_stops_the_walk_and_not_the_change() -> None:
    fleet = running(job(dp=3), 1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer(RECIPE)
    fleet.answer_orders()
    config = fleet.state.config
    for _ in range(config.changes_max + 1):
        fleet.state = _with_change_counted(fleet)
    assert fleet.state.breaker.open_until is not None
    fleet.wait(31)
    assert walk(fleet.incident) == [(1, 1, "restart", "")]
    fleet.expect(JobPhase.STARTING)
    fleet.fold(BreakerResetRequested(fleet.now, "seen"))
    fleet.wait(config.breaker_window_s)
    assert walk(first(fleet))[0] == (1, 1, "restart", "late")


def _with_change_counted(fleet: Fleet):  # type: ignore[no-untyped-def]
    from holdfast.supervisor.core.fleet import breaker
    from holdfast.supervisor.core.model.turn import Turn

    turn = Turn(fleet.state, fleet.now)
    breaker.count_change(turn)
    turn.end()
    return turn.finish()


# ---------------------------------------------------------------- steps of a rung


def test_a_cordoned_node_leaves_for_a_spare_and_not_for_fewer_replicas() -> None:
    fleet = crashed(cordon("broken", "n1").then(hot_swap("a spare", "n1")).otherwise(restart("in place")))
    assert fleet.state.nodes["n1"].unschedulable_reason == "broken"
    assert fleet.incident.walk[0].steps == "cordon then hot_swap"
    fleet.run()
    assert fleet.nodes() == ("n0", "n3", "n2")

    fleet = crashed(cordon("broken", "n1").then(hot_swap("a spare", "n1")).otherwise(restart("in place")), spares=0)
    assert walk(fleet.incident) == [(1, 1, "hot_swap", "refused"), (1, 2, "restart", "")]
    assert not fleet.state.nodes["n1"].unschedulable_reason, "a refused rung leaves no trace"


def test_a_swap_makes_room_for_every_node_that_its_steps_take_out() -> None:
    fleet = crashed(cordon("broken", "n2").then(hot_swap("a spare", "n1")).otherwise(restart("in place")), spares=1)
    assert fleet.incident.walk[0].why == "hot_swap of n1, n2 needs 2 spare nodes; free: 1"


def test_the_operators_are_notified_before_a_restart() -> None:
    fleet = crashed(notify("look at n1").then(restart("in place")))
    assert "look at n1" in fleet.notes()
    fleet.run()
    assert walk(fleet.incident) == [(1, 1, "restart", "done")]


def test_a_warning_saves_to_the_object_store_before_the_swap() -> None:
    fleet = running(job(dp=3), 1)
    _slow(fleet)
    fleet.answer(checkpoint_now("keep it").then(hot_swap("a spare", "n1")))
    order = fleet.orders(CheckpointNow)["n0"]
    assert isinstance(order, CheckpointNow)
    assert order.to_object_store
    fleet.save_asked()
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.nodes() == ("n0", "n3", "n2")
    assert walk(fleet.incident) == [(1, 1, "hot_swap", "done")]


def _slow(fleet: Fleet) -> None:
    """A warning that has lasted long enough to be asked about."""
    for _ in range(2):
        fleet.fold(
            FindingArrived(
                fleet.now,
                Finding(
                    id="slow",
                    kind=FindingKind.STRAGGLER,
                    severity=Severity.WARNING,
                    at=fleet.now,
                    since=1000.0,
                    summary="n1 is slow",
                    node="n1",
                    job=JOB,
                    generation=fleet.job.number,
                    rank=1,
                    cost_share=0.3,
                ),
                0.0,
            )
        )
        fleet.now += fleet.job.spec.warnings.settles_s + 1


def test_a_planned_change_that_cannot_begin_takes_the_next_rung_and_the_run_goes_on() -> None:
    fleet = running(job(dp=3), 1)
    _slow(fleet)
    fleet.answer(hot_swap("a spare", "n1").within(5).otherwise(notify("no spare could be had")))
    fleet.expect(JobPhase.RUNNING)
    fleet.wait(6)
    fleet.expect(JobPhase.RUNNING)
    assert walk(fleet.incident) == [(1, 1, "hot_swap", "late"), (1, 2, "notify", "done")]
    assert fleet.incident.state is IncidentState.RESOLVED
    assert fleet.job.planned is None


# ---------------------------------------------------------------- GPU reset


def _reset_refused(fleet: Fleet) -> None:
    fleet.find(FindingKind.GPU_ERROR, "n1", gpu=0, recommended_actions=(Remedy.RESET_GPU,), generation=0)
    fleet.answer()
    for node in fleet.nodes():
        fleet.done(node, Stop)
    assert isinstance(fleet.job.doing, Resetting)
    send = next(send for send in fleet.sent if isinstance(send.order, ResetGpu))
    fleet.report("n1", OrderDone(send.command_id, False, "the driver refused", at=fleet.now))


@pytest.mark.parametrize(
    ("spares", "dp", "min_dp", "then"),
    [(1, 3, 1, ActionKind.HOT_SWAP), (0, 3, 1, ActionKind.SCALE_DOWN), (0, 2, 2, ActionKind.WAIT)],
)
def test_the_default_policy_walks_its_recipe_without_being_asked_again(
    spares: int, dp: int, min_dp: int, then: ActionKind
) -> None:
    fleet = running(job(dp=dp, min_dp=min_dp), spares, resets_gpus=True)
    fleet.now += 0.1
    _reset_refused(fleet)
    assert not fleet.state.questions
    assert fleet.incident.walk[0].end is RungEnd.FAILED
    assert "the driver refused" in fleet.incident.walk[0].why
    assert fleet.incident.walk[-1].action is then
    assert fleet.incident.rung == fleet.incident.walk[-1]
    assert fleet.incident.decided_by == "default policy"


# ---------------------------------------------------------------- other leaders


@pytest.mark.parametrize("when", ["decided", "prepared", "late", "next"])
def test_another_leader_goes_on_with_the_walk(when: str) -> None:
    fleet = crashed(RECIPE)
    if when == "prepared":
        fleet.answer_orders()
    if when in ("late", "next"):
        fleet.wait(31 if when == "next" else 29)
    before = walk(fleet.incident)
    fleet.state = _read_back(fleet)
    fleet.now += 40
    fleet.fold(LeaderStarted(fleet.now, fleet.state.epoch + 1, ""))
    assert walk(fleet.incident) == before, "nobody listened meanwhile: silence says nothing yet"
    for node in list(fleet.state.nodes):
        fleet.hello(node)
    fleet.wait(fleet.state.config.session_s + 1)
    if when != "next":
        assert walk(fleet.incident)[0] == (1, 1, "restart", "late")
    assert walk(fleet.incident)[-1] == (1, 2, "hot_swap", "")
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    numbers = [each[1] for each in walk(fleet.incident)]
    assert numbers == sorted(set(numbers))


def _read_back(fleet: Fleet):  # type: ignore[no-untyped-def]
    parts = {name: raw for name, raw in snapshot.changes(None, fleet.state).items() if raw is not None}
    return snapshot.load(parts)


def test_an_incident_of_an_earlier_version_is_read_and_goes_on() -> None:
    fleet = crashed(restart("in place"))
    parts = {name: raw for name, raw in snapshot.changes(None, fleet.state).items() if raw is not None}
    key = f"incidents/{fleet.incident.id}"
    old = json.loads(parts[key])
    for name in ("walk", "recipes_exhausted"):
        del old[name]
    for name in ("within_s", "before", "fallbacks"):
        del old["action"][name]
    assert snapshot.load({**parts, key: json.dumps(old).encode()}) == fleet.state
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_the_rest_of_a_recipe_waits_with_a_job_whose_saved_steps_are_not_known() -> None:
    """What is deferred is taken up where it was: the rungs that were tried are not tried again."""
    fleet = crashed(RECIPE)
    fleet.done("n1", Prepare, ok=False, reason="no memory")
    fleet.fold(LeaderStarted(fleet.now, fleet.state.epoch + 1, ""))
    for node in ("n0", "n2", "n3"):
        fleet.hello(node)
    fleet.done("n3", Prepare, ok=False, reason="no memory")
    fleet.wait(fleet.state.config.session_s + 1)
    assert [each[:3] for each in walk(fleet.incident)] == [(1, 1, "restart"), (1, 2, "hot_swap"), (1, 3, "scale_down")]


def test_the_default_policys_first_action_is_a_rung_of_its_own() -> None:
    fleet = running(job(dp=3), 1, resets_gpus=True)
    fleet.now += 0.1
    fleet.find(FindingKind.GPU_ERROR, "n1", gpu=0, recommended_actions=(Remedy.RESET_GPU,), generation=0)
    answer = default(fleet.incident, fleet.view)
    kinds = [rung.kind.value for rung in answer.rungs]
    assert kinds == ["gpu_reset", "hot_swap", "scale_down", "scale_down", "wait"] or kinds == [
        "gpu_reset", "hot_swap", "scale_down", "wait",
    ]  # fmt: skip
    assert gpu_reset("x").then(restart("y")) == gpu_reset("x; then y")
