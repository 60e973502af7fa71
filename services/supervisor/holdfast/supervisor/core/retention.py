"""Which saved step no node may be left without.

Nodes delete by what they hold themselves. But a step is worth something only while every rank's shard of it is somewhere, and
nodes whose disks are slower or faster than the others' may come to have no step in common. So the newest step that all of them
have, on disk and with a peer, is told to every node that has shards of the job: that one stays until the next is told.

It is said, not ordered: a word that is lost, late or told twice, or a supervisor that is away, lets nodes keep more than they
need to, never less. One look per `retention_s` and save: it goes through all inventories of the job.
"""

from __future__ import annotations

from collections import defaultdict

from holdfast.domain.replication import CommonCheckpoint
from holdfast.domain.runs import shard_runs
from holdfast.domain.tiers import DURABLE
from holdfast.supervisor.core.index import By
from holdfast.supervisor.core.job import Job
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.protocol import SendNotification
from holdfast.supervisor.timers import RetentionDue


def expect(turn: Turn, name: str) -> None:
    """A newer step is on its way: look in a moment how far the one before it has come."""
    if (timer := RetentionDue(name)) not in turn.timers:
        turn.set_timer(timer, turn.at + turn.config.retention_s)


def review(turn: Turn, name: str) -> None:
    """Tell which step all nodes have, when it is a newer one."""
    job = turn.jobs.get(name)
    if job is None or job.running is None or job.phase.finished:
        return
    step = newest_everywhere(turn, job)
    attempt = job.running.attempt
    if step == 0 or (attempt, step) <= job.checkpoints.saved_by_all:
        return
    turn.put_checkpoints(name, saved_by_all=(attempt, step))
    for node in sorted({*job.running.nodes, *turn.found(By.KEEPS, name)}):
        turn.commands.append(SendNotification(node, CommonCheckpoint(name, attempt, step)))


def newest_everywhere(turn: Turn, job: Job) -> int:
    """The newest step of the running attempt that every rank has on its node's disk and, where there are several nodes, on
    another one; 0 = none."""
    running = job.running
    assert running is not None
    on_disk: dict[int, int] = defaultdict(int)  # step → slots that have all of their own
    elsewhere: dict[int, set[int]] = defaultdict(set)  # step → ranks
    for name in turn.group(By.KEEPS, job.name):
        placement = running.placement_of(name)
        first, end = (placement.first_rank, placement.first_rank + placement.nproc) if placement is not None else (0, 0)
        own: dict[int, set[int]] = {}
        for run in shard_runs(turn.nodes[name].inventory[job.name]):
            if run.attempt != running.attempt:
                continue
            ranks = range(run.rank, run.end)
            if run.end <= first or end <= run.rank:
                elsewhere[run.step].update(ranks)
                continue
            elsewhere[run.step].update(rank for rank in ranks if not first <= rank < end)
            if run.tier in DURABLE:
                own.setdefault(run.step, set()).update(rank for rank in ranks if first <= rank < end)
        for step, mine in own.items():
            on_disk[step] += len(mine) == end - first
    alone = len(running.placements) < 2
    everywhere = (
        step
        for step, slots in on_disk.items()
        if slots == len(running.placements) and (alone or len(elsewhere[step]) == running.mesh.world_size)
    )
    return max(everywhere, default=0)
