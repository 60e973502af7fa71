"""Which state a term begins from, and who takes an empty Redis first."""

from __future__ import annotations

import pytest

from holdfast.domain.errors import StaleEpoch
from holdfast.supervisor.core import State
from holdfast.supervisor.leader.kept import Kept

TTL_S = 3.0
MINE = State(epoch=10, folded_at=100.0)


def led() -> Kept:
    kept = Kept()
    kept.led = True
    kept.keep(MINE, now_s=50.0)
    return kept


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(State(epoch=10, folded_at=100.0), id="the same"),
        pytest.param(State(epoch=10, folded_at=100.5), id="with a commit whose answer was lost"),
        pytest.param(State(epoch=11, folded_at=99.0), id="of a later leader, whatever its clock was"),
    ],
)
def test_a_redis_that_has_lost_nothing_is_right(stored: State) -> None:
    assert led().choose(stored, epoch=12) == (stored, "")


@pytest.mark.parametrize(
    ("stored", "lost"),
    [(State(), "all data"), (State(epoch=10, folded_at=98.5), "1.5 s"), (State(epoch=9, folded_at=90.0), "10.0 s")],
)
def test_the_kept_state_is_newer_than_what_redis_has_left(stored: State, lost: str) -> None:
    state, text = led().choose(stored, epoch=12)
    assert state is MINE
    assert lost in text


def test_an_epoch_that_the_kept_state_has_seen_is_not_used() -> None:
    with pytest.raises(StaleEpoch):
        led().choose(State(), epoch=10)


def test_a_new_fleet_has_lost_nothing() -> None:
    assert Kept().choose(State(), epoch=1) == (State(), "")
    assert Kept().patience_s(0.0, TTL_S) == 0.0


def test_who_knows_more_takes_an_empty_redis_first() -> None:
    kept = led()
    assert kept.patience_s(50.0 + TTL_S, TTL_S) == 0.0, "nobody else can have led since"
    assert kept.patience_s(51.0 + TTL_S, TTL_S) == TTL_S
    kept.another_leads()
    assert kept.patience_s(51.0, TTL_S) == 2 * TTL_S
    state, text = kept.choose(State(), epoch=12)
    assert state == State()
    assert "no supervisor has them in memory" in text


def test_a_lease_that_outlives_its_term_is_not_that_of_another_leader() -> None:
    kept = led()
    assert kept.is_of(MINE.epoch)
    assert not kept.is_of(MINE.epoch + 1)
    kept.another_leads()
    assert not kept.is_of(MINE.epoch)


def test_older_data_that_nobody_can_complete_is_reported() -> None:
    kept = led()
    kept.another_leads()
    kept.lost = True
    assert "its last writes" in kept.choose(MINE, epoch=12)[1]
    kept.another_leads()
    assert kept.choose(MINE, epoch=12)[1] == ""
