"""How long what a submission has left is kept: by seconds that were counted, not by clocks."""

from __future__ import annotations

from holdfast.replicator.kept import SUBMISSIONS_MAX, KeptSince

DAY_S = 86_400.0


def test_a_submission_expires_when_it_has_been_over_for_long_enough() -> None:
    kept = KeptSince()
    kept.submitted(100)
    kept.ended(105)
    kept.grow_older(6 * DAY_S, 7 * DAY_S)
    assert kept.expired_before == 0
    kept.submitted(200)
    kept.grow_older(DAY_S, 7 * DAY_S)
    assert kept.expired_before == 106, "counted from its end, not from the next submission"
    kept.grow_older(6 * DAY_S, 7 * DAY_S)
    assert kept.expired_before == 200


def test_nothing_expires_when_it_is_to_be_kept_for_ever() -> None:
    kept = KeptSince()
    kept.ended(5)
    kept.grow_older(1e9, 0)
    assert kept.expired_before == 0


def test_many_submissions_are_remembered_as_few() -> None:
    kept = KeptSince()
    for number in range(1, 3 * SUBMISSIONS_MAX):
        kept.submitted(number)
    assert len(kept.ages_s) == SUBMISSIONS_MAX
    kept.grow_older(8 * DAY_S, 7 * DAY_S)
    assert kept.expired_before == 3 * SUBMISSIONS_MAX - 1
