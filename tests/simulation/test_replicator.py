"""The simulated replicators run production's plan, job and schedule: the promises about lost work find bugs that are planted in
them, and in the election."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from worlds import require_found

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.domain.orders import Inventory
from holdfast.replicator import archive_plan, plan
from holdfast.replicator.jobs import Job
from holdfast.replicator.schedule import Lane, Schedule
from holdfast.replicator.view import CopyToDisk, Delete, Held, Push, Step, Tier, Upload, View
from holdfast.restore import election
from holdfast.sim.scenario import simulate
from holdfast.supervisor.core.changes import change

SEEDS = 60

newest_by_rank, pushes, begin = plan._newest_by_rank, plan._pushes, Schedule.begin
inventory, has_sent, cover = Job.inventory, Job.has_sent, election._cover


def _oldest_by_rank(view: View, tiers: tuple[Tier, ...]) -> dict[int, CheckpointId]:
    keys = [held.key for held in view.held if held.tier in tiers]
    return {key.rank: key.checkpoint for key in sorted(keys, key=lambda key: key.checkpoint, reverse=True)}


def _push_only_first_rank(view: View) -> list[Step]:
    return [step for step in pushes(view) if isinstance(step, Push) and step.key.rank == view.ranks[0]]


def _peers_are_the_nodes_themselves(placements: Iterable[Any], zones: object) -> dict[str, tuple[str, ...]]:
    return {placement.node: (placement.node,) for placement in placements}


def _begin_all_but(kind: type) -> Callable[..., dict[Lane, list[Step]]]:
    def planted(self: Schedule, job: str, steps: Iterable[Step]) -> dict[Lane, list[Step]]:
        return begin(self, job, [step for step in steps if not isinstance(step, kind)])

    return planted


def _delete_all_but_the_newest(view: View) -> list[Step]:
    newest = newest_by_rank(view, (Tier.DISK,))
    old = [
        held.key for held in view.held if held.tier is Tier.DISK and newest.get(held.key.rank) != held.key.checkpoint
    ]
    return [Delete(Tier.DISK, key, "planted") for key in old if Held(Tier.DISK, key) not in view.pinned]


def _count_as_sent_what_is_in_memory(self: Job, key: ShardKey, peer: str, durable: ShardKey | None) -> bool:
    return has_sent(self, key, peer, key)


def _images_count_as_on_disk(self: Job) -> Inventory:
    shown = inventory(self)
    return replace(shown, shards=tuple(replace(each, tier="disk") for each in shown.shards))


def _show_only_own(self: Job) -> Inventory:
    shown = inventory(self)
    ranks = self.config.ranks if self.config else ()
    return replace(shown, shards=tuple(each for each in shown.shards if each.key.rank in ranks))


def _cover_never_the_newest(saved: Any, *of: Any) -> Any:
    return "planted" if saved.step % 2 else cover(saved, *of)


# What is planted: (class or module, name, what stands there instead), what the promises say of it, and a seed near which
# they do.
PLANTED: dict[str, tuple[type | ModuleType, str, object, str, int]] = {
    "nothing is copied to disk": (plan, "_copies", lambda view: [], "neither it nor a newer one is on its disk", 600),
    "nothing is copied to peers": (plan, "_pushes", lambda view: [], "has no copy of it in its memory", 600),
    "only the first rank of a node is copied to peers": (
        plan, "_pushes", _push_only_first_rank, "has no copy of it in its memory", 600,
    ),
    "a node is its own peer": (change, "peers", _peers_are_the_nodes_themselves, "copy its shards to itself", 600),
    "the oldest shard of a rank counts as the newest": (
        plan, "_newest_by_rank", _oldest_by_rank, "neither it nor a newer one is on its disk", 600,
    ),
    "copies to disk never begin": (
        Schedule, "begin", _begin_all_but(CopyToDisk), "neither it nor a newer one is on its disk", 600,
    ),
    "uploads never begin": (Schedule, "begin", _begin_all_but(Upload), "object store takes one in", 630),
    "lanes stay occupied": (Schedule, "free", lambda self, lane: None, "neither it nor a newer one is on its disk", 600),
    "no checkpoint is chosen for the object store": (
        archive_plan, "chosen", lambda view: None, "object store takes one in", 630,
    ),
    "uploads are never completed": (
        archive_plan, "_completions", lambda *of: [], "object store takes one in", 630,
    ),
    "a copy in a peer's memory counts as on its disk": (
        Job, "has_sent", _count_as_sent_what_is_in_memory, "taken for being on the disk", 600,
    ),
    "images are reported as on disk": (Job, "inventory", _images_count_as_on_disk, "not the contents of its memory", 600),
    "copies of other nodes are not reported": (Job, "inventory", _show_only_own, "not the contents of its memory", 600),
    "every copy on disk counts as superseded": (
        plan, "_superseded", lambda *of: "planted", "deletes .* the last copy|has had .* s for ShardKey", 600,
    ),
    "a checkpoint is superseded by any newer save": (
        plan, "_disk_deletions", _delete_all_but_the_newest, "deletes .* the last copy", 650,
    ),
    "a step that other nodes need may go": (plan, "_others_may_need", lambda *of: False, "deletes .* the last copy", 603),
    "the newest whole step is not elected": (election, "_cover", _cover_never_the_newest, "is whole: ", 601),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, instead, said, first = PLANTED[bug]
    monkeypatch.setattr(place, name, instead)

    require_found(said, range(first, first + SEEDS), simulate)
