"""Inventories as differences: what a node holds changes by a few shards with each save, and it may hold hundreds. Pure.

A difference names the report that it changes (`Inventory.base`), which the receiver must have taken last; then it has exactly
what the sender has. Otherwise a report was lost, and the receiver has to ask for a complete one. A difference that comes twice
no longer fits, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.domain.generations import ShardPlace, ShardRecord, Shards, rows_of
from holdfast.domain.orders import Inventory


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
    places = {(row[0], row[1], row[2], row[4]): row for row in rows_of(held)}  # by attempt, step, rank, tier
    for place in difference.gone:
        places.pop((place.key.attempt, place.key.step, place.key.rank, place.tier), None)
    places |= {(row[0], row[1], row[2], row[4]): row for row in rows_of(difference.shards)}
    return Inventory(difference.job, Shards(places.values()), difference.stored)


def _by_place(shards: Iterable[ShardRecord]) -> dict[ShardPlace, ShardRecord]:
    return {ShardPlace(record.key, record.tier): record for record in shards}
