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

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace

from holdfast.domain.checkpoints import NOTHING_SAVED, CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.replicator.archive_plan import archive_steps, chosen, wanted_of
from holdfast.replicator.view import (
    NO_RANKS,
    CopyToDisk,
    Delete,
    FreeImages,
    Held,
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
_MEMORY = (Tier.IMAGE, Tier.STAGED)
_ALL = tuple(Tier)
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
    in_memory = _newest_by_rank(view, _MEMORY)
    if view.fresh:
        in_memory = _with_fresh(view, in_memory)
    wanted = _newer(in_memory, _newest_by_rank(view, (Tier.DISK,)))
    newest: list[Step] = [CopyToDisk(key, "newest in memory, not yet on disk") for key in _newest_first(wanted)]
    return [*_copies_for_archive(view, wanted), *_copies_of_earlier(view, wanted), *newest]


def _copies_of_earlier(view: View, wanted: list[ShardKey]) -> list[Step]:
    """Copies of an earlier run's shards that are only in memory, where the new workers overwrite the images."""
    steps = {tier: [at for at in view.held.in_tier(tier) if is_kept(view, at)] for tier in Tier}
    if not any(steps[tier] for tier in _MEMORY):
        return []
    late = _newer(_newest_of(view, steps, _MEMORY), _newest_of(view, steps, (Tier.DISK,)))
    why = "an earlier submission's newest in memory, not yet on disk"
    return [CopyToDisk(key, why) for key in _newest_first(late) if key not in wanted]


def _copies_for_archive(view: View, wanted: list[ShardKey]) -> list[Step]:
    """Copies of shards that will be uploaded and are not the newest: the next save may overwrite them, so they come first."""
    if view.archive is None:
        return []
    mine, on_disk = frozenset(view.ranks), view.held.in_tier(Tier.DISK)
    images = view.held.in_tier(Tier.IMAGE).items()
    waiting = {at: left for at, ranks in images if (left := (ranks & mine) - on_disk.get(at, NO_RANKS))}
    if (due := wanted_of(view, waiting)) is None:
        return []
    late = [key for rank in waiting[due] if (key := ShardKey(*due, rank)) not in wanted]
    return [CopyToDisk(key, "the object store takes it from the disk") for key in _newest_first(late)]


def _pushes(view: View) -> list[Step]:
    """Push the shards of one step of all local ranks, once they are on disk (or if the disk is full or fails). Then push newer
    shards, and ask whether the shards that were sent are on the peer's disk."""
    tiers = _ALL if view.disk_takes_nothing else (Tier.DISK,)
    newest = _newest_by_rank(view, tiers)
    mine = _newest_first(ShardKey(*newest[rank], rank) for rank in view.ranks if rank in newest)
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


def _newest_by_rank(view: View, tiers: tuple[Tier, ...]) -> dict[int, CheckpointId]:
    """Return the newest checkpoint on the lineage of which these tiers have a shard, by rank."""
    if (known := view.newest.get(tiers)) is None:
        known = view.newest[tiers] = _newest_of(view, view.on_lineage, tiers)
    return known


def _newest_of(
    view: View, steps: Mapping[Tier, Iterable[CheckpointId]], tiers: tuple[Tier, ...]
) -> dict[int, CheckpointId]:
    """Return the newest of the checkpoints `steps` of which these tiers have a shard, by rank."""
    newest: dict[int, CheckpointId] = {}
    for at in sorted({at for tier in tiers for at in steps[tier]}, reverse=True):
        for tier in tiers:
            newest.update(dict.fromkeys(view.held.in_tier(tier).get(at, NO_RANKS) - newest.keys(), at))
    return newest


def _with_fresh(view: View, newest: dict[int, CheckpointId]) -> dict[int, CheckpointId]:
    """Return the newest checkpoints with those that are being committed."""
    found = dict(newest)
    for key in view.fresh:
        if not is_abandoned(view, at := id_of(key)) and at > found.get(key.rank, NOTHING_SAVED):
            found[key.rank] = at
    return found


def _newer(here: dict[int, CheckpointId], there: dict[int, CheckpointId]) -> list[ShardKey]:
    """Return the shards of which `there` has no copy and none of a newer checkpoint, by rank."""
    return [ShardKey(*at, rank) for rank, at in here.items() if (other := there.get(rank)) is None or other < at]


def _newest_first(keys: Iterable[ShardKey]) -> list[ShardKey]:
    return sorted(keys, key=lambda key: (-key.attempt, -key.step, key.rank))


# ---------------------------------------------------------------- deletions


def _disk_deletions(view: View) -> list[Step]:
    if not view.attempt:
        return []  # the job is not configured yet, and these may be the only copies
    on_disk, whole = view.held.in_tier(Tier.DISK), whole_steps(view, (Tier.DISK,))
    on_its_way, spared = chosen(view), _newest_abandoned(view)
    mine = frozenset(view.ranks)
    of_rank = _steps_of_others(view, mine)
    steps: list[Step] = []
    for at in sorted(on_disk):
        if at in spared or is_kept(view, at):
            continue
        reason = _superseded(view, at, whole)  # the same for all ranks of this node
        for rank in sorted(on_disk[at]):
            if rank in mine:
                why = reason if reason and at != on_its_way and _passed_on(view, rank, at, whole) else None
            elif rank >= view.world_size:  # of a removed node: this node's own checkpoints count
                why = reason if _of_current_attempt(view, whole) >= max(view.keep, KEEP_MIN) else None
            else:
                why = _superseded(view, at, of_rank.get(rank, []))
            if why and (not view.pinned or Held(Tier.DISK, ShardKey(*at, rank)) not in view.pinned):
                steps.append(Delete(Tier.DISK, ShardKey(*at, rank), why))
    return steps


def _steps_of_others(view: View, mine: frozenset[int]) -> dict[int, list[CheckpointId]]:
    """Return the checkpoints on the lineage of which the disk has a copy, by rank of other nodes. Oldest first."""
    of_rank: dict[int, list[CheckpointId]] = {}
    on_disk = view.held.in_tier(Tier.DISK)
    for at in view.on_lineage[Tier.DISK]:
        for rank in on_disk[at] - mine:
            of_rank.setdefault(rank, []).append(at)
    return of_rank


def _newest_abandoned(view: View) -> set[CheckpointId]:
    """Return the newest checkpoints that this run has abandoned, because the user may want to go back to one of them."""
    on_disk = view.held.in_tier(Tier.DISK)
    if view.disk_full or len(view.on_lineage[Tier.DISK]) == len(on_disk):
        return set()
    mine = {at for at in on_disk if at.attempt >= max(view.first_attempt, view.expired_before)}
    return set(sorted((each for each in mine if is_abandoned(view, each)), reverse=True)[: max(view.keep, KEEP_MIN)])


def _superseded(view: View, at: CheckpointId, counted: list[CheckpointId]) -> str | None:
    """Return why a shard of checkpoint `at` on disk may be deleted; None if it must be retained. `counted`: the checkpoints of
    the lineage that count for its rank, oldest first."""
    keep = max(view.keep, KEEP_MIN)
    if is_abandoned(view, at):
        current = _of_current_attempt(view, counted)
        return f"on an abandoned lineage; {current} newer steps are complete" if current >= keep else None
    newer = len(counted) - bisect_right(counted, at)
    if newer < keep or _others_may_need(view, at, newer, counted[0]):
        return None
    return f"superseded by {newer} complete newer steps; {keep} are kept"


def _of_current_attempt(view: View, counted: list[CheckpointId]) -> int:
    """Return how many of the checkpoints, oldest first, are of the current attempt."""
    begin, end = CheckpointId(view.attempt, 0), CheckpointId(view.attempt + 1, 0)
    return bisect_left(counted, end) - bisect_left(counted, begin)


def _passed_on(view: View, rank: int, at: CheckpointId, whole: list[CheckpointId]) -> bool:
    """Whether the next tier has a newer checkpoint of this node's rank than `at`, or need not have one."""
    newer = len(whole) - bisect_right(whole, at)
    enough = max(view.keep, KEEP_MIN) + BACKLOG_STEPS_MAX
    return is_abandoned(view, at) or newer >= enough or _one_tier_further(view, rank, at)


def _others_may_need(view: View, at: CheckpointId, newer: int, oldest: CheckpointId) -> bool:
    """Whether this is or may become the newest step that all nodes have. `newer`: number of newer steps that are complete on
    this node; `oldest`: the oldest of the complete ones."""
    if view.common is not None and at < view.common:
        return False
    if at in (view.common or view.restored or oldest, view.restored):
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
    staged = view.held.in_tier(Tier.STAGED)
    if not view.attempt or not staged:
        return []
    on_disk, mine = view.held.in_tier(Tier.DISK), frozenset(view.ranks)
    newest, newest_on_disk = _newest_by_rank(view, _ALL), _newest_by_rank(view, (Tier.DISK,))
    whole = [step for step in whole_steps(view, (Tier.DISK,)) if step.attempt == view.attempt]
    steps: list[Step] = []
    for at in sorted(staged):
        is_over = is_kept(view, at) or view.ended
        newer = len(whole) - bisect_right(whole, at)
        for rank in sorted(staged[at]):
            if is_over:
                there = rank in on_disk.get(at, NO_RANKS)
                reason = "its workers have ended, and it is on disk" if there else None
            elif rank in mine:
                reason = "restored from and superseded on disk" if newer else None
            else:
                there, is_newest = newest_on_disk.get(rank, NOTHING_SAVED) >= at, newest.get(rank, NOTHING_SAVED) <= at
                reason = _superseded_copy(view, there, is_newest, newer)
            if reason is not None and (held := Held(Tier.STAGED, ShardKey(*at, rank))) not in view.pinned:
                steps.append(Delete(Tier.STAGED, held.key, reason))
    return steps


def _superseded_copy(view: View, on_disk: bool, is_newest: bool, newer: int) -> str | None:
    """Return why another node's shard may be deleted from memory; None if it must be retained. The newest one is retained even
    if it is on disk as well, because it is restored from this node if its own node is lost. `on_disk`: the disk has this
    shard or a newer one of its rank. `newer`: number of newer checkpoints that are complete on this node's disk."""
    if not on_disk and not view.disk_takes_nothing:
        return None
    if not is_newest:
        return "a copy, and a newer one has come"
    if on_disk and newer >= COPY_STEPS_MAX:
        return "a copy on disk, too, and not renewed for some steps"
    return None


def _images(view: View) -> list[Step]:
    return [FreeImages("the job is over, and its newest save is on disk")] if images_may_go(view) else []


def images_may_go(view: View) -> bool:
    """Whether an ended job's images can be deleted: each must be on disk in the same or a newer version."""
    if not view.images_left or view.fresh:
        return False
    images = view.held.in_tier(Tier.IMAGE)
    if any(held.tier is Tier.IMAGE and held in view.held for held in view.pinned):
        return False
    on_disk = _newest_by_rank(replace(view, attempt=0), (Tier.DISK,))
    return all(on_disk.get(rank, NOTHING_SAVED) >= at for at, ranks in images.items() for rank in ranks)
