"""Checkpoints without services: the same `run.checkpoint` and `run.restore` under plain `python` or `torchrun`.

Theory. The training thread does what it always does: one copy into an image on /dev/shm. Everything else is done by other
threads of the rank: the *keeper* checksums committed images and writes them to the directory, *peers* keep copies for ranks of
other nodes, and the *watcher* listens for signals and agrees with the other ranks' watchers, through the process group's
store, on one step to save. None of them calls a collective, so no rank waits for another one's disk.

There is no leader between starts. At the start every rank says what is there (`gather`), every rank makes the same pure
election of it (`elect`), and what a rank lacks is sent to it by one that has it.

    <directory>/run.json                             which run the checkpoints belong to, and its newest attempt
    <directory>/a<attempt>/s<step>/rank-<r>.shard    and rank-<r>.json, its manifest: written last, so it is what counts
    <memory>/holdfast-<uid>/<run>/rank-<r>/          the images, which outlive a killed process but not the node

A checkpoint exists when the manifests of all ranks that saved it do.
"""

from holdfast.train.standalone.options import Checkpoints
from holdfast.train.standalone.session import Session, open_session

__all__ = ["Checkpoints", "Session", "open_session"]
