"""A broadcast knows what each slot restores, however the runs lie, and finds it at the cost of the slot's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.generations import Placement, RestoreRun, ShardKey
from holdfast.domain.orders import Start
from holdfast.supervisor.protocol import Broadcast


def broadcast(slots: int, width: int, restore: Sequence[RestoreRun]) -> Broadcast:
    placements = tuple(Placement(slot, f"n{slot}", slot * width, width) for slot in range(slots))
    return Broadcast("c-1", Start("job", 1, ""), placements, restore)  # type: ignore[arg-type]


def run(rank: int, shard: int, width: int) -> RestoreRun:
    return RestoreRun(rank, ShardKey(1, 10, shard), ("",) * width, ())


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_each_slot_gets_the_runs_of_its_ranks(slots: int, width: int, data: st.DataObject) -> None:
    """Whole slots, single ranks, ranks with several parts, slots with nothing."""
    runs: list[RestoreRun] = []
    for slot in range(slots):
        match data.draw(st.sampled_from(["whole", "ranks", "parts", "nothing"])):
            case "whole":
                runs.append(run(slot * width, slot * width, width))
            case "ranks":
                runs += [run(rank, rank, 1) for rank in range(slot * width, slot * width + width)]
            case "parts":
                runs += [run(rank, part, 1) for rank in range(slot * width, slot * width + width) for part in range(3)]
    made = broadcast(slots, width, tuple(runs))
    for place in made.placements:
        assert made.of(place.slot)[0] == tuple(each for each in runs if each.rank in place.ranks)


class Counted(Sequence[RestoreRun]):
    """One run for each slot, and how often any was looked at."""

    def __init__(self, slots: int, width: int) -> None:
        self._runs = tuple(run(slot * width, slot * width, width) for slot in range(slots))
        self.looks = 0

    @overload
    def __getitem__(self, place: int) -> RestoreRun: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[RestoreRun, ...]: ...
    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return self._runs[place]

    def __len__(self) -> int:
        return len(self._runs)


@pytest.mark.parametrize("slots", [10, 10_000])
def test_finding_them_costs_the_same_in_a_job_of_any_size(slots: int) -> None:
    restore = Counted(slots, 8)
    made = broadcast(slots, 8, restore)
    assert [each.rank for each in made.of(slots - 2)[0]] == [(slots - 2) * 8]
    assert restore.looks <= 5
