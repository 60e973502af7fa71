"""Which saved step a generation or a launch restores, and where each rank finds its shards. Pure; standard library only.

The supervisor (which knows every node's inventory) and the trainer library without services (where every rank computes the same
answer) ask the same question, and `elect` answers both.

Theory. Every attempt (lineage of checkpoints) was forked from an older one at some step. The lineage (`lineage.py`) lists the
attempts that led to where the job is, each with the last step that counts. An (attempt, step) on it is *complete* for a mesh
when each rank can reach what it needs, on a node at hand or in the object store:

* in the mesh that saved it: the rank's own shard, so that training goes on bit for bit;
* in another number of replicas, when the replicas hold the same at every position: any replica's shard of its position;
* … when they do not, or nobody can tell: the state is sharded over dp, and the rank needs the shards of *all* replicas at its
  position. The trainer takes from each what overlaps its own part. In both cases a rank is found by its coordinates in the mesh
  that saved: its number may be another one now;
* in a mesh of other dimensions, if the caller's terms allow that: every shard that was saved.

The newest complete step wins, wherever it comes from: a newer step from a farther tier costs seconds, an older one from a
nearer tier costs work. A step that is half saved, mixed, given up, doubtful, or newer than the last verified one is passed over
with its reason. Copies that claim to be one shard and differ disqualify the step, for nobody knows which of them is right.

Whether replicas hold the same is only believed when it was seen: equal digests of two replicas at one position (what is sharded
differs at every position), in this step or in another one of its attempt, in an earlier inventory, or in the object store's
manifest. One replica's shard alone may be a part of the state, and is not taken for all of it.

When no step is complete, the caller has the choice: the supervisor waits for nodes that are away, then asks again for fewer
replicas. A launch without services has neither, and its terms ask for the last resort: a rank whose own shard is lost takes
another replica's identical state.

Cost: linear in the copies of shards that are known, and in the shards that are restored.
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
