"""Checkpoints that somebody asked for: how far did they come? Answered when every copy is made, or the patience is over."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.supervisor.core import saved
from holdfast.supervisor.core.state import Awaited, Job
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.protocol import Answer, CheckpointRequested


@dataclass(frozen=True, slots=True)
class Reach:
    """How many ranks of the running generation have their shard of a step in each tier."""

    ranks: int
    memory: int
    disk: int
    peer: int
    stored: bool
    peers_wanted: bool

    @property
    def complete(self) -> bool:
        """Every rank's own node holds it."""
        return self.memory == self.ranks

    @property
    def all_copies(self) -> bool:
        return self.complete and self.disk == self.ranks and (self.peer == self.ranks or not self.peers_wanted)

    def __str__(self) -> str:
        tiers = [("memory", self.memory), ("disk", self.disk)] + ([("a peer", self.peer)] if self.peers_wanted else [])
        said = [
            f"{name} ({'all' if count == self.ranks else count} of {self.ranks} ranks)"
            for name, count in tiers
            if count
        ]
        return ", ".join([*said, *(["the object store"] if self.stored else [])]) or "nowhere"


def reach(turn: Turn, job: Job, step: int) -> Reach:
    """How far the checkpoint at `step` of the running generation has come, as the inventories tell."""
    running = job.running
    assert running is not None
    home = {rank: placement.node for placement in running.placements for rank in placement.ranks}
    tiers: dict[str, set[int]] = {"memory": set(), "disk": set(), "peer": set()}
    for node, record in saved.held(turn, job, running.attempt, step):
        rank = record.key.rank
        tiers["peer" if home.get(rank) != node.name else record.tier].add(rank)
    stored = any((each.attempt, each.step) == (running.attempt, step) for each in job.stored)
    own = tiers["memory"] | tiers["disk"]  # memory may have gone on to a newer step by now
    wanted = len(running.placements) > 1
    return Reach(len(home), len(own), len(tiers["disk"]), len(tiers["peer"]), stored, wanted)


def expect(turn: Turn, event: CheckpointRequested, at_step: int, patience_s: float) -> None:
    """The operation is answered later; the oldest of too many at once."""
    job = turn.jobs[event.job]
    if not event.operation:
        return
    awaited = (*job.awaited, Awaited(event.operation, at_step, turn.at + patience_s))
    job = turn.put_job(job.name, awaited=awaited)
    if len(awaited) > turn.config.reports_max:
        _answer(turn, job, awaited[0])
    turn.set_timer(f"report:{job.name}", min(each.until for each in turn.jobs[job.name].awaited))


def review(turn: Turn, name: str) -> None:
    """An inventory, or time, has come in."""
    job = turn.jobs.get(name)
    if job is None or not job.awaited:
        return
    for each in job.awaited:
        arrived = job.running is not None and reach(turn, job, each.at_step).all_copies
        if arrived or turn.at >= each.until or job.phase.finished:
            _answer(turn, job, each)
    if left := turn.jobs[name].awaited:
        turn.set_timer(f"report:{name}", min(each.until for each in left))
    else:
        turn.cancel_timer(f"report:{name}")


def _answer(turn: Turn, job: Job, each: Awaited) -> None:
    turn.put_job(job.name, awaited=tuple(other for other in turn.jobs[job.name].awaited if other != each))
    found = reach(turn, job, each.at_step) if job.running is not None else None
    if found is not None and (found.complete or found.stored):
        ok, reason = True, f"step {each.at_step} of {job.name} is saved: {found}"
    else:
        ok, reason = (
            False,
            f"step {each.at_step} of {job.name} was not saved by every rank in time: {found or 'nowhere'}",
        )
    turn.commands.append(Answer(each.operation, ok, reason, CheckpointRequested(turn.at, job.name)))
