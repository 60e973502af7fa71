"""The plan of a soak: everything is struck, nothing is left to the mood of the moment."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.soak.kinds import KINDS, STRIKES
from benchmarks.soak.report import PARTS
from benchmarks.soak.schedule import SPREAD_S, Kind, longest_s, plan


def kind(name: str, **declared: object) -> Kind:
    return Kind(name=name, does=name, leaves_alone=True, **declared)  # type: ignore[arg-type]


def test_a_seed_gives_the_same_plan_and_another_seed_another() -> None:
    first = list(islice(plan(7, KINDS, 30), 50))
    assert first == list(islice(plan(7, KINDS, 30), 50))
    assert first != list(islice(plan(8, KINDS, 30), 50))


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_is_struck_before_any_is_struck_a_third_time(seed: int) -> None:
    struck: dict[str, int] = dict.fromkeys(KINDS, 0)
    for trial in plan(seed, KINDS, 30):
        names = [strike.kind for strike in trial.strikes]
        assert len(set(names)) == len(names)
        for name in names:
            struck[name] += 1
        if max(struck.values()) > 2:
            break
        if min(struck.values()) >= 1:
            return
    raise AssertionError(f"never: {[name for name, times in struck.items() if not times]}")


@pytest.mark.parametrize("seed", range(20))
def test_what_takes_everything_down_is_mixed_with_nothing(seed: int) -> None:
    mixed = 0
    for trial in islice(plan(seed, KINDS, 30), 100):
        if any(KINDS[strike.kind].alone for strike in trial.strikes):
            assert len(trial.strikes) == 1
        mixed += len(trial.strikes) > 1
    assert mixed > 20


def test_holds_lie_in_their_range_and_the_control_plane_is_away_for_minutes() -> None:
    kinds = {"short": kind("short", hold_s=(1.0, 3.0)), "long": kind("long", long=True, alone=True)}
    for trial in islice(plan(1, kinds, 60), 100):
        for strike in trial.strikes:
            assert 0.0 <= strike.after_s <= SPREAD_S
            least, most = (1.0, 3.0) if strike.kind == "short" else (longest_s(60) / 2, longest_s(60))
            assert least <= strike.hold_s <= most
    assert longest_s(60) == 180.0
    assert longest_s(3) == pytest.approx(21.6)  # a short soak still has room for everything else


def test_without_kinds_there_is_no_plan() -> None:
    with pytest.raises(ValueError, match="no kind"):
        next(plan(1, {}, 1))


def test_every_kind_has_its_strike_and_the_table_names_only_known_ones() -> None:
    assert KINDS.keys() == STRIKES.keys()
    assert all(name == each.name for name, each in KINDS.items())
    assert {name for names in PARTS.values() for name in names} <= KINDS.keys()
