"""`/v1/jobs/{name}/ranks/{rank}/log`: what a rank prints, from the agent of its node."""

from __future__ import annotations

import codecs
from typing import Annotated

from fastapi import Query

from holdfast.domain.errors import InvalidSpec, NotFound
from holdfast.domain.generations import Generation
from holdfast.domain.words import plural
from holdfast.domain.worker_logs import PART_BYTES_MAX, LogPart, LogRequest
from holdfast.supervisor.api import incident_models
from holdfast.supervisor.api.access import guarded
from holdfast.supervisor.api.backend import Backend, Serving

router = guarded("/v1/jobs", tags=["jobs"])

NEWEST = -1
OFFSET_MAX = 2**63 - 1
_CONTINUES = range(0x80, 0xC0)  # bytes of UTF-8 that no character begins with


@router.get("/{name}/ranks/{rank}/log")
async def get_log(
    name: str,
    rank: int,
    backend: Serving,
    generation: Annotated[
        int, Query(ge=-1000, description="-1 = the newest, -2 = the one before; agents keep the newest five of a job")
    ] = NEWEST,
    offset: Annotated[
        int,
        Query(
            ge=-OFFSET_MAX,
            le=OFFSET_MAX,
            description="in bytes; negative: from the end, from the next line on. To follow a log ask again from `next_offset`",
        ),
    ] = -PART_BYTES_MAX // 4,
    limit: Annotated[int, Query(ge=16, le=PART_BYTES_MAX, description="Bytes.")] = PART_BYTES_MAX // 4,
) -> incident_models.RankLog:
    """A part of the log of one rank: standard output and error, in order, as text."""
    found = await _generation(backend, name, generation)
    try:
        node = found.node_of(rank)
    except LookupError:
        world = found.mesh.world_size
        raise NotFound(
            f"there is no rank {rank}: generation {found.number} of {name} has {plural(world, 'rank')}"
        ) from None
    part = await backend.agents.read_log(node, LogRequest(name, found.number, rank, offset, limit))
    at, text, next_offset = _text(part, from_end=offset < 0)
    return incident_models.RankLog(
        job=name,
        rank=rank,
        node=node,
        generation=found.number,
        offset=at,
        next_offset=next_offset,
        size=part.size,
        text=text,
    )


async def _generation(backend: Backend, name: str, wanted: int) -> Generation:
    """The generation of this number of the job's newest run; negative numbers count from the newest one. Raises `NotFound`."""
    job = (await backend.picture()).state.jobs.get(name)
    newest = job.generation if job is not None else None
    if newest is not None and wanted in (NEWEST, newest.number):
        return newest
    run = await backend.history.run(name)
    if run is None:
        raise NotFound(f"there is no job {name}; `holdfast jobs list` shows those there are")
    known = {change.generation.number: change.generation for change in run.generations}
    numbers = sorted(known)
    if not numbers:
        raise NotFound(f"{name} has not started yet: no rank has a log")
    if wanted in known:
        return known[wanted]
    if wanted < 0 and -wanted <= len(numbers):
        return known[numbers[wanted]]
    raise InvalidSpec("generation", wanted, f"one of {name}'s: {numbers[0]} to {numbers[-1]}, or -1 to -{len(numbers)}")


def _text(part: LogPart, *, from_end: bool) -> tuple[int, str, int]:
    """(offset of the text, the text, offset of what follows). Characters that a part cuts stay whole: one that has not ended
    belongs to the next part. The dropped part of a log with a limit reads as zeros, which are left out."""
    data, at = part.data, part.offset
    if from_end and at:
        cut = data.find(b"\n") + 1
        data, at = data[cut:], at + cut
        while not cut and data and data[0] in _CONTINUES:
            data, at = data[1:], at + 1
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    unfinished, _ = decoder.getstate()
    return at, text.replace("\0", ""), at + len(data) - len(unfinished)
