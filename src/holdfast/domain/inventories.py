"""Inventories as differences: what a node holds changes by a few shards with each save, and it may hold hundreds. Pure.

A difference names the report that it changes (`Inventory.base`), which the receiver must have taken last; then it has exactly
what the sender has. Otherwise a report was lost, and the receiver has to ask for a complete one. A difference that comes twice
no longer fits, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.domain.generations import ShardPlace, ShardRecord
from holdfast.domain.orders import Inventory
from holdfast.domain.runs import ShardRun, Shards, shard_runs


def difference(old: Inventory, new: Inventory, base: int) -> Inventory:
    """What makes `new` of `old`, which was report `base` of the same job; `new` itself where that is no shorter."""
    before, after = _by_place(old.shards), _by_place(new.shards)
    if len(before) < len(old.shards) or len(after) < len(new.shards):
        return new  # two shards in one place: nothing says which of them goes
    changed = tuple(record for place, record in after.items() if before.get(place) != record)
    gone = tuple(place for place in before if place not in after)
    if len(changed) + len(gone) >= len(new.shards):
        return new
    stored = () if new.stored == old.stored else new.stored
    return Inventory(new.job, changed, stored, base=base, gone=gone)


def changed(held: Iterable[ShardRecord], difference: Inventory) -> Inventory:
    """The complete inventory, from the shards of the report that `difference` is based on. What the object store has is
    only named where it has changed."""
    gone = {(place.key.attempt, place.key.step, place.tier) for place in difference.gone}
    concerned = gone | {_step_in(run) for run in shard_runs(difference.shards)}
    stays: list[ShardRun] = []
    others: list[ShardRun] = []
    for run in shard_runs(held):
        (others if _step_in(run) in concerned else stays).append(run)
    places = _by_place(Shards(others))
    for place in difference.gone:
        places.pop(place, None)
    places |= _by_place(difference.shards)
    return Inventory(difference.job, Shards((*stays, *shard_runs(places.values()))), difference.stored)


def _step_in(run: ShardRun) -> tuple[int, int, str]:
    return run.attempt, run.step, run.tier


def _by_place(shards: Iterable[ShardRecord]) -> dict[ShardPlace, ShardRecord]:
    return {ShardPlace(record.key, record.tier): record for record in shards}
