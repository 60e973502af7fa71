"""Free nodes, and the jobs that may take them.

Theory of operation. A free node has a session, is in service and is claimed by no job. A job sees only free nodes of its own
pool. Two more things keep free nodes from a job:

* *Reserved spares.* `spares: 2` in a job file reserves two free nodes while the job runs. They are chosen from the nodes that
  are free now, those without workers first, for the job of the highest priority first, and are not stored.
* *Kept nodes.* A job of higher priority may be about to take certain nodes, because replicas were given up for it or because it
  will grow at its next checkpoint. These nodes are kept for it for some minutes (`Job.kept`).

Both apply to jobs of the same priority and of lower ones. A job of higher priority takes the nodes that it needs, unreserved
ones first. If no job reserves nodes, every job may take every free node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from holdfast.domain.evolve import evolve
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.indexing import reserves
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.offenders import rate_per_day
from holdfast.supervisor.core.rules.planner import Spare

_HOUR_S = 3600.0  # the expected fault rate of a spare is computed once an hour: it changes over weeks


def spares_for(turn: Turn, job: Job) -> tuple[Spare, ...]:
    """Free nodes that could take ranks of `job` now: connected, in service, without workers of other jobs, and not reserved
    for a job of the same priority or a higher one."""
    free = _free_for(turn, job)
    if not turn.count(By.RESERVES):
        return free
    return turn.pooled(("spares", job.name), lambda: _allowed(turn, job, free), job)


def is_spare_for(turn: Turn, job: Job, node: Node) -> bool:
    """Whether this node is among `spares_for`, at the cost of one node."""
    is_member = job.generation is not None and job.generation.slot_of(node.name) is not None
    excluded = job.change.excluded if job.change else ()
    return (
        node.name in turn.group(By.FREE)
        and _is_able(node, job.spec.pool, job.spec.nproc_per_node)
        and not is_member
        and node.name not in excluded
        and all(holder == job.name for holder in turn.group(By.HELD, node.name))
        and node.name not in withheld(turn, job)
    )


def roomiest(turn: Turn, pool: str, nproc: int) -> int:
    """The room for workers of the pool's largest free node that has room for fewer than `nproc`; 0 = there is none."""

    def look() -> int:
        free = (turn.nodes[name].facts for name in turn.found(By.FREE))
        return max((node.capacity for node in free if node.pool == pool and node.capacity < nproc), default=0)

    return turn.pooled(("roomiest", pool, nproc), look)


def as_spare(turn: Turn, job: Job, node: Node) -> Spare | None:
    """A node that another job might give up, as a spare of `job`; None if `job` could not use it."""
    excluded = job.change.excluded if job.change else ()
    able = node.name in turn.group(By.AVAILABLE) and _is_able(node, job.spec.pool, job.spec.nproc_per_node)
    return _spare(turn, node, turn.at) if able and node.name not in excluded else None


def withheld(turn: Turn, job: Job) -> Mapping[str, str]:
    """Free nodes that `job` may not take → the job that they are reserved for, of the same priority or a higher one."""
    if not turn.count(By.RESERVES):
        return {}
    owners = _allotted(turn).owners
    return {
        node: owner
        for node, owner in owners.items()
        if owner != job.name and turn.jobs[owner].spec.priority >= job.spec.priority
    }


def reserved_for(turn: Turn, job: Job) -> tuple[str, ...]:
    """The free nodes that are reserved as spares of `job` now."""
    return tuple(sorted(_allotted(turn).spares.get(job.name, ()))) if turn.count(By.RESERVES) else ()


def faults_per_day(turn: Turn, node: Node) -> float:
    """Expected faults of the node per day, by its own record."""
    return rate_per_day(node.faults, node.known_since, turn.at, turn.config.offenders)


# ---------------------------------------------------------------- free nodes


@dataclass(frozen=True, slots=True)
class _Able:
    """Free nodes of a pool with room for a number of workers: the part that is the same for all jobs, computed once."""

    spares: tuple[Spare, ...]  # by name
    names: frozenset[str]
    held: tuple[str, ...]  # those of them that may have workers of some job


def _free_for(turn: Turn, job: Job) -> tuple[Spare, ...]:
    pool, nproc = job.spec.pool, job.spec.nproc_per_node
    able = turn.pooled(("able", pool, nproc), lambda: _able(turn, pool, nproc))
    members = job.generation.nodes if job.generation else ()
    excluded = job.change.excluded if job.change else ()
    out = able.names.intersection((*members, *excluded))
    out |= {name for name in able.held if any(holder != job.name for holder in turn.group(By.HELD, name))}
    return tuple(spare for spare in able.spares if spare.node not in out) if out else able.spares


def _able(turn: Turn, pool: str, nproc: int) -> _Able:
    nodes, hour = turn.nodes, turn.at // _HOUR_S
    able = [node for name in turn.found(By.FREE) if _is_able(node := nodes[name], pool, nproc)]
    spares = tuple(turn.remembered(node, partial(_spare, turn, node, hour * _HOUR_S), hour) for node in able)
    return _Able(
        spares,
        frozenset(node.name for node in able),
        tuple(node.name for node in able if turn.group(By.HELD, node.name)),
    )


def _spare(turn: Turn, node: Node, at: float) -> Spare:
    rate = rate_per_day(node.faults, node.known_since, at, turn.config.offenders)
    return Spare(node.name, node.zone, rate, node.probation is not None)


def _is_able(node: Node, pool: str, nproc: int) -> bool:
    """Called for every spare and every plan, so rarely set fields are read only if they are set."""
    if node.facts.capacity < nproc or node.facts.pool != pool:
        return False
    if node.preflight is not None and (node.unfit or node.untested):
        return False
    return not node.notices or node.notice is None


# ---------------------------------------------------------------- reservations


@dataclass(slots=True)
class _Allotted:
    owners: dict[str, str] = field(default_factory=dict)  # node → job
    spares: dict[str, list[str]] = field(default_factory=dict)  # job → its reserved ones


def _allotted(turn: Turn) -> _Allotted:
    return turn.pooled("allotted", lambda: _allot(turn))


def _allot(turn: Turn) -> _Allotted:
    """Allot kept nodes first: they were given up for this very job."""
    allotted, jobs = _Allotted(), turn.in_order(turn.group(By.RESERVES))
    free = turn.group(By.FREE)
    for job in jobs:
        for node, until in job.kept.items():
            if node in free and turn.at < until:
                allotted.owners.setdefault(node, job.name)
    for job in jobs:
        if not reserves(job):
            continue
        left = [spare for spare in _free_for(turn, job) if spare.node not in allotted.owners]
        best = sorted(left, key=partial(_by_readiness, turn))[: job.spec.spares]
        allotted.spares[job.name] = [spare.node for spare in best]
        allotted.owners.update((spare.node, job.name) for spare in best)
    return allotted


def _by_readiness(turn: Turn, spare: Spare) -> tuple[object, ...]:
    """The order in which spares are reserved. A node on which the job's own earlier workers still have to stop comes last: it
    may take long, or fail, and no other job could use the node meanwhile."""
    return (bool(turn.group(By.HELD, spare.node)), spare.repute, spare.node)


def _allowed(turn: Turn, job: Job, free: tuple[Spare, ...]) -> tuple[Spare, ...]:
    owners, out = _allotted(turn).owners, withheld(turn, job)
    if not owners:
        return free
    return tuple(
        evolve(spare, reserved=True) if owners.get(spare.node, job.name) != job.name else spare
        for spare in free
        if spare.node not in out
    )
