"""Computes the goodput ledger of a run from its history. Pure, except for the thread that it may run in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import anyio.to_thread

from holdfast.domain.nodes import NodeState
from holdfast.supervisor.history.goodput import account
from holdfast.supervisor.history.protocol import Run
from holdfast.supervisor.history.time_classes import History, Ledger
from holdfast.supervisor.protocol import GenerationChanged, GenerationStage, JobChanged, JobPhase, NodeChanged

# The job should run, but lacks nodes.
_WAITING = (JobPhase.WAITING, JobPhase.PENDING, JobPhase.SUSPENDED)


async def account_in_thread(run: Run, *, now: float) -> Ledger:
    """Compute the ledger in a thread: for a million steps it takes seconds."""
    return await anyio.to_thread.run_sync(lambda: account(to_history(run, now)))


def to_history(run: Run, now: float) -> History:
    """The ledger's input. `now` is used as the end of an unfinished run."""
    ended_at = next((change.at for change in run.changes if JobPhase(change.phase).finished), now)
    spec = run.accepted.spec
    return History(
        started_at=run.accepted.at,
        ended_at=ended_at,
        full_world_size=spec.mesh.world_size,
        full_nodes=spec.nodes,
        steps=run.steps,
        booked=run.booked,
        incidents=run.incidents,
        waits=tuple(_waits(run.changes, ended_at)),
        world_sizes=tuple(_world_sizes(run.generations)),
        paid_nodes=tuple(_paid_nodes(run.nodes, run.accepted.job, run.accepted.at, ended_at)),
        unmeasured=tuple(_unmeasured(run, ended_at)),
    )


def _waits(changes: Sequence[JobChanged], ended_at: float) -> Iterator[tuple[float, float]]:
    """Waits of the job. A phase of zero length is none: the core passes through PENDING on its way to PREPARING."""
    begun: float | None = None
    for change in changes:
        waiting = JobPhase(change.phase) in _WAITING
        if waiting and begun is None:
            begun = change.at
        elif not waiting and begun is not None:
            if change.at > begun:
                yield begun, change.at
            begun = None
    if begun is not None and ended_at > begun:
        yield begun, ended_at


def _world_sizes(generations: Iterable[GenerationChanged]) -> Iterator[tuple[float, int]]:
    """Ranks of the running generation, from its start until the next one is planned; 0 in between."""
    running = 0
    for change in generations:
        if change.stage is GenerationStage.STARTED:
            running = change.generation.number
            yield change.at, change.generation.mesh.world_size
        elif running and (
            change.stage is GenerationStage.PLANNED
            or (change.stage is GenerationStage.ENDED and change.generation.number == running)
        ):
            running = 0
            yield change.at, 0


def _unmeasured(run: Run, ended_at: float) -> Iterator[tuple[float, float]]:
    """Times when all ranks of a script that reports no steps ran, each until the next change.

    Excludes generations that reported their first step late."""
    measured = {record.generation for record in run.steps}
    measured |= {segment.generation for segment in run.booked.segments} if run.booked is not None else set()
    since, number = None, 0
    for change in run.generations:
        if change.stage is GenerationStage.STEPPING:
            number = change.generation.number
            since = None if change.reports_steps or number in measured else change.at
        elif since is not None and (
            change.stage is GenerationStage.PLANNED
            or (change.stage is GenerationStage.ENDED and change.generation.number == number)
        ):
            yield since, change.at
            since = None
    if since is not None and ended_at > since:
        yield since, ended_at


def _paid_nodes(nodes: Iterable[NodeChanged], job: str, begin: float, end: float) -> Iterator[tuple[float, int]]:
    """Number of nodes that count as allocated to this job, from submission on: its own, and the fleet's spares."""
    paid: set[str] = set()
    begun = False
    for change in nodes:
        if change.at > end:
            break
        if change.at > begin and not begun:
            yield begin, len(paid)
            begun = True
        if change.state is NodeState.SPARE or (change.state is NodeState.ACTIVE and change.job == job):
            paid.add(change.node)
        else:
            paid.discard(change.node)
        if begun:
            yield change.at, len(paid)
    if not begun:
        yield begin, len(paid)
