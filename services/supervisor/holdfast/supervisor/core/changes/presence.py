"""Which ranks of the running generation have no worker, and how long that may last. What follows: `reconcile`."""

from __future__ import annotations

from holdfast.domain.generations import Placement
from holdfast.domain.runs import worker_runs
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Running, Starting
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.timers import RanksDue, StepDue

_STARTED = (Running, Starting)
STILL_FACTOR = 2.0  # times what diagnostics may take to report a hang: it has more information


def review_generation(turn: Turn, name: str) -> None:
    """A generation was started: from now on, each of its ranks should have a worker."""
    job = turn.jobs[name]
    assert job.running is not None
    nodes, number, nproc, absent = turn.nodes, job.running.number, job.spec.nproc_per_node, {}
    for placement in job.running.placements:
        node = nodes[placement.node]
        runs = worker_runs(node.workers)
        # Nearly all nodes have exactly the ranks of their placement.
        expected = (name, number, placement.first_rank, nproc)
        has_all = node.connected and placement.nproc == nproc and len(runs) == 1 and runs[0][:4] == expected
        if not has_all and lacks(node, job):
            absent[placement.node] = turn.at
    turn.put_membership(name, absent=absent)
    turn.put_progress(name, seen_step=job.running.restore.step, seen_at=turn.at)
    set_timer(turn, name)


def set_timer(turn: Turn, name: str) -> None:
    job = turn.jobs[name]
    if not job.membership.absent or not applies(job):
        turn.cancel_timer(RanksDue(name))
        return
    due = min(since + patience_s(turn, node) for node, since in job.membership.absent.items())
    turn.set_timer(RanksDue(name), max(due, turn.at + turn.config.look_again_s))


def watch_steps(turn: Turn, name: str) -> None:
    """Every rank steps: from now on, steps should be reported."""
    turn.set_timer(StepDue(name), turn.at + still_s(turn.jobs[name]))


def still_s(job: Job) -> float:
    hang = job.spec.hang
    return STILL_FACTOR * max(hang.init_s, hang.floor_s, hang.factor * job.progress.step_s)


def applies(job: Job) -> bool:
    """Whether each rank of the running generation should have a living worker now."""
    return isinstance(job.doing, _STARTED) and job.running is not None and job.running.number == job.number


def lacks(node: Node, job: Job) -> bool:
    """Whether some rank of the running generation that belongs on the node neither lives nor ended with exit code 0."""
    if not node.connected:
        return True
    if not node.workers_version:  # its agent does not report workers: unknown is not faulty
        return False
    assert job.running is not None
    mine = (job.name, job.running.number)
    placement = job.running.placement_of(node.name)
    first, end = (0, 0) if placement is None else (placement.first_rank, placement.first_rank + placement.nproc)
    known = 0
    for run in worker_runs(node.workers):
        if run[:2] == mine:
            begin = run[2]
            known += max(0, min(begin + run[3], end) - max(begin, first))
    for each in node.ended:
        known += (each.job, each.generation) == mine and each.well
    return known < job.spec.nproc_per_node


def missing(turn: Turn, job: Job) -> dict[str, tuple[int, ...]]:
    """Ranks of the running generation without a worker, by node, for nodes with a session."""
    if job.running is None or not job.membership.absent:
        return {}
    found = {}
    placements = (job.running.placement_of(name) for name in job.membership.absent)
    for placement in sorted((each for each in placements if each is not None), key=lambda each: each.slot):
        node = turn.nodes.get(placement.node)
        if node is not None and node.connected:
            found[placement.node] = _missing_on(node, job, placement)
    return {node: ranks for node, ranks in found.items() if ranks}


def _missing_on(node: Node, job: Job, placement: Placement) -> tuple[int, ...]:
    assert job.running is not None
    mine = (job.name, job.running.number)
    there = {rank for run in worker_runs(node.workers) if run[:2] == mine for rank in range(run.rank, run.end)}
    there |= {each.rank for each in node.ended if (each.job, each.generation) == mine and each.well}
    return tuple(rank for rank in placement.ranks if rank not in there and rank not in job.membership.finished)


def patience_s(turn: Turn, name: str) -> float:
    node = turn.nodes.get(name)
    return turn.config.missing_s if node is not None and node.connected else turn.config.away_s
