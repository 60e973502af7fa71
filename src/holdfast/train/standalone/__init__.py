"""Checkpoints without services: `run.checkpoint` and `run.restore` under plain `python` or `torchrun`.

Theory. The training thread makes one copy into an image on /dev/shm, as in a managed job. Other threads of the rank do the
rest: the *keeper* checksums committed images and writes them to the directory, *peers* keep copies for ranks of other nodes,
and the *watcher* handles POSIX signals and agrees with the watchers of the other ranks, through the process group's store, on
one step to save. None of them calls a collective, so no rank waits for the disk of another.

No state is kept between starts. At a start every rank reports its shards (`gather`), every rank computes the same selection
from the reports (`elect`), and missing shards are sent by ranks that have them.

    <directory>/run.json                             the run to which the checkpoints belong, and its newest attempt
    <directory>/a<attempt>/s<step>/rank-<r>.shard    and rank-<r>.json, its manifest, which is written last and commits it
    <memory>/holdfast-<uid>/<run>/rank-<r>/          the images, which survive a killed process but not the node

A checkpoint is complete when the manifests of all ranks that saved it exist.
"""

from holdfast.train.standalone.options import Checkpoints
from holdfast.train.standalone.session import Session, open_session

__all__ = ["Checkpoints", "Session", "open_session"]
