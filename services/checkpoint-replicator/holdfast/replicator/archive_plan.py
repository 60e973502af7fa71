"""Decides which checkpoints are uploaded to the object store, and which are deleted from it: a pure function that every node
evaluates by itself.

**The choice.** A checkpoint in the store needs the same step from every rank, and at most one checkpoint per
`store_interval_s` is uploaded. But nodes do not communicate, their clocks differ, and each may have missed a save. So the
choice depends on step numbers. Let a *slot* be 2^j steps. j is the smallest number for which these steps take at least the
interval at the pace of the latest saves. The first checkpoint of each slot is chosen. The clock determines only j, as a
difference of times of one clock. Nodes that round differently still agree, because slots are nested: the first step of a slot
is also the first of the smaller slot that begins at this step. A node with smaller slots therefore chooses *more* steps, never
different ones. A node that missed the previous save also chooses the next one.

**The order.** Of the chosen steps, the one that begins the largest slot is uploaded first, because all other nodes have chosen
it too. A node that has fallen behind, or whose clock has jumped, thus works first on checkpoints that can become complete. A
chosen step without one of its ranks stays incomplete. No node waits for it, the next slot is another chance, and it is deleted
when a newer one is complete. If another node has begun a step and the step is on this node, this node uploads its shards too; a
restarted replicator continues its own uploads in the same way.

Times are Unix seconds passed as values; this module does not read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.replicator.view import (
    Archive,
    Archived,
    ArchiveStep,
    Complete,
    Discard,
    Save,
    Survey,
    Tier,
    Upload,
    View,
    is_abandoned,
    whole_steps,
)

# number of latest saves; the pace is the median of their distances, so that a single clock jump has no effect
PACE_SAVES_MAX = 9
LEVEL_MAX = 64  # level of the first save of a run, which begins every slot
LEVEL_ASKED = LEVEL_MAX + 1  # level of a requested step, which precedes all others
WAITING_MAX = 4  # steps that may still become complete
ABANDONED_S = 3600.0  # an incomplete step without a new object for this long will not become complete


def archive_steps(view: View) -> list[ArchiveStep]:
    """Return the present work for the object store. The steps do not depend on each other."""
    archive = view.archive
    if archive is None or not view.attempt:
        return []
    steps: list[ArchiveStep] = []
    if not archive.surveyed:
        steps.append(Survey("not listed since this generation began, or since a step became complete"))
    return [*steps, *_uploads(view), *_completions(view, archive), *_discards(view, archive)]


# ---------------------------------------------------------------- the choice


def level(step: int, before: int | None) -> int:
    """Return the largest j for which `step` is the first save in its slot of 2^j steps, if the previous save was at
    `before`."""
    return LEVEL_MAX if before is None else (step ^ before).bit_length() - 1


def level_wanted(saves: tuple[Save, ...], interval_s: float) -> int:
    """Return the smallest j for which 2^j steps take at least the interval. 0 while the pace is unknown, because an additional
    upload is better than none."""
    latest = saves[-PACE_SAVES_MAX:]
    paces = [
        (later.created_at - earlier.created_at) / (later.step - earlier.step)
        for earlier, later in pairwise(latest)
        if earlier.attempt == later.attempt and earlier.step < later.step
    ]
    pace_s = median(paces) if paces else 0.0
    if pace_s <= 0 or interval_s <= pace_s:
        return 0
    return min(LEVEL_MAX, math.ceil(math.log2(interval_s / pace_s)))


def chosen(view: View) -> CheckpointId | None:
    """Return the (attempt, step) that this node should upload now, or None. It must not be deleted before it is uploaded."""
    archive = view.archive
    if archive is None or not view.ranks:
        return None
    wanted = level_wanted(archive.saves, archive.interval_s)
    begun = {step.id for step in archive.steps if not (step.complete or step.damaged)}
    newest = _newest_complete(view, archive)
    candidates = []
    for held in _whole(view):
        if (
            held.attempt != view.attempt
            or (newest is not None and held <= newest)
            or _all_uploaded(view, archive, held)
        ):
            continue
        reached = _level_of(view, archive, held)
        if reached >= wanted or held in begun:
            candidates.append((reached, held))
    return max(candidates)[1] if candidates else None


def wanted_of(view: View, ages: Iterable[CheckpointId]) -> CheckpointId | None:
    """Return which of these (attempt, step), saved here and not yet on disk, will be uploaded from disk."""
    archive = view.archive
    if archive is None:
        return None
    wanted = level_wanted(archive.saves, archive.interval_s)
    newest = _newest_complete(view, archive)
    live = (
        checkpoint_id
        for checkpoint_id in ages
        if checkpoint_id.attempt == view.attempt and (newest is None or checkpoint_id > newest)
    )
    reached = [(_level_of(view, archive, checkpoint_id), checkpoint_id) for checkpoint_id in live]
    return max((found for found in reached if found[0] >= wanted), default=(0, None))[1]


def _level_of(view: View, archive: Archive, held: CheckpointId) -> int:
    """Return the level of a save. If an earlier save of the attempt is unknown, the level is higher, never lower."""
    if held in archive.asked:
        return LEVEL_ASKED
    latest_first = reversed(archive.saves)
    before = next((save.step for save in latest_first if save.attempt == held.attempt and save.step < held.step), None)
    if before is None:
        before = view.restored.step if view.restored is not None else None
    return level(held.step, before)


def _whole(view: View) -> list[CheckpointId]:
    return whole_steps(view, tuple(Tier) if view.disk_takes_nothing else (Tier.DISK,))


def _newest_complete(view: View, archive: Archive) -> CheckpointId | None:
    complete = [step.id for step in archive.steps if step.complete]
    return max([each for each in complete if not is_abandoned(view, each)], default=None)


def _all_uploaded(view: View, archive: Archive, held: CheckpointId) -> bool:
    return all(ShardKey(*held, rank) in archive.uploaded for rank in view.ranks)


# ---------------------------------------------------------------- forward


def _uploads(view: View) -> list[ArchiveStep]:
    archive, step = view.archive, chosen(view)
    if archive is None or step is None:
        return []
    keys = [ShardKey(*step, rank) for rank in sorted(view.ranks)]
    why = f"first step of its slot: at most one per {archive.interval_s:g} s goes to the object store"
    return [Upload(key, why) for key in keys if key not in archive.uploaded]


def _completions(view: View, archive: Archive) -> list[ArchiveStep]:
    newest = _newest_complete(view, archive)
    damaged = {step.id for step in archive.steps if step.damaged}
    mine = {key.checkpoint for key in archive.uploaded if key.attempt == view.attempt}
    ages = sorted(mine - damaged, reverse=True)
    waiting = [
        checkpoint_id
        for checkpoint_id in ages
        if (newest is None or checkpoint_id > newest) and _all_uploaded(view, archive, checkpoint_id)
    ]
    if not waiting or not view.ranks:
        return []
    return [Complete(tuple(waiting[:WAITING_MAX]), "this node's shards are uploaded")]


# ---------------------------------------------------------------- deletions


def _discards(view: View, archive: Archive) -> list[ArchiveStep]:
    """Only the node of rank 0 deletes, and only after it has listed the bucket, because the decision requires all
    checkpoints."""
    if 0 not in view.ranks or not archive.surveyed:
        return []
    complete = sorted(
        (step.id for step in archive.steps if step.complete and not is_abandoned(view, step.id)),
        reverse=True,
    )
    mine = (step.id for step in archive.steps if step.complete and is_abandoned(view, step.id))
    spared = set(sorted(mine, reverse=True)[: max(archive.keep, 1)])
    # As on the disks, later steps replace only one that every node has, which may be restored: the others may be of a corrupt
    # state.
    common = view.common or view.restored
    spared.update(next(([step] for step in complete if common is not None and step <= common), complete[-1:]))
    found = ((step, _why_not_kept(view, archive, step, complete)) for step in archive.steps if step.id not in spared)
    return [Discard(step.id, reason) for step, reason in found if reason]


def _why_not_kept(view: View, archive: Archive, step: Archived, complete: list[CheckpointId]) -> str:
    """Return why the step may be deleted; "" = it is retained. `complete` are the complete steps of the lineage, newest
    first."""
    keep = max(archive.keep, 1)
    if step.complete and step.id[0] < view.first_attempt:
        return ""  # of an earlier run; deleted only on request
    if step.complete and is_abandoned(view, step.id):
        mine = sum(1 for checkpoint_id in complete if checkpoint_id.attempt == view.attempt)
        return f"on an abandoned lineage; {mine} newer steps are complete" if mine >= keep else ""
    newer = sum(1 for checkpoint_id in complete if checkpoint_id > step.id)
    if step.complete:
        return f"superseded by {newer} complete newer steps; {keep} are kept" if newer >= keep else ""
    if newer and step.idle_s > max(ABANDONED_S, 4 * archive.interval_s):
        what = "was found damaged" if step.damaged else "never became complete"
        return f"{what}, and nothing was added for {step.idle_s:.0f} s"
    return ""
