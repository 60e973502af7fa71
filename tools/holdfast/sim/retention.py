"""The promise of retention, checked at each deletion: the plans never delete the last checkpoint that all ranks have.

The plan bounds the backlog for a node that saves nothing (it has missed an order that changes the interval): a step that is not
known to be complete on all nodes may go when `BACKLOG_STEPS_MAX` steps beyond `keep` are newer on the node.

Machines that are lost at the same moment with their disks can have all copies of a part of the newest step. Nobody knows that
at once, so what was lost within `UNNOTICED_S` counts as being there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from holdfast.domain.checkpoints import CheckpointId
from holdfast.replicator.plan import BACKLOG_STEPS_MAX
from holdfast.replicator.view import Held, Tier, View, is_abandoned
from holdfast.sim.replicator import Replicator
from holdfast.sim.world import Violation

UNNOTICED_S = 10.0  # a lost node is found after 6 s, and a leader may have to be replaced first


def keep_a_whole_step(
    replicators: Sequence[Replicator], job: str, view_of: Callable[[], View], deleted: Held, node: str
) -> None:
    """Called before the node deletes a copy. Copies on machines that are away count, because the plan does not take them away.
    `view_of`: the view of the node's plan. Raises Violation."""
    copies = [Held(tier, deleted.key) for tier in Tier]
    if any(held in each.files(job) and (each.name, held) != (node, deleted) for each in replicators for held in copies):
        return
    view, rank, at = view_of(), deleted.key.rank, deleted.key.checkpoint
    newer = {held.key.checkpoint for held in view.held if held.key.rank == rank and held.key.checkpoint > at}
    if len(newer) >= view.keep + BACKLOG_STEPS_MAX and view.saved_by_all != at:
        return
    if _whole(replicators, job, view) == {at}:
        raise Violation(
            f"{node} deletes {deleted.key}, the last copy of a part of step {at.step} "
            f"(attempt {at.attempt}), and no other step has all ranks"
        )


def _whole(replicators: Iterable[Replicator], job: str, view: View) -> set[CheckpointId]:
    """Return the checkpoints of the lineage of which each rank has a shard."""
    ranks: dict[tuple[int, int], set[int]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for each in replicators:
        lost = each.lost_since(job, each.world.now - UNNOTICED_S)
        for held, manifest in (*each.files(job).items(), *lost.items()):
            at = held.key.attempt, held.key.step
            if at not in ranks:
                ranks[at], sizes[at] = set(), manifest.domain_mesh().world_size
            ranks[at].add(held.key.rank)
    whole = [CheckpointId(*at) for at, found in ranks.items() if len(found) == sizes[at]]
    return {each for each in whole if not is_abandoned(view, each)}
