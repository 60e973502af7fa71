"""The promise of retention, checked at each deletion: the plans never delete the last checkpoint that all ranks have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.replicator.view import Held, View, is_abandoned
from holdfast.shards import Manifest
from holdfast.sim.replicator import Replicator
from holdfast.sim.world import Violation


def keep_a_whole_step(
    replicators: Iterable[Replicator], job: str, view: View, deleted: Sequence[Held], node: str
) -> None:
    """Called before the node deletes these copies. Copies on machines that are away count, because the plan does not take them
    away. Raises Violation."""
    there = [(each.name, held, manifest) for each in replicators for held, manifest in each.files(job).items()]
    before = _whole(view, {held.key: manifest for _, held, manifest in there})
    left = {
        held.key: manifest for name, held, manifest in there if (name, held) not in {(node, each) for each in deleted}
    }
    if before and not _whole(view, left):
        raise Violation(
            f"{node} deletes {', '.join(str(each.key) for each in deleted)}, the last copy of a part of step "
            f"{max(before).step} (attempt {max(before).attempt}), and no other step has all ranks"
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
