"""Worlds in which a scheduler takes all machines at once: the job is suspended where it was saved, and goes on from there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import check_seed

from holdfast.domain.nodes import TERMINATION
from holdfast.sim.allocations import ALLOCATIONS_FROM
from holdfast.sim.scenario import simulate
from holdfast.sim.watched import Step
from holdfast.sim.world import Violation
from holdfast.supervisor.core import State, step
from holdfast.supervisor.core.model.lifecycle import Saving, Suspended
from holdfast.supervisor.protocol import Command, Event, FindingArrived

SEEDS = 4


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_job_is_suspended_where_it_was_saved_and_goes_on_from_there(seed: int) -> None:
    check_seed(ALLOCATIONS_FROM + seed)


def _never_saved(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Planted: the job is said to be suspended at a step that nobody has saved."""
    after, commands = step(state, event)
    for name, job in after.jobs.items():
        if isinstance(job.doing, Suspended) and job.doing.step and not isinstance(state.jobs[name].doing, Suspended):
            doing = replace(job.doing, step=job.doing.step + 1)
            after = replace(after, jobs={**after.jobs, name: replace(job, doing=doing)})
    return after, commands


def _deaf(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Planted: nobody hears that agents were asked to end."""
    notice = event.finding.notice if isinstance(event, FindingArrived) else None
    if isinstance(event, FindingArrived) and notice is not None and notice.source == TERMINATION:
        event = replace(event, finding=replace(event.finding, notice=replace(notice, event="")))
    return step(state, event)


def _impatient(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Planted: the workers end before the save that they were asked for."""
    after, commands = step(state, event)
    for name, job in after.jobs.items():
        if isinstance(job.doing, Saving) and job.doing.suspends and job.doing.at_step > 1:
            after = replace(after, jobs={**after.jobs, name: replace(job, doing=replace(job.doing, at_step=1))})
    return after, commands


def _forgetful(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Planted: what a node that has come back has on its disk is not believed."""
    before = {name: job for name, job in state.jobs.items() if isinstance(job.doing, Suspended)}
    after, commands = step(state, event)
    for name in before:
        job = after.jobs[name]
        if not isinstance(job.doing, Suspended) and job.generation is not None and job.generation.restore.step > 1:
            point = replace(job.generation.restore, step=1)
            generation = replace(job.generation, restore=point)
            after = replace(after, jobs={**after.jobs, name: replace(job, generation=generation)})
    return after, commands


@pytest.mark.parametrize(
    ("planted", "message", "first"),
    [
        (_never_saved, "which was not saved", 0),
        (_deaf, "all nodes of the job have ended, and it is", 0),
        (_impatient, "there was time to save, and steps", 9),
        (_forgetful, "the job was suspended at", 2),
    ],
)
def test_planted_bugs_are_found(planted: Step, message: str, first: int) -> None:
    """`first`: a seed near which it is found."""
    for seed in range(first, first + 40):
        try:
            simulate(ALLOCATIONS_FROM + seed, fold=planted)
        except Violation as violation:
            if message in violation.args[0]:
                return
    pytest.fail(f"no seed found: {message}")
