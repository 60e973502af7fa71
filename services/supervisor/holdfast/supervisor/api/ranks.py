"""`/v1/jobs/{name}/ranks/measurements` and `/v1/jobs/{name}/errors`: what the agents of a job say about its ranks."""

from __future__ import annotations

import time
from typing import Annotated

from anyio import to_thread
from fastapi import Query

from holdfast.domain.errors import InvalidSpec, NotFound
from holdfast.supervisor.agents.ask_many import ask_each
from holdfast.supervisor.api import rank_views
from holdfast.supervisor.api.access import guarded
from holdfast.supervisor.api.backend import Serving
from holdfast.supervisor.api.rank_models import RankErrors, RankMeasurements

router = guarded("/v1/jobs", tags=["jobs"])

ERROR_NODES_MAX = 512  # asked for exceptions


@router.get("/{name}/ranks/measurements")
async def get_measurements(name: str, backend: Serving) -> RankMeasurements:
    """How long each rank's steps take, how long it waits for others, and how hot its GPU is, asked of the agents of the job's
    nodes. Whoever asks within four seconds gets the same answer. Nodes that do not answer are not known."""
    picture = await backend.picture()
    if name not in picture.state.jobs:
        raise NotFound(f"there is no job {name}; `holdfast jobs list` shows those there are")
    job = picture.state.jobs[name]
    generation = None if job.phase.finished else job.generation
    answers = (
        await backend.measuring.of(backend.agents, name, job.submitted_at, generation) if generation is not None else {}
    )
    return await to_thread.run_sync(rank_views.measurements, name, generation, answers, time.time())


@router.get("/{name}/errors")
async def get_errors(
    name: str,
    backend: Serving,
    generation: Annotated[
        int, Query(ge=0, description="0 = the newest generation in which a rank has left an exception")
    ] = 0,
) -> RankErrors:
    """The exceptions that ended ranks of a generation, asked of the agents, the first failure first. Which one that is, an
    incident says; without one, the time of the exceptions."""
    run = await backend.history.run(name)
    if run is None:
        raise NotFound(f"there is no job {name}; `holdfast jobs list` shows those there are")
    wanted = rank_views.errors_wanted(
        (each.generation for each in run.generations),
        [each for each in run.incidents if each.fault_at >= run.accepted.at],
        run.accepted.at,
        generation,
    )
    if generation and not wanted.generations:
        raise InvalidSpec("generation", generation, f"one that {name} has had since it was submitted last, or 0")
    asked, agents = wanted.nodes[:ERROR_NODES_MAX], backend.agents
    answers = await ask_each(asked, lambda node: agents.read_errors(node, name, generation))
    return rank_views.errors(name, wanted, len(asked), answers)
