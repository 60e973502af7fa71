"""What a warning costs its job is taken from the job's step times, where they tell it plainly; else it is not known."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.incidents import ActionKind, Incident
from holdfast.supervisor.api import incident_views
from holdfast.supervisor.core.incidents.standing_warnings import COST_KEY, COSTED_BY_STEPS
from holdfast.supervisor.core.rules.step_times import (
    BUCKET_S,
    BUCKETS_MAX,
    FROM_BUCKETS,
    LAG_S,
    SAMPLES_MAX,
    SHARE_MIN,
    SINCE_BUCKETS,
    SURE_MAX,
    StepTimes,
    cost,
    recorded,
)
from holdfast.supervisor.protocol import FindingArrived, StepsCompleted

HOUR_S = 3600.0
AT = 1_000_000.0


def series(step_s: Callable[[float], float], seconds: float = HOUR_S, every_s: float = 4.0) -> StepTimes:
    """Step times that a job reports for so long, from AT on."""
    known, at = StepTimes(), AT
    while at < AT + seconds:
        known = recorded(known, 1, at, step_s(at - AT))
        at += every_s
    return known


def slower(after_s: float, by: float) -> Callable[[float], float]:
    return lambda at: 1.0 if at < after_s else 1.0 + by


# ---------------------------------------------------------------- times that are kept


def test_a_bucket_has_the_median_of_samples_that_are_spread_over_it() -> None:
    known = series(lambda at: 9.0 if at % BUCKET_S < 40.0 else 1.0, every_s=1.0)
    assert set(known.medians) == {1.0}, "a third of each bucket was slow"
    assert len(known.samples) <= SAMPLES_MAX
    assert len(known.medians) == HOUR_S / BUCKET_S - 1


def test_an_hour_is_kept_whatever_comes() -> None:
    known = series(lambda at: 1.0, seconds=3 * HOUR_S, every_s=30.0)
    assert len(known.medians) == BUCKETS_MAX
    after_a_week = recorded(known, 1, known.began_at + 7 * 86_400.0, 1.0)
    assert after_a_week.medians == (0.0,) * BUCKETS_MAX
    assert after_a_week.began_at + BUCKET_S > known.began_at + 7 * 86_400.0


def test_another_generation_begins_anew() -> None:
    known = recorded(series(lambda at: 1.0), 2, AT + HOUR_S, 3.0)
    assert known == StepTimes(2, AT + HOUR_S, (3.0,))


def test_a_clock_that_went_back_begins_anew() -> None:
    assert recorded(series(lambda at: 1.0), 1, AT - 5.0, 3.0) == StepTimes(1, AT - 5.0, (3.0,))


# ---------------------------------------------------------------- what they say


def test_a_job_that_is_slower_since_tells_the_cost() -> None:
    reported = cost(series(slower(1800.0, 0.25)), AT + 1800.0, AT + 1830.0)
    assert reported.share == pytest.approx(0.2)
    assert reported.why == "a step took 1 s in the 20 min before it, and 1.25 s since"


def test_a_detector_may_be_late_by_the_time_that_it_needs() -> None:
    assert cost(series(slower(1800.0, 0.25)), AT + 1800.0 + LAG_S, AT + 1800.0 + LAG_S).share == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("step_s", "began_s", "why"),
    [
        (slower(HOUR_S, 0.0), 1800.0, "less than 10% of the rate is lost, if any"),
        (slower(1800.0, 0.9 * SHARE_MIN), 1800.0, "less than 10% of the rate is lost, if any"),
        (slower(600.0, 0.25), 1800.0, "less than 10% of the rate is lost, if any"),  # it was slow long before
        (slower(1500.0, 0.25), 2400.0, "varied as much without it"),  # it became slow in between
        (lambda at: 1.25 if 1800.0 <= at < 2900.0 else 1.0, 1800.0, "varied as much without it"),  # and is over
        (lambda at: 1.0 + 0.3 * (at // 240 % 2), 1800.0, ""),  # it varies by itself
        (slower(300.0, 0.25), 300.0, "too few steps of this generation are known from before it"),
        (slower(3500.0, 0.25), 3500.0, "too few steps are known since it was reported"),
    ],
)
def test_where_it_is_not_plain_nothing_is_known(step_s: Callable[[float], float], began_s: float, why: str) -> None:
    reported = cost(series(step_s), AT + began_s, AT + began_s)
    assert reported.share is None
    assert why in reported.why


def test_a_pause_is_no_cost() -> None:
    reported = cost(series(lambda at: 60.0 if 2400.0 <= at < 2520.0 else 1.0), AT + 1800.0, AT + 1800.0)
    assert reported.share is None


def test_a_job_without_steps_has_no_cost_that_is_known() -> None:
    assert cost(StepTimes(), AT, AT).share is None


def test_the_limits_fit_into_what_is_kept() -> None:
    asked_s = (
        1200.0 + LAG_S + 600.0 + (FROM_BUCKETS[0] + 2) * BUCKET_S
    )  # condition over 10 min, asked at its third report
    assert asked_s <= BUCKETS_MAX * BUCKET_S
    assert 600.0 // BUCKET_S - 1 >= SINCE_BUCKETS, "known when the question is asked"


def test_jobs_that_change_by_themselves_seldom_seem_to_suffer_from_a_warning() -> None:
    """Each job has another pace by up to half about once a day, and noise of 3 %; a warning begins at any moment and lasts."""
    rng, false, warnings = Random(7), 0, 2000
    for _ in range(warnings):
        changes, at = [0.0], 0.0
        while (at := at + rng.expovariate(1 / 86_400.0)) < HOUR_S:
            changes.append(at)
        spans = list(pairwise([*changes, HOUR_S]))
        paces = [1.0 + rng.uniform(-0.5, 0.5) for _ in spans]
        pace = dict(zip(spans, paces, strict=True))

        def step_s(at: float, pace: dict[tuple[float, float], float] = pace) -> float:
            usual = next(value for (begin, end), value in pace.items() if begin <= at < end)
            return usual * rng.gauss(1.0, 0.03)

        began_s = 1800.0 + rng.uniform(-600.0, 600.0)
        false += cost(series(step_s, every_s=24.0), AT + began_s, AT + began_s + 60.0).share is not None
    assert false / warnings <= 0.005, "so that of a hundred warnings that last, each day, half a job at most is changed"


# ---------------------------------------------------------------- in the core


def train(fleet: Fleet, seconds: float, step_s: float) -> None:
    """The job trains; its steps are reported twice a minute."""
    until = fleet.now + seconds
    while fleet.now < until:
        fleet.wait(30.0)
        number = fleet.job.progress.step + 1
        fleet.fold(StepsCompleted(fleet.now, JOB, fleet.job.number, number, fleet.now, 10, step_s))


def training(*, spares: int = 1) -> Fleet:
    fleet = running(evolve(job(dp=3), steps=1_000_000), spares=spares, saved=10)
    train(fleet, 1800.0, 1.0)
    return fleet


def warn(fleet: Fleet, kind: FindingKind, node: str = "n1", since: float | None = None) -> None:
    fleet.finding_count += 1
    finding = Finding(
        id=f"{kind}:{node}",
        kind=kind,
        severity=Severity.WARNING,
        at=fleet.now,
        since=fleet.now - 5.0 if since is None else since,
        summary=f"{node} gets worse.",
        node=node,
        job=JOB if kind is FindingKind.STRAGGLER else "",
        confidence=0.9,
        repeat=fleet.finding_count,
    )
    fleet.fold(FindingArrived(fleet.now, finding))


def lasts(fleet: Fleet, kind: FindingKind, step_s: float, node: str = "n1") -> Incident:
    """The job's steps take that long from the first report on; after the second one the policy is asked."""
    since = fleet.now - 5.0
    warn(fleet, kind, node, since)
    train(fleet, 630.0, step_s)
    warn(fleet, kind, node, since)
    return [*fleet.state.closed, *fleet.state.incidents.values()][-1]


@pytest.mark.parametrize("kind", COSTED_BY_STEPS)
def test_a_node_that_slows_its_job_down_is_swapped_at_the_next_checkpoint(kind: FindingKind) -> None:
    fleet = training()
    incident = lasts(fleet, kind, 1.5)
    assert incident.cost_share == pytest.approx(1 / 3, abs=0.001)
    assert incident.confidence == SURE_MAX
    shown = incident_views.incident(incident)
    assert (shown.cost_share, shown.confidence) == (incident.cost_share, SURE_MAX)
    assert incident.evidence[COST_KEY].startswith("a step took 1 s in the 20 min before it, and 1.5 s since")
    assert incident.action is not None
    assert incident.action.kind is ActionKind.HOT_SWAP
    fleet.save_asked()
    fleet.run()
    assert fleet.nodes() == ("n0", "n3", "n2")


def test_a_warning_that_costs_nothing_is_reported_once() -> None:
    fleet = training()
    incident = lasts(fleet, FindingKind.DEGRADATION, 1.0)
    assert incident.cost_share is None
    assert "less than 10% of the rate is lost" in incident.evidence[COST_KEY]
    assert (incident.action is not None, incident.confidence) == (True, 0.9)
    for _ in range(6):
        train(fleet, 600.0, 1.0)
        warn(fleet, FindingKind.DEGRADATION)
    answers = [each.action.kind for each in fleet.state.closed if each.action is not None]
    assert answers == [ActionKind.NOTIFY]
    assert fleet.job.number == 1


def test_a_job_that_is_slower_for_another_reason_is_not_changed_for_a_kind_that_says_nothing_of_speed() -> None:
    fleet = training()
    incident = lasts(fleet, FindingKind.HOST_PRESSURE, 1.5)
    assert incident.cost_share is None
    assert incident.action is not None
    assert incident.action.kind is ActionKind.NOTIFY


def test_two_nodes_that_get_worse_at_once_are_not_swapped_for_a_guess() -> None:
    fleet = training(spares=2)
    warn(fleet, FindingKind.NETWORK_FAULT, "n2")
    incident = lasts(fleet, FindingKind.DEGRADATION, 1.5)
    assert incident.cost_share is None
    assert "but so does what was found of n2 at that time" in incident.evidence[COST_KEY]
    assert incident.action is not None
    assert incident.action.kind is ActionKind.NOTIFY


def test_what_was_found_of_another_node_long_before_explains_nothing() -> None:
    fleet = training(spares=2)
    warn(fleet, FindingKind.STORAGE_FAULT, "n2")
    train(fleet, 1800.0, 1.0)
    assert lasts(fleet, FindingKind.DEGRADATION, 1.5).cost_share == pytest.approx(1 / 3, abs=0.001)


def test_what_costs_something_only_later_is_asked_about_again() -> None:
    fleet = training()
    assert lasts(fleet, FindingKind.DEGRADATION, 1.0).cost_share is None
    train(fleet, 1200.0, 1.5)
    warn(fleet, FindingKind.DEGRADATION)
    assert fleet.job.planned is None, "it became slow long after the condition began: that is no explanation"


def test_a_new_generation_knows_nothing_of_the_times_before() -> None:
    fleet = training(spares=1)
    fleet.lose("n2")
    fleet.run()
    assert fleet.job.step_times.generation != fleet.job.number or not fleet.job.step_times.medians
    train(fleet, 60.0, 1.5)
    assert lasts(fleet, FindingKind.DEGRADATION, 1.5).cost_share is None


def test_without_a_spare_it_is_asked_again_when_there_is_one() -> None:
    fleet = training(spares=0)
    incident = lasts(fleet, FindingKind.DEGRADATION, 1.5)
    assert incident.action is not None
    assert "no spare is free" in incident.action.reason
    fleet.connect("n9")
    answers = [each.action for each in fleet.state.incidents.values()]
    assert [each.kind for each in answers if each is not None] == [ActionKind.HOT_SWAP]
