"""Answers requests for checkpoints with the tiers reached, when every copy is made or the time is over."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.domain.tiers import NEARNESS
from holdfast.supervisor.core.model.job import CheckpointRequest, Job
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.saves import saved
from holdfast.supervisor.protocol import Answer, CheckpointRequested
from holdfast.supervisor.timers import CheckpointReportDue


@dataclass(frozen=True, slots=True)
class Reach:
    """The number of ranks of the running generation whose shard of a step is in each tier. Tiers that the job does not have are
    left out."""

    ranks: int
    counts: tuple[tuple[str, int], ...]  # nearest first

    @property
    def complete(self) -> bool:
        """Whether every rank's shard exists, on its own node or in the object store."""
        return any(name in (_NEAREST, _STORE) and count == self.ranks for name, count in self.counts)

    @property
    def all_copies(self) -> bool:
        """Whether nothing remains to be copied. The object store is the last tier: nodes may have deleted theirs by then."""
        return (_STORE, self.ranks) in self.counts or all(count == self.ranks for _, count in self.counts)

    def __str__(self) -> str:
        there = [name if name == _STORE else f"{name} ({self._of(count)})" for name, count in self.counts if count]
        missing = [] if self.all_copies else [name for name, count in self.counts if count < self.ranks]
        return (", ".join(there) or "nowhere") + (f"; not all of it yet: {', '.join(missing)}" if missing else "")

    def _of(self, count: int) -> str:
        return f"{'all' if count == self.ranks else count} of {self.ranks} ranks"


_NEAREST, *_FARTHER = NEARNESS
_PEER, _STORE = "a peer", "the object store"


def reach(turn: Turn, job: Job, step: int) -> Reach:
    """The tiers that the checkpoint at `step` of the running generation has reached, by the inventories."""
    running = job.running
    assert running is not None
    home = {rank: placement.node for placement in running.placements for rank in placement.ranks}
    tiers: dict[str, set[int]] = {name: set() for name in (*NEARNESS, _PEER)}
    for node, record in saved.held(turn, job, running.attempt, step):
        rank = record.key.rank
        tiers[_PEER if home.get(rank) != node.name else record.tier].add(rank)
    own = set[int]().union(*(tiers[name] for name in NEARNESS))  # memory may hold a newer step by now
    counts = [(_NEAREST, len(own)), *((name, len(tiers[name])) for name in _FARTHER)]
    if len(running.placements) > 1:
        counts.append((_PEER, len(tiers[_PEER])))
    if job.spec.checkpoint.store:
        good = {each.id for each in job.checkpoints.stored if not each.damage}
        stored = (running.attempt, step) in good
        counts.append((_STORE, len(home) if stored else 0))
    return Reach(len(home), tuple(counts))


def travel_s(turn: Turn, job: Job) -> float:
    """Time for a saved step to reach the last tier before a waiting client gets its answer, in seconds."""
    if not job.spec.checkpoint.store:
        return turn.config.report_s
    return max(turn.config.report_store_s, 3 * job.checkpoints.measured.upload_s)


def expect(turn: Turn, name: str, operation: str, at_step: int, until: float) -> None:
    """Answer the operation later; without one, write a note. If too many wait, the oldest is answered now."""
    job = turn.jobs[name]
    awaited = (*job.checkpoints.requests, CheckpointRequest(operation, at_step, until))
    job = turn.put_checkpoints(name, requests=awaited)
    if len(awaited) > turn.config.reports_max:
        _answer(turn, job, awaited[0])
    _set_timer(turn, name)


def review(turn: Turn, name: str) -> None:
    """Answer the requests that are complete or due. Called after an inventory, and by the timer."""
    job = turn.jobs.get(name)
    if job is None or not job.checkpoints.requests:
        return
    for each in job.checkpoints.requests:
        arrived = job.running is not None and reach(turn, job, each.at_step).all_copies
        if arrived or turn.at >= _until(turn, each) or job.phase.finished:
            _answer(turn, job, each)
    _set_timer(turn, name)


def settle(turn: Turn, name: str) -> None:
    """The saving generation has ended: answer all requests with what is known now."""
    for each in turn.jobs[name].checkpoints.requests:
        _answer(turn, turn.jobs[name], each)
    _set_timer(turn, name)


def _set_timer(turn: Turn, name: str) -> None:
    if left := turn.jobs[name].checkpoints.requests:
        turn.set_timer(CheckpointReportDue(name), min(_until(turn, each) for each in left))
    else:
        turn.cancel_timer(CheckpointReportDue(name))


def _until(turn: Turn, request: CheckpointRequest) -> float:
    """The latest time of an answer. A new leader knows the saved steps only after agents have reconnected."""
    return max(request.until, turn.led_at + turn.config.session_s)


def _answer(turn: Turn, job: Job, each: CheckpointRequest) -> None:
    left = tuple(other for other in turn.jobs[job.name].checkpoints.requests if other != each)
    turn.put_checkpoints(job.name, requests=left)
    found = reach(turn, job, each.at_step) if job.running is not None else None
    ok = found is not None and found.complete
    how = "is saved" if ok else "was not saved by every rank in time"
    reason = f"step {each.at_step} of {job.name} {how}: {found or 'nowhere'}"
    if each.operation:
        turn.commands.append(Answer(each.operation, ok, reason, CheckpointRequested(turn.at, job.name)))
    else:
        turn.note(job.name, reason)
