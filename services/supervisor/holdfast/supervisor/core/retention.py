"""Which saved step no node may be left without.

Nodes delete by what they hold themselves. But a step is worth something only while every rank's shard of it is somewhere, and
nodes whose disks are slower or faster than the others' may come to have no step in common. So the newest step that all of them
have, on disk and with a peer, is told to every node that has shards of the job: that one stays until the next is told.

It is said, not ordered: a word that is lost, late or told twice, or a supervisor that is away, lets nodes keep more than they
need to, never less. One look per `retention_s` and save: it goes through all inventories of the job.
"""

from __future__ import annotations

from holdfast.domain.replication import SavedByAll
from holdfast.supervisor.core import saved
from holdfast.supervisor.core.index import By
from holdfast.supervisor.core.state import Job
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.protocol import Tell


def expect(turn: Turn, name: str) -> None:
    """A newer step is on its way: look in a moment how far the one before it has come."""
    if (timer := f"retain:{name}") not in turn.timers:
        turn.set_timer(timer, turn.at + turn.config.retention_s)


def review(turn: Turn, name: str) -> None:
    """Tell which step all nodes have, when it is a newer one."""
    job = turn.jobs.get(name)
    if job is None or job.running is None or job.phase.finished:
        return
    step = newest_everywhere(turn, job)
    attempt = job.running.attempt
    if step == 0 or (attempt, step) <= job.saved_by_all:
        return
    turn.put_job(name, saved_by_all=(attempt, step))
    for node in sorted({*job.running.nodes, *turn.found(By.KEEPS, name)}):
        turn.commands.append(Tell(node, SavedByAll(name, attempt, step)))


def newest_everywhere(turn: Turn, job: Job) -> int:
    """The newest step of the running attempt that every rank has on its node's disk and, where there are several nodes, on
    another one; 0 = none."""
    running = job.running
    assert running is not None
    steps = saved.steps_on_disk(turn, job)
    if len(running.placements) < 2:
        return max(steps, default=0)
    elsewhere: dict[int, set[int]] = {step: set() for step in steps}
    for name in turn.group(By.KEEPS, job.name) if steps else ():
        placement = running.placement_of(name)
        own = placement.ranks if placement is not None else range(0)
        for record in turn.nodes[name].inventory[job.name]:
            key = record.key
            if key.attempt == running.attempt and key.rank not in own and key.step in elsewhere:
                elsewhere[key.step].add(key.rank)
    return max((step for step, ranks in elsewhere.items() if len(ranks) == running.mesh.world_size), default=0)
