"""Selects the checkpoint that a generation or a launch restores, and the sources of each rank's shards. Pure; standard library
only.

`elect` serves two callers: the supervisor, which has every node's inventory, and the trainer library without services, in which
every rank computes the same result.

Theory. Every attempt was forked from an older attempt at some step. The lineage (`lineage.py`) lists the attempts that lead to
the current state, each with the last step that counts. An (attempt, step) on the lineage is *complete* for a mesh if each rank
can reach the shards that it needs, on a connected node or in the object store:

* in the mesh that saved the checkpoint: the rank's own shard, so that training continues bit for bit;
* in a mesh with another number of replicas, if the replicas have equal tensors at every position: the shard of any replica at
  the rank's position;
* … if the tensors differ, or it is not known whether they do: the state is sharded over dp, and the rank needs the shards of
  *all* replicas at its position. The trainer reads from each shard the range that overlaps the rank's own part. In both cases a
  rank is found by its coordinates in the mesh that saved, because its number may have changed;
* in a mesh of other dimensions, if the caller's terms allow that: every shard of the checkpoint.

The newest complete step is selected, independent of its tier: a newer step from a farther tier costs seconds, but an older step
from a nearer tier costs repeated steps. An incomplete, mixed, abandoned or doubtful step, or a step after the last verified
one, is skipped with its reason. If copies of the same shard differ, the step is skipped, because it is not known which copy is
right.

Replicas count as equal only if equal digests of two replicas at one position are known: in this step or in another step of its
attempt, in an earlier inventory, or in the object store's manifest. (Sharded state differs at every position.) The shard of a
single replica may be only a part of the state, so it is not used as the complete state.

If no step is complete, the caller decides. The supervisor waits for disconnected nodes and then calls `elect` again for fewer
replicas. A launch without services can do neither. Its terms allow a last resort: a rank whose own shard is lost restores the
identical state of another replica.

Cost: linear in the number of known copies of shards and in the number of restored shards.
"""

from holdfast.restore.election import elect, replicas_differ
from holdfast.restore.lineage import Line, Segment, ancestry, branch
from holdfast.restore.values import Election, Holder, Knowledge, ObjectStore, Origin, Terms, Trusted

__all__ = [
    "Election",
    "Holder",
    "Knowledge",
    "Line",
    "ObjectStore",
    "Origin",
    "Segment",
    "Terms",
    "Trusted",
    "ancestry",
    "branch",
    "elect",
    "replicas_differ",
]
