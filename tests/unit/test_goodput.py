"""The goodput ledger: every second in exactly one class, whatever the history."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.domain.findings import StepRecord
from holdfast.domain.incidents import Action, ActionKind, Incident, IncidentState
from holdfast.supervisor.history.booked import Booked
from holdfast.supervisor.history.goodput import account, recent, spans, within
from holdfast.supervisor.history.time_classes import SPANS_MAX, Class, History
from holdfast.wire import records

WORLD = 4


def record(
    step: int,
    begin: float,
    end: float,
    *,
    generation: int = 1,
    world: int = WORLD,
    stall_s: float = 0.0,
    tokens: int = 100,
) -> StepRecord:
    return StepRecord("job", generation, step, world, begin, end, tokens=tokens, loss=None, stall_s=stall_s)


def incident(
    fault: float,
    detected: float,
    decided: float | None,
    first_step: float | None,
    kind: ActionKind = ActionKind.RESTART,
) -> Incident:
    return Incident(
        id=f"i{fault}",
        job="job",
        kind="worker_crash",
        cause="rank 1 died",
        state=IncidentState.RESOLVED,
        generation=1,
        action=Action(kind, "because"),
        fault_at=fault,
        detected_at=detected,
        decided_at=decided,
        first_step_at=first_step,
    )


def history(**changes: object) -> History:
    fields: dict[str, object] = {"started_at": 0.0, "ended_at": 100.0, "full_world_size": WORLD, "full_nodes": 2}
    return History(**(fields | changes))  # type: ignore[arg-type]


def test_a_healthy_run_is_startup_then_useful() -> None:
    steps = [record(n, 10 + n - 1, 10 + n) for n in range(1, 91)]
    ledger = account(history(steps=steps))
    assert ledger.seconds[Class.STARTUP] == pytest.approx(10)
    assert ledger.seconds[Class.USEFUL] == pytest.approx(90)
    assert ledger.goodput_job == pytest.approx(0.9)
    assert ledger.fault_free_tokens_per_s == pytest.approx(100)


def test_an_incident_is_cut_into_detect_decide_recover_and_rework() -> None:
    before = [record(n, n - 1, n) for n in range(1, 11)]  # steps 1-10 until t = 10
    # fault at 10.5, found at 11, decided at 11.5; restored at step 8; 9 and 10 are done again from t = 14
    after = [record(n, 14 + n - 9, 15 + n - 9, generation=2) for n in range(9, 21)]
    ledger = account(history(steps=before + after, incidents=[incident(10.5, 11, 11.5, 15)], ended_at=26.0))
    assert ledger.seconds[Class.DETECT] == pytest.approx(0.5)
    assert ledger.seconds[Class.DECIDE] == pytest.approx(0.5)
    assert ledger.seconds[Class.RECOVER] == pytest.approx(2.5)
    assert ledger.seconds[Class.REWORK] == pytest.approx(0.5 + 2)  # half a step lost, two done twice
    assert ledger.seconds[Class.USEFUL] == pytest.approx(20)
    assert ledger.rework_steps == 2


def test_a_warning_that_led_to_no_change_is_no_part_of_a_later_loss() -> None:
    """Nor does it hide what a crash cost that came while it stood."""
    before = [record(n, n - 1, n) for n in range(1, 11)]
    after = [record(n, 14 + n - 9, 15 + n - 9, generation=2) for n in range(9, 21)]
    crash = incident(10.5, 11, 11.5, 15)
    reported = replace(incident(2, 3, 4, None, ActionKind.NOTIFY), kind="straggler", severity="warning")
    asked = replace(incident(5, 10.2, None, None), kind="straggler", severity="warning", state=IncidentState.OPEN)
    alone = account(history(steps=before + after, incidents=[crash], ended_at=26.0))
    beside = account(history(steps=before + after, incidents=[reported, crash, asked], ended_at=26.0))
    assert beside.seconds == alone.seconds


def test_a_smaller_mesh_is_degraded_and_not_useful_time() -> None:
    full = [record(n, n - 1, n) for n in range(1, 11)]
    half = [record(10 + n, 10 + 2 * (n - 1), 10 + 2 * n, generation=2, world=2) for n in range(1, 6)]
    ledger = account(history(steps=full + half, ended_at=20.0))
    assert ledger.seconds[Class.USEFUL] == pytest.approx(15)
    assert ledger.seconds[Class.DEGRADED] == pytest.approx(5)


def test_checkpoint_copies_are_stall() -> None:
    steps, at = [], 0.0
    for n in range(1, 21):
        stall = 0.5 if n % 5 == 0 else 0.0
        steps.append(record(n, at, at + 1 + stall, stall_s=stall))
        at += 1 + stall
    ledger = account(history(steps=steps, ended_at=at))
    assert ledger.seconds[Class.STALL] == pytest.approx(2.0)
    assert ledger.seconds[Class.USEFUL] == pytest.approx(20.0)


def test_time_without_any_way_to_run_is_wait() -> None:
    steps = [record(1, 0, 1), record(2, 50, 51, generation=2)]
    ledger = account(history(steps=steps, incidents=[incident(1, 2, 3, 51)], waits=[(3.0, 45.0)], ended_at=51.0))
    assert ledger.seconds[Class.WAIT] == pytest.approx(42)
    assert ledger.seconds[Class.RECOVER] == pytest.approx(5)


def test_paid_goodput_counts_the_spares() -> None:
    steps = [record(n, n - 1, n) for n in range(1, 101)]
    ledger = account(history(steps=steps, paid_nodes=[(0.0, 3)]))
    assert ledger.goodput_job == pytest.approx(1.0)
    assert ledger.goodput_paid == pytest.approx(2 / 3)


def test_a_job_that_never_stepped_was_all_startup() -> None:
    ledger = account(history())
    assert ledger.seconds[Class.STARTUP] == 100.0
    assert ledger.goodput_job == 0.0


times = st.floats(0, 100, allow_nan=False)


@st.composite
def histories(draw: st.DrawFn) -> History:
    steps = [
        record(
            draw(st.integers(1, 30)),
            begin := draw(times),
            begin + draw(st.floats(0, 20)),
            generation=draw(st.integers(1, 4)),
            world=draw(st.sampled_from([2, WORLD])),
            stall_s=draw(st.floats(0, 5)),
        )
        for _ in range(draw(st.integers(0, 12)))
    ]
    incidents = []
    for _ in range(draw(st.integers(0, 4))):
        marks = sorted(draw(st.lists(times, min_size=4, max_size=4)))
        known = draw(st.integers(2, 4))
        fault, detected, decided, first = [mark if place < known else None for place, mark in enumerate(marks)]
        kind = draw(st.sampled_from([ActionKind.RESTART, ActionKind.WAIT]))
        incidents.append(incident(fault or 0.0, detected or 0.0, decided, first, kind))
    waits = [tuple(sorted((draw(times), draw(times)))) for _ in range(draw(st.integers(0, 2)))]
    return history(steps=steps, incidents=incidents, waits=waits)


@settings(max_examples=300, deadline=None)
@given(histories())
def test_the_classes_add_up_to_the_wall_time(past: History) -> None:
    ledger = account(past)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s, abs=1e-6)
    assert all(seconds >= 0 for seconds in ledger.seconds.values())
    assert ledger.goodput_job is not None
    assert 0 <= ledger.goodput_job <= 1 + 1e-9


# ---------------------------------------------------------------- scripts that report less


def without_tokens(past: History) -> History:
    return replace(past, steps=[replace(step, tokens=0) for step in past.steps])


def test_a_job_that_reports_no_tokens_has_the_goodput_of_its_steps() -> None:
    """At a constant global batch every step has the same tokens, so it makes no difference whether they are reported."""
    reported, silent = account(eventful()), account(without_tokens(eventful()))
    assert silent.goodput_job == reported.goodput_job != 0.0
    assert silent.seconds == reported.seconds
    assert (silent.tokens, silent.fault_free_tokens_per_s) == (0, 0.0)


def test_tokens_may_be_reported_every_ten_steps() -> None:
    """With the tokens of all ten, as a loop does that logs every ten steps."""
    steps = [record(n, n - 1, n, tokens=1000 if n % 10 == 0 else 0) for n in range(1, 101)]
    ledger = account(history(steps=steps))
    assert ledger.goodput_job == pytest.approx(1.0)
    assert ledger.fault_free_tokens_per_s == pytest.approx(100.0)
    booked = Booked.empty(0.0, WORLD)
    booked.add(steps)
    assert account(history(booked=booked)).goodput_job == pytest.approx(1.0)


def test_the_time_of_a_script_that_reports_no_steps_is_running_and_its_goodput_is_not_known() -> None:
    crash = incident(60.0, 60.5, 61.0, 63.0)
    ledger = account(history(incidents=[crash], unmeasured=[(10.0, 61.0), (63.0, 100.0)]))
    assert ledger.seconds[Class.STARTUP] == pytest.approx(10.0)
    assert ledger.seconds[Class.RUNNING] == pytest.approx(50.0 + 37.0)
    assert (ledger.seconds[Class.DETECT], ledger.seconds[Class.DECIDE]) == pytest.approx((0.5, 0.5))
    assert ledger.seconds[Class.RECOVER] == pytest.approx(2.0)
    assert (ledger.goodput_job, ledger.goodput_paid) == (None, None)
    assert ledger.seconds[Class.USEFUL] == 0.0


def test_a_warning_does_not_turn_the_time_of_such_a_script_into_a_loss() -> None:
    warned = replace(incident(40.0, 41.0, 42.0, None, ActionKind.NOTIFY), severity="warning", state=IncidentState.OPEN)
    ledger = account(history(incidents=[warned], unmeasured=[(10.0, 100.0)]))
    assert ledger.seconds[Class.RUNNING] == pytest.approx(90.0)


# ---------------------------------------------------------------- booked as one goes


def eventful() -> History:
    """Jitter, saves, a crash that costs two steps, a shrunken mesh, a wait."""
    steps, now = [], 5.0
    for n in range(1, 301):
        took = 0.2 + 0.001 * (n * 7919 % 50) + (1.0 if n % 97 == 0 else 0.0)
        stall = 0.05 if n % 20 == 0 else 0.0
        steps.append(record(n, now, now + took + stall, stall_s=stall))
        now += took + stall
    again = now + 6.0
    for n in range(299, 400):
        steps.append(record(n, again, again + 0.4, generation=2, world=2))
        again += 0.4
    faults = (incident(now + 0.1, now + 1.0, now + 1.5, again),)
    return history(ended_at=again + 3.0, steps=steps, incidents=faults, waits=((now + 2.0, now + 4.0),))


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("kept", [0, 1, 50, 101, 200, 400])
def test_steps_that_were_booked_give_the_same_ledger_as_those_that_were_kept(kept: int, *, tokens: bool) -> None:
    whole = eventful() if tokens else without_tokens(eventful())
    direct = account(whole)
    booked = Booked.empty(whole.started_at, whole.full_world_size)
    gone = len(whole.steps) - kept
    booked.add(whole.steps[:gone])
    stored = records.loads(records.dumps(booked, Booked), Booked)
    ledger = account(replace(whole, steps=whole.steps[gone:], booked=stored))
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s)
    assert (ledger.tokens, ledger.rework_steps) == (direct.tokens, direct.rework_steps)
    assert ledger.fault_free_tokens_per_s == pytest.approx(direct.fault_free_tokens_per_s, rel=0.005)
    for name in Class:
        assert ledger.seconds[name] == pytest.approx(direct.seconds[name], abs=0.005 * direct.wall_s), name
    assert account(replace(whole, steps=whole.steps[gone:], booked=stored)) == ledger, "reading changes nothing"


def many(first: int, count: int) -> Iterator[StepRecord]:
    for n in range(first, first + count):
        yield record(n, 10.0 + n, 11.0 + n - 0.001 * (n * 7919 % 100))


def test_what_is_booked_does_not_grow_with_the_steps() -> None:
    booked = Booked.empty(0.0, WORLD)
    booked.add(many(0, 30_000))
    size = len(records.dumps(booked, Booked))
    booked.add(many(30_000, 60_000))
    assert len(records.dumps(booked, Booked)) < 2 * size < 200_000
    ledger = account(history(ended_at=90_020.0, booked=booked))
    assert ledger.seconds[Class.STARTUP] == pytest.approx(11.0, abs=1.0)
    assert len(ledger.tokens_per_s) <= 600
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s)


@pytest.mark.slow
def test_two_million_steps_are_booked() -> None:
    booked = Booked.empty(0.0, WORLD)
    booked.add(many(0, 2_000_000))
    assert len(records.dumps(booked, Booked)) < 200_000
    ledger = account(history(ended_at=2_000_020.0, booked=booked))
    assert ledger.goodput_job == pytest.approx(0.97, abs=0.03)


# ---------------------------------------------------------------- the latest part, and what was when


def struck_run() -> History:
    before = [record(n, n - 1, n) for n in range(1, 11)]
    after = [record(n, 14 + n - 9, 15 + n - 9, generation=2) for n in range(9, 21)]
    return history(steps=before + after, incidents=[incident(10.5, 11, 11.5, 15)], ended_at=26.0)


def test_the_whole_time_is_the_ledger() -> None:
    run = struck_run()
    assert recent(run, -5.0).seconds == pytest.approx(account(run).seconds)


@given(st.floats(0.0, 26.0))
@settings(max_examples=60)
def test_recent_seconds_add_up_from_wherever_they_begin(since: float) -> None:
    run = struck_run()
    latest = recent(run, since)
    assert since <= latest.since <= since + 1.0 + 1e-9, "at most the rest of one step later"
    assert sum(latest.seconds.values()) == pytest.approx(latest.until - latest.since)


def test_a_step_that_is_done_again_in_the_latest_part_is_rework_though_it_was_first_done_before() -> None:
    latest = recent(struck_run(), 13.0)
    assert latest.seconds[Class.REWORK] == pytest.approx(2.0)
    assert latest.seconds[Class.RECOVER] == pytest.approx(1.0)


def test_the_latest_part_goes_on_after_what_is_booked() -> None:
    run = struck_run()
    booked = Booked.empty(0.0, WORLD)
    booked.add(run.steps[:10])
    latest = recent(replace(run, steps=run.steps[10:], booked=booked), 0.0)
    assert latest.since == 10.0
    assert latest.seconds[Class.REWORK] == pytest.approx(2.5), "steps 9 and 10 again, and the half that was lost"
    assert latest.seconds[Class.STARTUP] == 0.0
    assert sum(latest.seconds.values()) == pytest.approx(16.0)


def test_spans_say_what_was_when_without_gaps() -> None:
    found = spans(struck_run())
    assert [(span.begin, span.end, span.kind) for span in found] == [
        (0.0, 10.0, Class.USEFUL),
        (10.0, 10.5, Class.REWORK),
        (10.5, 11, Class.DETECT),
        (11, 11.5, Class.DECIDE),
        (11.5, 14.0, Class.RECOVER),
        (14.0, 16.0, Class.REWORK),
        (16.0, 26.0, Class.USEFUL),
    ]


def test_spans_are_bounded_and_still_cover_the_whole_time() -> None:
    steps = [record(n, 2.0 * n, 2.0 * n + 1, generation=n) for n in range(1, 3 * SPANS_MAX)]
    found = spans(history(steps=steps, ended_at=steps[-1].ended_at + 1000))
    assert len(found) <= SPANS_MAX
    assert (found[0].begin, found[-1].end) == (0.0, steps[-1].ended_at + 1000)
    assert all(before.end == after.begin for before, after in pairwise(found))


@given(since=st.floats(0, 99), length_s=st.floats(0.5, 60))
@settings(max_examples=60, deadline=None)
def test_every_second_of_a_part_is_in_exactly_one_class(since: float, length_s: float) -> None:
    steps = [record(n, 10 + n - 1, 10 + n) for n in range(1, 41)]
    steps += [record(n, 60 + n - 31, 61 + n - 31, generation=2) for n in range(31, 61)]
    given = history(steps=steps, incidents=[incident(50.5, 52.0, 53.0, 61.0)], waits=[(92.0, 96.0)])
    part = within(given, since, since + length_s)
    assert part.since >= since
    assert part.until == min(since + length_s, 100.0)
    assert sum(part.seconds.values()) == pytest.approx(max(0.0, part.until - part.since), abs=1e-6)


def test_parts_of_a_run_together_are_the_run() -> None:
    steps = [record(n, 10 + n - 1, 10 + n) for n in range(1, 81)]
    given = history(steps=steps, waits=[(92.0, 96.0)])
    whole, parts = account(given), [within(given, begin, begin + 25.0) for begin in (0.0, 25.0, 50.0, 75.0)]
    for name in Class:
        assert sum(part.seconds[name] for part in parts) == pytest.approx(whole.seconds[name]), name
    assert sum(part.tokens for part in parts) == whole.tokens
