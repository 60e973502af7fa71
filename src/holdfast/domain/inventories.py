"""Inventories as differences: a node may hold hundreds of shards, of which each save changes only a few. Pure.

A difference names the report that it applies to (`Inventory.base`). If that is the last report that the receiver has processed,
the receiver then has exactly the sender's inventory. Otherwise a report was lost, and the receiver must request a complete
inventory. A repeated difference no longer applies and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.domain.generations import ShardKey, ShardPlace, ShardRecord
from holdfast.domain.orders import Inventory
from holdfast.domain.runs import ShardRun, Shards, shard_runs

_Place = tuple[int, int, int, str]  # attempt, step, rank, tier


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
    gone = {(place.key.attempt, place.key.step, place.tier) for place in difference.gone}
    concerned = gone | {_step_in(run) for run in shard_runs(difference.shards)}
    stays: list[ShardRun] = []
    others: list[ShardRun] = []
    for run in shard_runs(held):
        (others if _step_in(run) in concerned else stays).append(run)
    places = _by_place(Shards(others))
    for place in difference.gone:
        places.pop(_place(place.key, place.tier), None)
    places |= _by_place(difference.shards)
    return Inventory(difference.job, Shards((*stays, *shard_runs(places.values()))), difference.stored)


def _step_in(run: ShardRun) -> tuple[int, int, str]:
    return run.attempt, run.step, run.tier


def _by_place(shards: Iterable[ShardRecord]) -> dict[_Place, ShardRecord]:
    return {_place(record.key, record.tier): record for record in shards}


def _place(key: ShardKey, tier: str) -> _Place:
    return key.attempt, key.step, key.rank, tier
