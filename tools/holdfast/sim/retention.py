"""The promise of retention, checked at each deletion: the plans never delete the last checkpoint that all ranks have.

The plan bounds the backlog for a node that saves nothing (it has missed an order that changes the interval): a step that is not
known to be complete on all nodes may go when `BACKLOG_STEPS_MAX` steps beyond `keep` are newer on the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.replicator.plan import BACKLOG_STEPS_MAX
from holdfast.replicator.view import Held, View, is_abandoned
from holdfast.shards import Manifest
from holdfast.sim.replicator import Replicator
from holdfast.sim.world import Violation


def keep_a_whole_step(replicators: Sequence[Replicator], job: str, view: View, deleted: Held, node: str) -> None:
    """Called before the node deletes a copy. Copies on machines that are away count, because the plan does not take them away.
    Raises Violation."""
    others = [held for each in replicators for held in each.files(job) if (each.name, held) != (node, deleted)]
    if any(held.key == deleted.key for held in others):
        return
    rank, at = deleted.key.rank, deleted.key.checkpoint
    newer = {held.key.checkpoint for held in view.held if held.key.rank == rank and held.key.checkpoint > at}
    if len(newer) >= view.keep + BACKLOG_STEPS_MAX and view.saved_by_all != at:
        return
    meshes = {held.key: manifest for each in replicators for held, manifest in each.files(job).items()}
    before = _whole(view, meshes)
    del meshes[deleted.key]
    if before and not _whole(view, meshes):
        raise Violation(
            f"{node} deletes {deleted.key}, the last copy of a part of step {max(before).step} "
            f"(attempt {max(before).attempt}), and no other step has all ranks"
        )


def _whole(view: View, shards: Mapping[ShardKey, Manifest]) -> set[CheckpointId]:
    """Return the checkpoints of the lineage of which each rank has a shard."""
    ranks: dict[CheckpointId, set[int]] = {}
    sizes: dict[CheckpointId, int] = {}
    for key, manifest in shards.items():
        if not is_abandoned(view, key.checkpoint):
            ranks.setdefault(key.checkpoint, set()).add(key.rank)
            sizes[key.checkpoint] = manifest.domain_mesh().world_size
    return {each for each, found in ranks.items() if len(found) == sizes[each]}
