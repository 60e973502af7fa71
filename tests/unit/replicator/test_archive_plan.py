"""Which steps go to the object store: nodes that never talk choose the same ones, whatever their clocks say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.replicator.archive_plan import ABANDONED_S, LEVEL_MAX, archive_steps, chosen, level, level_wanted
from holdfast.replicator.plan import BACKLOG_STEPS_MAX, KEEP_MIN, plan
from holdfast.replicator.view import (
    Archive,
    Archived,
    Complete,
    Copies,
    CopyToDisk,
    Delete,
    Discard,
    Held,
    Save,
    Survey,
    Tier,
    Upload,
    View,
)

Age = CheckpointId


def saves(steps: Sequence[int], *, every_s: float = 1.0, attempt: int = 1, start: float = 1e9) -> tuple[Save, ...]:
    """One second per step, by default."""
    return tuple(Save(attempt, step, start + step * every_s) for step in steps)


def view(*held: int, archive: Archive, attempt: int = 1, ranks: tuple[int, ...] = (0,), **changes: object) -> View:
    disk = tuple(Held(Tier.DISK, ShardKey(attempt, step, rank)) for step in held for rank in ranks)
    others = CheckpointId(9, 0)  # every node is said to have something newer than anything here
    base = View(
        attempt, ranks, world_size=2, keep=2, peers=(), held=Copies.of(disk), archive=archive, saved_by_all=others
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def archive(**changes: object) -> Archive:
    return replace(Archive(interval_s=60.0, keep=2, surveyed=True), **changes)  # type: ignore[arg-type]


def done(*steps: int, attempt: int = 1) -> tuple[Archived, ...]:
    return tuple(Archived(attempt, step, complete=True) for step in sorted(steps, reverse=True))


# ---------------------------------------------------------------- the choice


def choices(seen: tuple[Save, ...], interval_s: float, restored: int | None = 0) -> list[int]:
    """What a node chooses that sees these saves come one by one, and whose uploads take no time."""
    taken: list[int] = []
    for count in range(1, len(seen) + 1):
        now = archive(interval_s=interval_s, saves=seen[:count], steps=done(*taken))
        restored_at = None if restored is None else CheckpointId(0, restored)
        step = chosen(view(seen[count - 1].step, archive=now, restored=restored_at))
        if step is not None:
            taken.append(step[1])
    return taken


def test_one_step_per_interval_whatever_the_rhythm_of_the_saves() -> None:
    for every in (1, 3, 10, 37, 50):
        taken = choices(saves(range(every, 2000, every)), interval_s=60.0)
        later = taken[2:]  # before two saves there is no pace
        gaps = [after - before for before, after in pairwise(later)]
        assert min(gaps) >= min(64, 64 - every)
        assert max(gaps) <= 64 + every


def test_every_save_goes_when_saves_are_rarer_than_the_interval() -> None:
    assert choices(saves([100, 200, 300], every_s=1.0), interval_s=60.0) == [100, 200, 300]


def test_the_first_save_of_a_run_goes_at_once_and_that_of_a_restart_only_when_its_slot_is_new() -> None:
    assert choices(saves([5]), interval_s=60.0, restored=None) == [5]
    known = saves([40, 50], attempt=1)
    for step, expected in ((60, None), (70, (2, 70))):  # the slot of 64 begins in between
        seen = archive(saves=(*known, Save(2, step, 2e9)), steps=())
        assert chosen(view(step, archive=seen, attempt=2, restored=CheckpointId(1, 50))) == expected


@settings(max_examples=50, deadline=None)
@given(
    offsets=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=4),
    jitters=st.lists(st.floats(-0.4, 0.4), min_size=40, max_size=40),
    every=st.integers(1, 40),
    interval_s=st.floats(5, 500),
)
def test_nodes_meet_though_their_clocks_differ_and_tremble(
    offsets: list[float], jitters: list[float], every: int, interval_s: float
) -> None:
    steps = list(range(every, every * 200, every))
    taken = [
        choices(
            tuple(
                Save(1, step, 1e9 + offset + step + jitters[(i * (n + 1)) % 40] * every / 2)
                for i, step in enumerate(steps)
            ),
            interval_s,
        )
        for n, offset in enumerate(offsets)
    ]
    together = set.intersection(*map(set, taken))
    slot = 2 ** max(level_wanted(saves(steps), interval_s) + 1, 1)  # the pace trembles: one level more at worst
    firsts = {step for before, step in zip([0, *steps], steps, strict=False) if step // slot != before // slot}
    assert firsts - {steps[0], steps[1]} <= together


@settings(deadline=None)
@given(st.sets(st.integers(1, 300), max_size=60), st.floats(5, 100))
def test_a_node_that_missed_saves_chooses_more_steps_never_others(missed: set[int], interval_s: float) -> None:
    everything = saves(range(1, 400))
    j = level_wanted(everything, interval_s)
    seen = tuple(save for save in everything if save.step not in missed)
    mine = {
        step.step
        for step in seen
        if level(step.step, max((s.step for s in seen if s.step < step.step), default=0)) >= j
    }
    theirs = {save.step for save in everything if level(save.step, save.step - 1) >= j}
    assert theirs - missed <= mine


def test_a_clock_that_jumps_once_changes_nothing() -> None:
    calm = saves(range(10, 300, 10))
    jumped = tuple(replace(save, created_at=save.created_at + 3600 * (save.step > 100)) for save in calm)
    back = tuple(replace(save, created_at=save.created_at - 3600 * (save.step > 100)) for save in calm)
    assert {level_wanted(each, 60.0) for each in (calm, jumped, back)} == {6}


def test_without_a_pace_rather_a_step_too_many() -> None:
    assert level_wanted((), 300.0) == 0
    assert level_wanted(saves([10, 20], every_s=0.0), 300.0) == 0
    assert level_wanted(saves([10, 20], every_s=1e-30, start=0.0), 300.0) == LEVEL_MAX


def test_what_all_have_chosen_goes_before_what_is_newer() -> None:
    slow = archive(interval_s=1.0, saves=saves(range(60, 71)))  # a clock gone wrong: every step is due here
    assert chosen(view(*range(61, 71), archive=slow, restored=CheckpointId(0, 60))) == (1, 64)


def test_a_step_that_somebody_has_begun_is_joined() -> None:
    begun = archive(saves=saves(range(1, 8)), steps=(Archived(1, 5, complete=False),))
    assert chosen(view(5, 6, 7, archive=begun, restored=CheckpointId(0, 0))) == (1, 5)
    assert chosen(view(6, 7, archive=begun, restored=CheckpointId(0, 0))) is None  # not here any more


def test_nothing_older_than_the_newest_complete_step_goes_up() -> None:
    seen = archive(saves=saves([64, 128, 192]), steps=done(128))
    assert chosen(view(64, 128, archive=seen, restored=CheckpointId(0, 0))) is None
    assert chosen(view(64, 128, 192, archive=seen, restored=CheckpointId(0, 0))) == (1, 192)


def test_a_step_goes_up_when_all_ranks_of_the_node_are_on_disk() -> None:
    seen = archive(saves=saves([64]))
    both = view(64, archive=seen, ranks=(0, 1))
    assert [step.key.rank for step in archive_steps(both) if isinstance(step, Upload)] == [0, 1]
    half = replace(both, held=Copies.of(list(both.held)[:1]))
    assert archive_steps(half) == []
    rest = replace(both, archive=replace(seen, uploaded=frozenset({ShardKey(1, 64, 0)})))
    assert [step.key.rank for step in archive_steps(rest) if isinstance(step, Upload)] == [1]


def test_a_shard_that_is_there_waits_for_the_others_until_a_newer_step_is_complete() -> None:
    mine = archive(saves=saves([64, 128]), uploaded=frozenset({ShardKey(1, 64, 0), ShardKey(1, 128, 0)}))
    (step,) = archive_steps(view(64, 128, archive=mine))
    assert isinstance(step, Complete)
    assert step.ages == ((1, 128), (1, 64))
    assert archive_steps(view(64, 128, archive=replace(mine, steps=done(128)))) == []


def test_a_new_generation_looks_first_and_a_job_without_store_or_configuration_does_nothing() -> None:
    assert [type(step) for step in archive_steps(view(archive=archive(surveyed=False)))] == [Survey]
    assert archive_steps(view(64, archive=archive(saves=saves([64])), attempt=0, ranks=())) == []
    assert archive_steps(replace(view(archive=archive()), archive=None)) == []


# ---------------------------------------------------------------- together with the disk


def test_the_step_on_its_way_to_the_store_stays_on_disk() -> None:
    held = tuple(range(64, 80))
    going = view(*held, archive=archive(saves=saves(held)), peers=("b",), restored=CheckpointId(0, 0))
    pushed = frozenset({(ShardKey(1, 79, 0), "b")})
    gone = {step.key.step for step in plan(replace(going, pushed=pushed)) if isinstance(step, Delete)}
    assert gone == set(range(65, 78))


def test_without_peers_the_store_is_the_next_tier() -> None:
    held = tuple(range(129, 129 + KEEP_MIN + 3))
    lone = view(*held, archive=archive(saves=saves(held)), restored=CheckpointId(0, 128))

    def deleted(given_view: View) -> set[int]:
        return {step.key.step for step in plan(given_view) if isinstance(step, Delete)}

    assert deleted(lone) == set()
    assert deleted(replace(lone, archive=replace(lone.archive, steps=done(131)))) == {129, 130}  # type: ignore[type-var]
    many = tuple(range(129, 129 + KEEP_MIN + BACKLOG_STEPS_MAX + 1))
    assert deleted(view(*many, archive=archive(saves=saves(many)), restored=CheckpointId(0, 128))) == {129}


def test_what_the_store_wants_is_copied_although_a_newer_save_is_there() -> None:
    images = tuple(Held(Tier.IMAGE, ShardKey(1, step, 0)) for step in (64, 65))
    held = Copies.of(images)
    waiting = replace(view(archive=archive(saves=saves([62, 63, 64, 65])), restored=CheckpointId(0, 61)), held=held)
    assert [step.key.step for step in plan(waiting) if isinstance(step, CopyToDisk)] == [64, 65]


# ---------------------------------------------------------------- what leaves the store


def discarded(given_view: View) -> set[Age]:
    return {step.checkpoint_id for step in archive_steps(given_view) if isinstance(step, Discard)}


def test_so_many_complete_steps_stay_and_rank_0s_node_decides() -> None:
    full = archive(steps=done(10, 20, 30, 40))
    assert discarded(view(archive=full)) == {(1, 10), (1, 20)}
    assert discarded(view(archive=full, ranks=(1,))) == set()
    assert discarded(view(archive=replace(full, surveyed=False))) == set()
    assert discarded(view(archive=replace(full, keep=0))) == {(1, 10), (1, 20), (1, 30)}


def test_the_newest_step_that_may_be_restored_stays_while_the_later_ones_are_of_a_corrupt_state() -> None:
    """The supervisor sends no later step than the last verified one."""
    full = archive(steps=done(10, 20, 30, 40, 50))
    assert discarded(view(archive=full, saved_by_all=CheckpointId(1, 25))) == {(1, 10), (1, 30)}
    assert discarded(view(archive=full, saved_by_all=CheckpointId(1, 20))) == {(1, 10), (1, 30)}
    assert discarded(view(archive=full, saved_by_all=CheckpointId(1, 45))) == {(1, 10), (1, 20), (1, 30)}
    assert discarded(view(archive=full, saved_by_all=CheckpointId(1, 5))) == {(1, 20), (1, 30)}, (
        "25 may be common, next"
    )
    assert discarded(view(archive=full, saved_by_all=None)) == {(1, 20), (1, 30)}, "no update has come yet"


def test_after_a_restart_the_restored_step_counts_until_the_first_update() -> None:
    steps = (*done(10, 20, 30), *done(40, 50, 60, attempt=2))
    now = view(archive=archive(steps=steps), attempt=2, restored=CheckpointId(1, 30), saved_by_all=None)
    assert discarded(now) == {(1, 10), (1, 20), (2, 40)}
    abandoned = replace(now, saved_by_all=CheckpointId(1, 35))
    assert discarded(abandoned) == discarded(now)


def test_a_lineage_given_up_goes_when_the_new_one_has_enough() -> None:
    old = (*done(10, 20, 30), Archived(2, 25, complete=True))
    later = (Archived(2, 35, complete=True), *old)
    restored: Age = CheckpointId(1, 20)
    assert discarded(view(archive=archive(steps=old), attempt=2, restored=restored)) == {(1, 10)}
    assert discarded(view(archive=archive(steps=later), attempt=2, restored=restored)) == {(1, 10), (1, 20)}
    more = (*done(10, 20, 30, 40, 50), Archived(2, 25, complete=True), Archived(2, 35, complete=True))
    assert discarded(view(archive=archive(steps=more), attempt=2, restored=restored)) == {(1, 10), (1, 20), (1, 30)}, (
        "the newest that were given up stay: the user may know better"
    )


def test_what_an_earlier_submission_has_in_the_store_stays_until_somebody_asks() -> None:
    new = tuple(Archived(101, step, complete=True) for step in (10, 20, 30, 40))
    everything = archive(steps=(*new, *done(10, 20, 30)))
    now = view(archive=everything, attempt=101, first_attempt=101, saved_by_all=CheckpointId(101, 40))
    assert discarded(now) == {(101, 10), (101, 20)}
    assert discarded(replace(now, restored=CheckpointId(1, 30))) == {(101, 10), (101, 20)}


def test_what_never_became_complete_goes_by_age_and_only_behind_a_complete_one() -> None:
    stale, fresh = Archived(1, 20, False, idle_s=ABANDONED_S + 1), Archived(1, 20, False, idle_s=ABANDONED_S - 1)
    assert discarded(view(archive=archive(steps=(*done(30), stale)))) == {(1, 20)}
    assert discarded(view(archive=archive(steps=(*done(30), fresh)))) == set()
    assert discarded(view(archive=archive(steps=(stale, *done(10))))) == set()


@given(
    st.sets(st.tuples(st.integers(1, 3), st.integers(1, 6), st.booleans()), max_size=18),
    st.integers(0, 4),
    st.one_of(st.none(), st.tuples(st.integers(1, 2), st.integers(1, 6))),
)
def test_the_newest_complete_step_of_the_lineage_is_never_discarded(
    found: set[tuple[int, int, bool]], keep: int, restored: Age | None
) -> None:
    steps = {(a, s): Archived(a, s, complete, idle_s=1e9) for a, s, complete in found}
    now = view(archive=archive(steps=tuple(steps.values()), keep=keep), attempt=3, restored=restored)
    gone = discarded(now)
    live = [
        checkpoint_id
        for checkpoint_id, step in steps.items()
        if step.complete and (checkpoint_id[0] == 3 or (restored and checkpoint_id <= restored))
    ]
    if live:
        assert max(live) not in gone
    elif any(step.complete for step in steps.values()):
        assert gone == set()


@pytest.mark.parametrize(("step", "before", "expected"), [(64, 63, 6), (65, 64, 0), (100, 37, 6), (7, None, LEVEL_MAX)])
def test_levels(step: int, before: int | None, expected: int) -> None:
    assert level(step, before) == expected


# ---------------------------------------------------------------- asked for


def test_a_step_that_was_asked_for_goes_although_its_slot_has_one_and_before_all_others() -> None:
    seen = saves(range(10, 60, 10))
    begun = done(10)
    assert chosen(view(10, 40, 50, archive=archive(interval_s=3600.0, saves=seen, steps=begun))) is None
    asked = archive(interval_s=3600.0, saves=seen, steps=begun, asked=frozenset({(1, 40)}))
    assert chosen(view(10, 40, 50, archive=asked)) == (1, 40)
    every = replace(asked, interval_s=0.001)
    assert chosen(view(10, 40, 50, archive=every)) == (1, 40)


def test_it_is_taken_to_disk_before_the_next_save_may_overwrite_it_and_stays_there_until_it_is_stored() -> None:
    seen = saves(range(10, 60, 10))
    asked = archive(interval_s=3600.0, saves=seen, steps=done(10), asked=frozenset({(1, 40)}))
    images = (Held(Tier.IMAGE, ShardKey(1, 40, 0)), Held(Tier.IMAGE, ShardKey(1, 50, 0)))
    first = plan(replace(view(archive=asked), held=Copies.of(images)))[0]
    assert isinstance(first, CopyToDisk)
    assert first.key.step == 40
    later = view(10, 40, *range(50, 200, 10), archive=replace(asked, saves=saves(range(10, 200, 10))))
    gone = {step.key.step for step in plan(later) if isinstance(step, Delete)}
    assert gone
    assert 40 not in gone
