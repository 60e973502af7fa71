"""Decides what to copy, push and delete next, with reasons: a pure function of the shards in each tier.

Priorities: never delete a shard that a restore may need; then freshness (newest first, superseded shards are not copied); then
space. Five facts distinguish "old" from "superseded":

* **lineage**: a restore starts a new attempt. Checkpoints of older attempts beyond the restored step are *abandoned*: they are
  not restored while the new attempt has checkpoints, but until then they may be the newest ones.
* **complete on this node**: a step counts only if the shards of *all* of this node's ranks are there.
* **the next tier**: a shard is deleted from disk only when a newer step is also in the next tier: on a peer or, without peers,
  complete in the object store. At most `BACKLOG_STEPS_MAX` steps are retained for this, so that a tier that never answers does
  not fill the disk.
* **the other nodes**: a step is useful only while every node has its shards. The supervisor sends the newest step that all
  nodes have (`saved_by_all`). It is retained until a newer one replaces it. Newer steps may become the next one, and are
  retained while there is room: `BACKLOG_STEPS_MAX` beyond `keep`, none of them on a full disk. Retention updates may be lost,
  late or duplicated: an older update, or none, only retains more. Before the first update, the step from which the attempt was
  restored is retained instead, or the oldest on this node.
* **the user**: checkpoints of an earlier run under this name are deleted on request or after the retention period, never to
  make room. They are copied from memory to disk before the new workers need the memory. Of the checkpoints that this run has
  abandoned, the newest `keep` are retained while there is room.

`archive_plan` decides what is uploaded to the object store. The step that is being uploaded stays on disk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.replicator.archive_plan import archive_steps, chosen, wanted_of
from holdfast.replicator.view import (
    CopyToDisk,
    Delete,
    FreeImages,
    Push,
    Step,
    Tier,
    View,
    id_of,
    is_abandoned,
    is_kept,
    whole_steps,
)

KEEP_MIN = 2
BACKLOG_STEPS_MAX = 8
_ON_DISK = "newest on disk, not yet with this peer"
COPY_STEPS_MAX = 2  # if a copy in memory is this many steps old, its sender has another peer now


def plan(view: View) -> tuple[Step, ...]:
    """Return the present work, most urgent first. The steps do not depend on each other."""
    return (
        *_copies(view),
        *_pushes(view),
        *archive_steps(view),
        *_disk_deletions(view),
        *_staged_deletions(view),
        *_images(view),
    )


# ---------------------------------------------------------------- forward


def _copies(view: View) -> list[Step]:
    if view.disk_takes_nothing:
        return []
    in_memory = _newest_by_rank(view, (Tier.IMAGE, Tier.STAGED), view.fresh)
    on_disk = _newest_by_rank(view, (Tier.DISK,))
    wanted = [
        key for rank, key in in_memory.items() if (there := on_disk.get(rank)) is None or id_of(there) < id_of(key)
    ]
    newest: list[Step] = [CopyToDisk(key, "newest in memory, not yet on disk") for key in _newest_first(wanted)]
    return [*_copies_for_archive(view, wanted), *_copies_of_earlier(view, wanted), *newest]


def _copies_of_earlier(view: View, wanted: list[ShardKey]) -> list[Step]:
    """Copies of an earlier run's shards that are only in memory, where the new workers overwrite the images."""
    earlier = tuple(held for at, held in view.dated if is_kept(view, at))
    if not earlier:
        return []
    kept = replace(view, held=earlier, restored=None, attempt=0)
    on_disk = _newest_by_rank(kept, (Tier.DISK,))
    in_memory = _newest_by_rank(kept, (Tier.IMAGE, Tier.STAGED))
    late = [key for rank, key in in_memory.items() if (there := on_disk.get(rank)) is None or id_of(there) < id_of(key)]
    why = "an earlier submission's newest in memory, not yet on disk"
    return [CopyToDisk(key, why) for key in _newest_first(late) if key not in wanted]


def _copies_for_archive(view: View, wanted: list[ShardKey]) -> list[Step]:
    """Copies of shards that will be uploaded and are not the newest: the next save may overwrite them, so they come first."""
    if view.archive is None:
        return []
    on_disk = {(at, rank) for at, rank, _ in view.on_disk}
    mine = [(at, held.key) for at, held in view.dated if held.tier is Tier.IMAGE and held.key.rank in view.ranks]
    waiting = [(at, key) for at, key in mine if (at, key.rank) not in on_disk]
    due = wanted_of(view, {at for at, _ in waiting})
    late = [key for at, key in waiting if at == due and key not in wanted]
    return [CopyToDisk(key, "the object store takes it from the disk") for key in _newest_first(late)]


def _pushes(view: View) -> list[Step]:
    """Push the shards of one step of all local ranks, once they are on disk (or if the disk is full or fails). Then push newer
    shards, and ask whether the shards that were sent are on the peer's disk."""
    tiers = tuple(Tier) if view.disk_takes_nothing else (Tier.DISK,)
    newest = _newest_by_rank(view, tiers)
    mine = _newest_first(newest[rank] for rank in view.ranks if rank in newest)
    whole = whole_steps(view, tiers)
    state = "is full" if view.disk_full else "fails"
    why = f"the disk {state}, so a peer is the next tier" if view.disk_takes_nothing else _ON_DISK
    steps: list[Step] = []
    for peer in view.peers:
        keys = [*_of_next_step(view, peer, whole), *mine]
        due = dict.fromkeys(key for key in keys if (key, peer) not in view.pushed)
        steps += [Push(key, peer, why) for key in sorted(due, key=lambda key: (key, peer) in view.sent)]
    return steps


def _of_next_step(view: View, peer: str, whole: list[CheckpointId]) -> list[ShardKey]:
    """Return the shards of the step that `peer` gets next. `whole`: steps that all local ranks have, oldest first.

    A copy is useful only if the other ranks' copies are of the same step. So a step that was begun is finished. If saves come
    faster than copies, every node skips some steps. All nodes should skip the same steps, but they do not communicate. So a
    node takes, of several steps, the one whose number is divisible by the largest power of two. A node that skips up to 2^k - 1
    steps in a row then takes every step that is divisible by 2^(k + 1), in intervals."""
    sent = {key.rank: id_of(key) for key, to in view.sent if to == peer and key.rank in view.ranks}
    last = max(sent.values(), default=None)
    waiting = [step for step in whole if last is None or step > last]
    if last in whole and any(sent.get(rank) != last for rank in view.ranks):
        following = last
    elif not waiting:
        return []
    elif last is None:
        following = waiting[-1]
    else:
        following = max(waiting, key=lambda each: (each.attempt, each.step & -each.step, each.step))
    keys = (ShardKey(following.attempt, following.step, rank) for rank in view.ranks)
    return [key for key in keys if sent.get(key.rank) != following]


def _newest_by_rank(view: View, tiers: tuple[Tier, ...], coming: Sequence[ShardKey] = ()) -> dict[int, ShardKey]:
    """Return the newest shard of each rank in these tiers, or `coming` into one of them."""
    if not coming and (known := view.newest.get(tiers)) is not None:
        return known
    newest: dict[int, tuple[CheckpointId, ShardKey]] = {}
    found = [(at, held.key) for at, held in view.on_lineage if held.tier in tiers]
    found += [(at, key) for key in coming if not is_abandoned(view, at := id_of(key))]
    for each in found:
        rank = each[1].rank
        if rank not in newest or newest[rank][0] < each[0]:
            newest[rank] = each
    by_rank = {rank: key for rank, (_, key) in newest.items()}
    if not coming:
        view.newest[tiers] = by_rank
    return by_rank


def _newest_first(keys: Iterable[ShardKey]) -> list[ShardKey]:
    return sorted(keys, key=lambda key: (-key.attempt, -key.step, key.rank))


# ---------------------------------------------------------------- deletions


def _disk_deletions(view: View) -> list[Step]:
    if not view.attempt:
        return []  # the job is not configured yet, and these may be the only copies
    # For this node's ranks and for removed ones, this node's own checkpoints count.
    own = {rank for _, rank, _ in view.on_disk if rank in view.ranks or rank >= view.world_size}
    whole = _Counted.of(view, whole_steps(view, (Tier.DISK,)))
    of_rank: dict[int, set[CheckpointId]] = {}  # for the copies of other nodes' shards
    for at, held in view.on_lineage:
        if held.tier is Tier.DISK and held.key.rank not in own:
            of_rank.setdefault(held.key.rank, set()).add(at)
    counted = {rank: _Counted.of(view, steps) for rank, steps in of_rank.items()}
    none = _Counted([], 0)
    on_its_way = chosen(view)
    spared = _newest_abandoned(view, {at for at, _, _ in view.on_disk})
    steps: list[Step] = []
    last: CheckpointId | None = None
    is_spared = False
    for at, rank, held in view.on_disk:
        if at != last:
            last, is_spared = at, is_kept(view, at) or at in spared
        if is_spared or (at == on_its_way and rank in view.ranks) or (view.pinned and held in view.pinned):
            continue
        if (reason := _superseded(view, held.key, at, whole if rank in own else counted.get(rank, none))) is not None:
            steps.append(Delete(Tier.DISK, held.key, reason))
    return steps


def _newest_abandoned(view: View, disk: set[CheckpointId]) -> set[CheckpointId]:
    """Return the newest checkpoints that this run has abandoned, because the user may want to go back to one of them."""
    if view.disk_full or len(view.on_lineage) == len(view.dated):
        return set()
    mine = {at for at in disk if at.attempt >= max(view.first_attempt, view.expired_before)}
    return set(sorted((each for each in mine if is_abandoned(view, each)), reverse=True)[: max(view.keep, KEEP_MIN)])


def _superseded(view: View, key: ShardKey, at: CheckpointId, counted: _Counted) -> str | None:
    """Return why the disk copy of `key` may be deleted; None if it must be retained. `at`: its (attempt, step)."""
    keep = max(view.keep, KEEP_MIN)
    newer = len(counted.steps) - bisect_right(counted.steps, at)
    if is_abandoned(view, at):
        if counted.current < keep:
            return None
        return f"on an abandoned lineage; {counted.current} newer steps are complete"
    if key.rank >= view.world_size and counted.current < keep:
        return None
    if newer < keep or _others_may_need(view, at, newer, counted.steps[0]):
        return None
    if key.rank in view.ranks and newer < keep + BACKLOG_STEPS_MAX and not _one_tier_further(view, key.rank, at):
        return None
    return f"superseded by {newer} complete newer steps; {keep} are kept"


@dataclass(frozen=True, slots=True)
class _Counted:
    """The checkpoints that count for a shard: `steps` of the lineage, oldest first, and how many are of the current attempt."""

    steps: list[CheckpointId]
    current: int

    @classmethod
    def of(cls, view: View, steps: Iterable[CheckpointId]) -> _Counted:
        in_order = sorted(steps)
        return cls(in_order, sum(1 for step in in_order if step.attempt == view.attempt))


def _others_may_need(view: View, at: CheckpointId, newer: int, oldest: CheckpointId) -> bool:
    """Whether this is or may become the newest step that all nodes have. `newer`: number of newer steps that are complete on
    this node; `oldest`: the oldest of the complete ones."""
    saved_by_all = view.saved_by_all
    if saved_by_all is not None and is_abandoned(view, saved_by_all):
        saved_by_all = None
    if saved_by_all is not None and at < saved_by_all:
        return False
    if at in (saved_by_all or view.restored or oldest, view.restored):
        return True
    return not view.disk_full and newer < max(view.keep, KEEP_MIN) + BACKLOG_STEPS_MAX


def _one_tier_further(view: View, rank: int, at: CheckpointId) -> bool:
    """Whether a newer step of this rank than `at` has reached the next tier."""
    if view.peers:
        return any(pushed.rank == rank and peer in view.peers and id_of(pushed) > at for pushed, peer in view.pushed)
    if view.archive is not None:
        return any(step.complete and step.id > at and not is_abandoned(view, step.id) for step in view.archive.steps)
    return True


def _staged_deletions(view: View) -> list[Step]:
    """Delete shards in memory, other than images, that are also stored elsewhere, because memory is scarce."""
    staged = [(at, held) for at, held in view.dated if held.tier is Tier.STAGED and held not in view.pinned]
    if not view.attempt or not staged:
        return []
    whole = [step for step in whole_steps(view, (Tier.DISK,)) if step.attempt == view.attempt]
    on_disk = {(at, rank) for at, rank, _ in view.on_disk}
    steps: list[Step] = []
    for at, held in sorted(staged, key=lambda each: (each[0], each[1].key.rank)):
        if is_kept(view, at) or view.ended:
            if (at, held.key.rank) in on_disk:
                steps.append(Delete(Tier.STAGED, held.key, "its workers have ended, and it is on disk"))
            continue
        newer = [step for step in whole if step > at]
        if held.key.rank not in view.ranks:
            reason = _superseded_copy(view, held.key, newer)
        else:
            reason = "restored from and superseded on disk" if newer else None
        if reason is not None:
            steps.append(Delete(Tier.STAGED, held.key, reason))
    return steps


def _superseded_copy(view: View, key: ShardKey, newer: list[CheckpointId]) -> str | None:
    """Return why another node's shard may be deleted from memory; None if it must be retained. The newest one is retained even
    if it is on disk as well, because it is restored from this node if its own node is lost. `newer`: steps that are complete
    on this node's disk."""
    mine = id_of(key)
    of_rank = [(at, held.tier) for at, held in view.on_lineage if held.key.rank == key.rank]
    on_disk = any(tier is Tier.DISK and at >= mine for at, tier in of_rank)
    if not on_disk and not view.disk_takes_nothing:
        return None
    if any(at > mine for at, _ in of_rank):
        return "a copy, and a newer one has come"
    if on_disk and len(newer) >= COPY_STEPS_MAX:
        return "a copy on disk, too, and not renewed for some steps"
    return None


def _images(view: View) -> list[Step]:
    return [FreeImages("the job is over, and its newest save is on disk")] if images_may_go(view) else []


def images_may_go(view: View) -> bool:
    """Whether an ended job's images can be deleted: each must be on disk in the same or a newer version."""
    if not view.images_left or view.fresh:
        return False
    images = [held for held in view.held if held.tier is Tier.IMAGE]
    if any(held in view.pinned for held in images):
        return False
    on_disk = {rank: id_of(key) for rank, key in _newest_by_rank(replace(view, attempt=0), (Tier.DISK,)).items()}
    return all(on_disk.get(held.key.rank, (0, 0)) >= id_of(held.key) for held in images)
