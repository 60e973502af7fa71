"""Retention: determines the newest saved step that every node must keep, and sends it to the nodes.

Nodes delete shards by what they hold themselves. But a step is useful only while every rank's shard exists somewhere, and
nodes with slower or faster disks than others could end up with no step in common. So the newest step that all of them have, on
disk and on a peer, is sent to every node that holds shards of the job: nodes keep that step until they receive the next.
While the state is known to be corrupt or in doubt, no step after the last verified one is sent: a restart needs an older one.

This is a notification, not an order. If it is lost, late or repeated, or if the supervisor is unavailable, nodes keep more than
necessary, never less. It is computed once per `retention_s` and save, from all inventories of the job, and not before the
newest step is verified if the script reports its loss.
"""

from __future__ import annotations

import math
from collections import defaultdict

from holdfast.domain.replication import CommonCheckpoint
from holdfast.domain.runs import shard_runs
from holdfast.domain.tiers import DURABLE
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Preparing
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.protocol import SendNotification
from holdfast.supervisor.timers import RetentionDue


def expect(turn: Turn, name: str) -> None:
    """A newer step is being copied: check which step all nodes have, when it is also verified. An earlier check stands."""
    if (timer := RetentionDue(name)) not in turn.timers:
        job = turn.jobs[name]
        missing = job.checkpoints.step - _verified_step(turn, job)  # steps
        verified_s = missing * job.progress.seconds_per_step if missing > 0 else 0.0
        turn.set_timer(timer, turn.at + max(turn.config.retention_s, verified_s))


def review(turn: Turn, name: str) -> None:
    """Send the newest step that all nodes have, if it is newer than the last one sent."""
    job = turn.jobs.get(name)
    if job is None or job.running is None or job.phase.finished:
        return
    step = newest_everywhere(turn, job)
    progress, verified_soon = job.progress, job.checkpoints.step > _verified_step(turn, job)
    if verified_soon and turn.at - progress.seen_at <= turn.config.retention_s + 2 * progress.seconds_per_step:
        expect(turn, name)  # steps are being finished; after a pause the next save leads to a review
    attempt = job.running.attempt
    if step == 0 or (attempt, step) <= job.checkpoints.saved_by_all or _is_given_up(job, step):
        return
    turn.put_checkpoints(name, saved_by_all=(attempt, step))
    nodes = sorted({*job.running.nodes, *turn.group(By.KEEPS, name)})
    turn.commands.append(SendNotification(tuple(nodes), CommonCheckpoint(name, attempt, step)))


def _is_given_up(job: Job, step: int) -> bool:
    """Whether the generation that is being prepared restores an older step: a node of the running one returned with its shards
    after the election. The older step must be kept, because the next generation has no other until it saves."""
    if job.running is None or not isinstance(job.doing, Preparing):
        return False
    assert job.generation is not None
    restore = job.generation.restore
    return (restore.attempt, restore.step) < (job.running.attempt, step)


_Ranks = tuple[int, int]  # from, to (exclusive); empty if `to` is not above `from`


def newest_everywhere(turn: Turn, job: Job) -> int:
    """The newest step of the running attempt that every rank has on its node's disk and, if there are several nodes, on another
    one; 0 = none. Ignores steps before the last one that was sent, and those that may not be restored."""
    running = job.running
    assert running is not None
    attempt, limit = running.attempt, job.restore_limit
    step_max = min(_verified_step(turn, job), math.inf if limit is None else limit.step)
    if 0 < job.checkpoints.step <= step_max and _is_everywhere(turn, job, job.checkpoints.step):
        return job.checkpoints.step  # no newer step is complete, wherever its shards are
    on_disk: dict[int, int] = defaultdict(int)  # step → number of slots that hold all of their own shards
    elsewhere: dict[int, list[_Ranks]] = defaultdict(list)
    sent_attempt, sent_step = job.checkpoints.saved_by_all
    step_min = sent_step if sent_attempt == attempt else 0
    known, name = turn.nodes.get, job.name
    for placement in running.placements:
        if (node := known(placement.node)) is None:
            continue
        first, behind = placement.first_rank, placement.first_rank + placement.nproc
        whole: set[int] = set()
        parts: dict[int, list[_Ranks]] = {}
        for run in shard_runs(node.inventory.get(name, ())):
            if run[0] != attempt or not step_min <= run[1] <= step_max:
                continue
            _, step, _, tier, _, begin, width, _, _, _ = run
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


def _verified_step(turn: Turn, job: Job) -> float:
    """The newest step whose state has given a loss that diagnostics has judged: that of the step after it, and as many steps
    later as the judgement takes to arrive. `math.inf` if the script reports no loss."""
    progress = job.progress
    if progress.loss is None:
        return math.inf
    late = math.ceil(turn.config.retention_s / progress.seconds_per_step) if progress.seconds_per_step > 0 else 0
    return progress.newest_step - 2 - late


def _is_everywhere(turn: Turn, job: Job, step: int) -> bool:
    """Whether every node has this step on its disk, and other nodes have all of it, in runs as nodes report them. False also
    if that is not certain: then all steps are compared."""
    running = job.running
    assert running is not None
    attempt, known, name = running.attempt, turn.nodes.get, job.name
    elsewhere: dict[int, int] = {}  # first rank → number of ranks of the longest run, on nodes without this rank
    for placement in running.placements:
        first, nproc = placement.first_rank, placement.nproc
        if (node := known(placement.node)) is None:
            return False
        on_disk = False
        for run in shard_runs(node.inventory.get(name, ())):
            if run[1] == step and run[0] == attempt:
                begin = run[5]
                if begin != first:
                    elsewhere[begin] = max(run[6], elsewhere.get(begin, 0))
                elif run[6] == nproc and run[3] in DURABLE:
                    on_disk = True
        if not on_disk:
            return False
    copied = elsewhere.get
    return len(running.placements) < 2 or all(copied(each.first_rank) == each.nproc for each in running.placements)


def _distinct(ranks: list[_Ranks]) -> int:
    """The number of different ranks."""
    count = reached = 0
    for begin, end in sorted(ranks):
        count += max(0, end - max(reached, begin))
        reached = max(reached, end)
    return count
