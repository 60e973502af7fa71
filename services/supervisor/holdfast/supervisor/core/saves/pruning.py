"""Deletes saved steps from the nodes on request. Steps that an unfinished job may restore are refused."""

from __future__ import annotations

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, NotFound
from holdfast.domain.orders import Prune
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.saves.earlier import Tables
from holdfast.supervisor.protocol import PruneRequested


def check(state: Tables, event: PruneRequested) -> None:
    """Raises `NotFound` for a step that no node holds, `Conflict` for one that is needed."""
    held = {record.key.checkpoint for node in state.nodes.values() for record in node.inventory.get(event.job, ())}
    job = state.jobs.get(event.job)
    for age in event.steps:
        if age not in held:
            raise NotFound(f"no node has step {age.step} (attempt {age.attempt}) of {event.job}")
        if job is not None and is_needed(job, age):
            raise Conflict(
                f"{event.job} is {job.phase}, and may go back to step {age.step} (attempt {age.attempt}): what it needs no "
                "more it deletes itself; stop it to delete the rest"
            )


def is_needed(job: Job, age: CheckpointId) -> bool:
    """Whether an unfinished job may restore this saved step."""
    if job.phase.finished:
        return False
    resumed = job.checkpoints.resumed
    return age.attempt >= job.numbering.first_attempt or (
        resumed is not None and age == (resumed.attempt, resumed.step)
    )


def request(turn: Turn, event: PruneRequested) -> None:
    """Order every node that holds any of these steps to delete them. A disconnected node gets the order when it reconnects."""
    steps = set(event.steps)
    for name in turn.found(By.KEEPS, event.job):
        held = {record.key.checkpoint for record in turn.nodes[name].inventory[event.job]}
        if going := sorted(held & steps):
            turn.send(name, Prune(event.job, tuple(going)))
    turn.note(event.job, f"{len(steps)} saved steps are deleted: an operator asked for it")
