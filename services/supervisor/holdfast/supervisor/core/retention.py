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
from holdfast.supervisor.core.lifecycle import Preparing
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
    if step == 0 or (attempt, step) <= job.checkpoints.saved_by_all or _is_given_up(job, step):
        return
    turn.put_checkpoints(name, saved_by_all=(attempt, step))
    for node in sorted({*job.running.nodes, *turn.group(By.KEEPS, name)}):
        turn.commands.append(SendNotification(node, CommonCheckpoint(name, attempt, step)))


def _is_given_up(job: Job, step: int) -> bool:
    """Whether the generation that is being prepared restores an older step: a node of the running one came back with its shards
    after the election. The older step must stay, because the next generation has no other until it saves."""
    if job.running is None or not isinstance(job.doing, Preparing):
        return False
    assert job.generation is not None
    restore = job.generation.restore
    return (restore.attempt, restore.step) < (job.running.attempt, step)


_Ranks = tuple[int, int]  # from, to (exclusive); where that is not above, there are none


def newest_everywhere(turn: Turn, job: Job) -> int:
    """The newest step of the running attempt that every rank has on its node's disk and, where there are several nodes, on
    another one; 0 = none."""
    running = job.running
    assert running is not None
    attempt = running.attempt
    on_disk: dict[int, int] = defaultdict(int)  # step → slots that have all of their own
    elsewhere: dict[int, list[_Ranks]] = defaultdict(list)
    for name in turn.group(By.KEEPS, job.name):
        placement = running.placement_of(name)
        if placement is None:
            continue  # no worker there, nor a peer of one
        first, behind = placement.first_rank, placement.first_rank + placement.nproc
        whole: set[int] = set()
        parts: dict[int, list[_Ranks]] = {}
        for each, step, _, tier, _, begin, width, _, _ in shard_runs(turn.nodes[name].inventory[job.name]):
            if each != attempt:
                continue
            end = begin + width
            if tier in DURABLE:
                if (begin, end) == (first, behind):
                    whole.add(step)
                elif begin < behind and first < end:
                    parts.setdefault(step, []).append((max(begin, first), min(end, behind)))
            if begin < first:
                elsewhere[step].append((begin, min(end, first)))
            if behind < end:
                elsewhere[step].append((max(begin, behind), end))
        for step in whole:
            on_disk[step] += 1
        for step, mine in parts.items():
            on_disk[step] += step not in whole and _distinct(mine) == behind - first
    alone = len(running.placements) < 2
    everywhere = (
        step
        for step, slots in on_disk.items()
        if slots == len(running.placements) and (alone or _distinct(elsewhere[step]) == running.mesh.world_size)
    )
    return max(everywhere, default=0)


def _distinct(ranks: list[_Ranks]) -> int:
    """How many ranks these are, each counted once."""
    count = reached = 0
    for begin, end in sorted(ranks):
        count += max(0, end - max(reached, begin))
        reached = max(reached, end)
    return count
