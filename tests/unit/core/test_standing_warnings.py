"""Warnings about a running job: when the policy is asked, what the default answers, and that a healthy run stays as it is."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.incidents import Action, ActionKind, Incident, IncidentState
from holdfast.domain.job import WarningSpec
from holdfast.domain.orders import CheckpointNow, Prepare
from holdfast.policy import hot_swap, ignore, restart, wait
from holdfast.supervisor.core.incidents.standing_warnings import WARNINGS_MAX
from holdfast.supervisor.protocol import FindingArrived, JobPhase

STEPS = 1_000_000  # the job's whole length: with steps of a second, eleven days


def training(*, spares: int = 1, decide: bool = True, dp: int = 3) -> Fleet:
    fleet = running(evolve(job(dp=dp), steps=STEPS), spares=spares, saved=10, decide=decide)
    fleet.train(20)
    assert fleet.job.progress.step_s > 0
    return fleet


def warn(
    fleet: Fleet,
    node: str = "n1",
    cost_share: float | None = 0.1,
    kind: FindingKind = FindingKind.STRAGGLER,
    severity: Severity = Severity.WARNING,
    contradicts: str = "",
    name: str = "slow",
    rank: int | None = None,
) -> Finding:
    fleet.finding_count += 1
    finding = Finding(
        id=f"{name}:{node}",
        kind=kind,
        severity=severity,
        at=fleet.now,
        since=fleet.now - 0.05,
        summary=f"{node} is slow.",
        node=node,
        rank=rank,
        job=JOB,
        generation=fleet.job.number,
        cost_share=cost_share,
        confidence=0.9,
        contradicts=contradicts,
        repeat=fleet.finding_count,
    )
    fleet.fold(FindingArrived(fleet.now, finding))
    return finding


def slow(fleet: Fleet, node: str = "n1", cost_share: float = 0.1, name: str = "slow") -> Finding:
    """A condition that lasts: it is reported again after ten minutes."""
    warn(fleet, node, cost_share, name=name)
    later(fleet, 600.0)
    return warn(fleet, node, cost_share, name=name)


def later(fleet: Fleet, seconds: float) -> None:
    """The job trains meanwhile."""
    for _ in range(int(seconds // 300)):
        fleet.wait(300.0)
        fleet.train(fleet.job.progress.step + 1)


def decided(fleet: Fleet) -> list[Incident]:
    """Incidents that are closed, and the open ones, oldest first."""
    return [*fleet.state.closed, *fleet.state.incidents.values()]


def actions(fleet: Fleet) -> list[ActionKind]:
    return [incident.action.kind for incident in decided(fleet) if incident.action is not None]


def test_a_node_that_costs_more_than_its_swap_is_swapped_at_the_next_checkpoint() -> None:
    fleet = training()
    slow(fleet)
    [incident] = fleet.state.incidents.values()
    assert (incident.kind, incident.severity, incident.planned) == ("straggler", "warning", True)
    assert (incident.cost_share, incident.confidence) == (0.1, 0.9)
    assert incident.action is not None
    assert incident.action.kind is ActionKind.HOT_SWAP
    assert "a swap 60.0 s; a spare is free" in incident.action.reason
    assert fleet.orders(CheckpointNow).keys() == {"n0", "n1", "n2"}
    fleet.expect(JobPhase.RUNNING)
    assert fleet.job.planned is not None
    at_step = fleet.job.planned.at_step
    fleet.train(at_step, save=True)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.job.generation is not None
    assert fleet.job.generation.nodes == ("n0", "n3", "n2")
    assert fleet.job.generation.restore.step == at_step, "no step is done twice"
    assert fleet.state.closed[-1].state is IncidentState.RESOLVED
    assert fleet.job.checkpoints.measured.change_s > 0.0, "what a planned change costs is measured"
    assert fleet.state.nodes["n1"].usable, "a warning condemns no node"


def test_a_node_that_costs_less_than_its_swap_stays_and_the_operators_are_notified_once() -> None:
    fleet = running(evolve(job(dp=3), steps=30), spares=1, saved=10)
    fleet.train(20)
    for _ in range(20):
        warn(fleet)
        later(fleet, 600.0)
    assert actions(fleet) == [ActionKind.NOTIFY]
    assert fleet.notes().count("too little for a swap") == 1
    assert fleet.job.number == 1


def test_a_condition_that_was_forgotten_begins_anew() -> None:
    """Diagnostics says it under the same id, as it is of the same rank and generation; but it has not lasted since."""
    fleet = training()
    for _ in range(5):
        warn(fleet)
        later(fleet, 3 * 3600.0)
    assert decided(fleet) == []
    warn(fleet)
    later(fleet, 600.0)
    warn(fleet)
    assert actions(fleet) == [ActionKind.HOT_SWAP]


UNMEASURED = (
    FindingKind.NETWORK_FAULT,
    FindingKind.DEGRADATION,
    FindingKind.STORAGE_FAULT,
    FindingKind.GPU_ERROR,
    FindingKind.NUMERICAL,
    FindingKind.HOST_PRESSURE,
)


def test_a_warning_that_comes_once_is_recorded() -> None:
    fleet = training()
    for kind in UNMEASURED:
        warn(fleet, cost_share=None, kind=kind, name=kind)
    later(fleet, 3600.0)
    assert decided(fleet) == []
    assert fleet.job.number == 1


def test_a_script_that_has_stopped_stepping_is_a_question_at_the_first_report() -> None:
    """Its detector has waited for five minutes: a job that is dead is not to be called running for ten minutes more."""
    fleet = training()
    warn(fleet, node="", cost_share=None, kind=FindingKind.NO_PROGRESS)
    assert actions(fleet) == [ActionKind.NOTIFY]
    for _ in range(5):
        later(fleet, 600.0)
        warn(fleet, node="", cost_share=None, kind=FindingKind.NO_PROGRESS)
    assert actions(fleet) == [ActionKind.NOTIFY], "once"


@pytest.mark.parametrize("kind", UNMEASURED)
def test_a_warning_that_lasts_is_a_question_whatever_it_costs_and_the_default_tells_the_operators_once(
    kind: FindingKind,
) -> None:
    fleet = training()
    for _ in range(20):
        warn(fleet, cost_share=None, kind=kind)
        later(fleet, 600.0)
    assert actions(fleet) == [ActionKind.NOTIFY]
    fleet.connect("n8")  # another spare changes nothing
    warn(fleet, cost_share=None, kind=kind)
    assert actions(fleet) == [ActionKind.NOTIFY]
    assert fleet.job.number == 1


def test_a_policy_may_swap_for_a_warning_whose_cost_nobody_knows() -> None:
    fleet = training(decide=False)
    warn(fleet, cost_share=None, kind=FindingKind.NETWORK_FAULT)
    later(fleet, 600.0)
    warn(fleet, cost_share=None, kind=FindingKind.NETWORK_FAULT)
    fleet.answer(hot_swap("a port that flaps will fail", "n1"), "policy.py")
    assert fleet.job.planned is not None
    fleet.train(fleet.job.planned.at_step, save=True)
    fleet.run()
    assert "n1" not in fleet.nodes()


def test_kinds_that_end_a_run_are_never_questions_while_it_runs() -> None:
    """A policy that restarts on every hang must not be asked about one that is only suspected."""
    fleet = training()
    warn(fleet, kind=FindingKind.HANG)
    assert decided(fleet) == []
    assert fleet.job.number == 1


def test_the_run_continues_whatever_the_policy_takes_time_to_answer() -> None:
    fleet = training(decide=False)
    slow(fleet)
    assert [question.incident for question in fleet.questions] == list(fleet.state.incidents)
    assert fleet.orders(CheckpointNow) == fleet.orders(Prepare) == {}
    fleet.wait(6.0)  # no answer: the default policy decides
    assert actions(fleet) == [ActionKind.HOT_SWAP]


def answering(action: Action) -> Fleet:
    fleet = training(decide=False)
    slow(fleet)
    fleet.answer(action, "policy.py")
    return fleet


def test_a_policy_that_wants_nothing_is_asked_once_and_says_nothing() -> None:
    fleet = answering(ignore("we know"))
    assert "we know" not in fleet.notes()
    for _ in range(50):
        fleet.now += 600.0
        warn(fleet)
    assert fleet.questions == []
    assert actions(fleet) == [ActionKind.IGNORE]
    assert fleet.state.closed[-1].outcome == "we know"


def test_a_policy_that_waits_is_asked_again_when_it_wants_to_be() -> None:
    fleet = answering(wait("in an hour", retry_s=3600.0))
    for _ in range(5):
        later(fleet, 600.0)
        warn(fleet)
    assert fleet.questions == []
    later(fleet, 900.0)
    assert len(fleet.questions) == 1
    fleet.expect(JobPhase.RUNNING)


def test_it_is_asked_again_when_the_condition_costs_much_more_or_a_spare_becomes_free() -> None:
    fleet = answering(ignore("not worth it"))
    warn(fleet, cost_share=0.12)
    assert fleet.questions == []
    warn(fleet, cost_share=0.16)
    assert len(fleet.questions) == 1
    fleet = training(spares=0, decide=False)
    slow(fleet)
    fleet.answer()
    assert actions(fleet) == [ActionKind.NOTIFY]
    fleet.connect("n9")
    assert len(fleet.questions) == 1
    fleet.answer()
    assert actions(fleet)[-1] is ActionKind.HOT_SWAP


def test_a_policy_may_restart_for_a_warning_and_no_step_is_done_twice() -> None:
    fleet = answering(restart("a fresh process may be quicker"))
    assert fleet.job.planned is not None
    at_step = fleet.job.planned.at_step
    fleet.train(at_step, save=True)
    fleet.run()
    assert fleet.job.generation is not None
    assert (fleet.job.number, fleet.job.generation.restore.step) == (2, at_step)


def test_a_job_is_changed_for_warnings_once_in_ten_minutes_at_most() -> None:
    fleet = training(spares=5)
    for round_ in range(40):
        warn(fleet, fleet.job.generation.nodes[round_ % 3] if fleet.job.generation else "")
        if fleet.job.planned is not None:
            fleet.train(fleet.job.planned.at_step, save=True)
            fleet.run()
        fleet.wait(60.0)
        fleet.train(fleet.job.progress.step + 5)
    assert 2 <= fleet.job.number - 1 <= 4, "forty minutes"


def test_two_slow_nodes_are_not_swapped_for_each_other_again_and_again() -> None:
    fleet = training(spares=1)
    for _ in range(30):
        for node in fleet.nodes():
            warn(fleet, node)
        if fleet.job.planned is not None:
            fleet.train(fleet.job.planned.at_step, save=True)
            fleet.run()
        later(fleet, 900.0)
    assert actions(fleet).count(ActionKind.HOT_SWAP) == 1
    assert "swapped out for being slow themselves" in fleet.notes()
    assert all(node.usable for node in fleet.state.nodes.values())


def test_a_rank_that_is_slow_on_every_node_uses_up_no_spares() -> None:
    """It has more work than the others: a busy expert, an uneven split of the data, a log that only this rank writes."""
    fleet = training(spares=5)
    for _ in range(30):
        assert fleet.job.generation is not None
        warn(fleet, fleet.job.generation.nodes[1], rank=1)
        if fleet.job.planned is not None:
            fleet.train(fleet.job.planned.at_step, save=True)
            fleet.run()
        later(fleet, 900.0)
    assert actions(fleet).count(ActionKind.HOT_SWAP) == 1
    assert "but rank 1 was slow on n1, too: it may have more work" in fleet.notes()


def test_a_warning_that_is_withdrawn_before_the_change_changes_nothing() -> None:
    fleet = training()
    reported = slow(fleet)
    assert actions(fleet) == [ActionKind.HOT_SWAP]
    warn(fleet, severity=Severity.INFO, contradicts=reported.id, name="over")
    assert fleet.job.planned is None
    assert fleet.job.warnings == {}
    assert [incident.outcome for incident in fleet.state.closed] == ["withdrawn: n1 is slow."]
    fleet.train(60, save=True)
    assert fleet.job.number == 1


def test_a_fault_comes_first() -> None:
    fleet = training(spares=2)
    slow(fleet)
    fleet.find(FindingKind.WORKER_CRASH, "n2", rank=2)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert [incident.kind for incident in fleet.state.closed] == ["straggler", "worker_crash"]
    assert "overtaken by" in fleet.state.closed[0].outcome
    assert fleet.job.generation is not None
    assert fleet.job.generation.nodes == ("n0", "n1", "n2")


def test_a_policy_for_a_warning_that_fails_is_answered_by_the_default() -> None:
    fleet = answering(hot_swap("to the moon", "n77"))
    [incident] = fleet.state.incidents.values()
    assert incident.decided_by.startswith("default policy, because policy.py answered hot_swap:")


def test_warnings_of_a_job_are_bounded_and_those_that_are_not_repeated_are_forgotten() -> None:
    fleet = running(evolve(job(dp=24), steps=STEPS), saved=10)
    fleet.train(20)
    for number in range(24):
        warn(fleet, f"n{number}")
    assert len(fleet.job.warnings) == WARNINGS_MAX
    later(fleet, fleet.state.config.warning_holds_s + 300.0)
    warn(fleet, "n5", name="new")
    assert [each.finding.id for each in fleet.job.warnings.values()] == ["new:n5"]


def test_nothing_is_asked_while_the_breaker_is_open() -> None:
    fleet = training(decide=False)
    breaker = evolve(fleet.state.breaker, open_until=fleet.now + 300.0, reason="a test")
    fleet.state = evolve(fleet.state, breaker=breaker)
    warn(fleet)
    assert fleet.questions == []
    assert len(fleet.job.warnings) == 1


def test_a_warning_about_a_node_without_ranks_is_recorded() -> None:
    fleet = training()
    warn(fleet, node="n3", kind=FindingKind.PREFLIGHT)
    assert fleet.job.warnings == {}
    assert decided(fleet) == []


def test_a_condition_that_passes_or_comes_and_goes_is_no_reason_for_a_change() -> None:
    fleet = training()
    warn(fleet)
    later(fleet, 7800.0)
    for number in range(50):
        warn(fleet, name=f"flapping-{number}")
        later(fleet, 900.0)
    assert decided(fleet) == []
    assert fleet.job.number == 1


def test_a_job_says_how_long_a_condition_must_last_and_how_far_apart_changes_are() -> None:
    spec = evolve(job(dp=3), steps=STEPS, warnings=WarningSpec(settles_s=5.0, gap_s=20.0))
    fleet = running(spec, spares=2, saved=10, decide=True)
    fleet.train(20)
    warn(fleet, "n1")
    for pause_s, answers in ((4.0, []), (1.5, [ActionKind.HOT_SWAP])):
        fleet.wait(pause_s)
        warn(fleet, "n1")
        assert actions(fleet) == answers
    assert fleet.job.planned is not None
    fleet.train(fleet.job.planned.at_step, save=True)
    fleet.run()
    fleet.train(fleet.job.progress.step + 1)
    changed_at = fleet.job.changed_at
    warn(fleet, "n0")
    fleet.wait(6.0)
    warn(fleet, "n0")
    assert fleet.now < changed_at + 20.0
    assert actions(fleet) == [ActionKind.HOT_SWAP], "it has lasted, and the job was changed just before"
    fleet.wait(changed_at + 20.1 - fleet.now)
    assert actions(fleet) == [ActionKind.HOT_SWAP] * 2


def test_a_job_that_wants_no_delay_is_asked_at_the_first_report() -> None:
    fleet = running(
        evolve(job(dp=3), steps=STEPS, warnings=WarningSpec(settles_s=0.0)), spares=1, saved=10, decide=True
    )
    fleet.train(20)
    warn(fleet)
    assert actions(fleet) == [ActionKind.HOT_SWAP]
