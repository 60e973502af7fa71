"""Inventories as differences: a node may hold hundreds of shards, of which each save changes only a few. Pure.

A difference names the report that it applies to (`Inventory.base`). If that is the last report that the receiver has processed,
the receiver then has exactly the sender's inventory. Otherwise a report was lost, and the receiver must request a complete
inventory. A repeated difference no longer applies and changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter

from holdfast.domain.generations import ShardKey, ShardPlace, ShardRecord
from holdfast.domain.orders import Inventory
from holdfast.domain.runs import PlaceRun, ShardRun, Shards, place_runs, shard_runs

_Place = tuple[int, int, int, str]  # attempt, step, rank, tier
_Step = tuple[int, int, str]  # attempt, step, tier


def difference(old: Inventory, new: Inventory, base: int) -> Inventory:
    """The difference from `old`, which was report `base` of the same job, to `new`; `new` itself if the difference is not
    shorter."""
    before, after = _by_place(old.shards), _by_place(new.shards)
    if len(before) < len(old.shards) or len(after) < len(new.shards):
        return new  # two shards in one place: a difference could not name the one to remove
    changed = tuple(
        record for place, record in after.items() if (old_one := before.get(place)) is not record and old_one != record
    )
    gone = tuple(ShardPlace(record.key, record.tier) for place, record in before.items() if place not in after)
    if len(changed) + len(gone) >= len(new.shards):
        return new
    stored = () if new.stored == old.stored else new.stored
    return Inventory(new.job, changed, stored, base=base, gone=gone)


def changed(held: Iterable[ShardRecord], difference: Inventory) -> Inventory:
    """The complete inventory, from `held`, the shards of the report that `difference` applies to. `stored` is set only if it
    has changed."""
    gone, added = _ranges(place_runs(difference.gone)), shard_runs(difference.shards)
    concerned = gone.keys() | {_step_in(run) for run in added}
    stays: list[ShardRun] = []
    left: list[ShardRun] = []  # of the steps and tiers that change
    for run in shard_runs(held):
        if (at := _step_in(run)) not in concerned:
            stays.append(run)
        elif run.end > _range_from(gone.get(at, ()), run.rank).stop:  # seldom: all ranks of a run leave together
            left.append(run)
    if left:
        places = _by_place(Shards(left))
        for place in list(places):
            attempt, step, rank, tier = place
            if rank in _range_from(gone.get((attempt, step, tier), ()), rank):
                del places[place]
        added = shard_runs((places | _by_place(difference.shards)).values())
    return Inventory(difference.job, Shards((*stays, *added)), difference.stored)


def _ranges(runs: Iterable[PlaceRun]) -> dict[_Step, list[range]]:
    """The ranks of the runs by step and tier, in order and without overlaps: any number of runs is searched quickly."""
    found: dict[_Step, list[range]] = defaultdict(list)
    for run in sorted(runs):
        ranges = found[_step_in(run)]
        if ranges and run.rank <= ranges[-1].stop:
            ranges[-1] = range(ranges[-1].start, max(ranges[-1].stop, run.end))
        else:
            ranges.append(range(run.rank, run.end))
    return found


def _range_from(ranges: Sequence[range], rank: int) -> range:
    """The last range that begins at `rank` or before; empty if none does."""
    place = bisect_right(ranges, rank, key=attrgetter("start"))
    return ranges[place - 1] if place else range(0)


def _step_in(run: ShardRun | PlaceRun) -> _Step:
    return run.attempt, run.step, run.tier


def _by_place(shards: Iterable[ShardRecord]) -> dict[_Place, ShardRecord]:
    return {_place(record.key, record.tier): record for record in shards}


def _place(key: ShardKey, tier: str) -> _Place:
    return key.attempt, key.step, key.rank, tier
