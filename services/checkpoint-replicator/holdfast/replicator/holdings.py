"""The shards of one job on this node, and what the plan and the inventory need of them, which each change updates. Used by the
event loop only."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Final

from holdfast.domain.generations import ShardRecord
from holdfast.replicator.view import Copies, Held, Tier
from holdfast.shards import Manifest

_TIER_NAMES: Final = {Tier.IMAGE: "memory", Tier.STAGED: "memory", Tier.DISK: "disk"}

_Place = tuple[int, int, int, str]  # attempt, step, rank, tier of an inventory


class Holdings(MutableMapping[Held, Manifest]):
    """The manifest of each shard."""

    def __init__(self) -> None:
        self._manifests: dict[Held, Manifest] = {}
        self._entries: dict[Held, tuple[_Place, ShardRecord]] = {}  # of the inventory
        self._records: tuple[ShardRecord, ...] | None = ()
        self.copies = Copies()

    def __getitem__(self, held: Held) -> Manifest:
        return self._manifests[held]

    def __setitem__(self, held: Held, manifest: Manifest) -> None:
        if held not in self._manifests:
            self.copies = self.copies.with_shard(held)
        self._manifests[held] = manifest
        self._entries[held] = _entry(held, manifest)
        self._records = None

    def __delitem__(self, held: Held) -> None:
        del self._manifests[held], self._entries[held]
        self.copies = self.copies.without(held)
        self._records = None

    def __iter__(self) -> Iterator[Held]:
        return iter(self._manifests)

    def __len__(self) -> int:
        return len(self._manifests)

    def records(self) -> tuple[ShardRecord, ...]:
        """Return the records of an inventory, in order. An image and a staged file of a shard are one record."""
        if self._records is None:
            by_place = dict(self._entries.values())
            self._records = tuple([by_place[place] for place in sorted(by_place)])
        return self._records


def _entry(held: Held, manifest: Manifest) -> tuple[_Place, ShardRecord]:
    tier = _TIER_NAMES[held.tier]
    record = ShardRecord(
        key=held.key,
        mesh=manifest.domain_mesh(),
        tier=tier,
        size=manifest.size,
        digest=manifest.digest,
        owner=manifest.node,
        root=manifest.root,
    )
    return (held.key.attempt, held.key.step, held.key.rank, tier), record
