"""Answers of agents about ranks → what the API tells. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.domain.generations import Generation
from holdfast.domain.incidents import Incident
from holdfast.domain.rank_reads import RaisedError
from holdfast.supervisor.agents.rank_measuring import Measured
from holdfast.supervisor.api.rank_models import RankError, RankErrors, RankMeasurements

ERRORS_SHOWN_MAX = 100
GENERATIONS_MAX = 5  # whose logs agents keep
# a node's clock may differ by this: an exception that is older belongs to an earlier run of the name
OTHER_CLOCK_S = 60.0

Column = list[float | None]


def measurements(
    job: str, generation: Generation | None, answers: Mapping[str, Measured], at: float
) -> RankMeasurements:
    """The answers in columns by rank. An agent's word about ranks that its node does not have counts for nothing."""
    size = generation.mesh.world_size if generation else 0
    step_s: Column = [None] * size
    wait_s: Column = [None] * size
    temperature_c: Column = [None] * size
    answered: dict[str, float] = {}
    for placement in generation.placements if generation else ():
        if (measured := answers.get(placement.node)) is None:
            continue
        answered[placement.node] = measured.age_s
        own, ranks = placement.ranks, measured.ranks
        for place, rank in enumerate(ranks.rank):
            if rank in own:
                step_s[rank] = _known(ranks.step_s[place], 6)
                wait_s[rank] = _known(ranks.wait_s[place], 6)
                temperature_c[rank] = _known(ranks.temperature_c[place], 1)
    return RankMeasurements(
        at=at,
        job=job,
        generation=generation.number if generation else 0,
        nodes=len(set(generation.nodes)) if generation else 0,
        answered=len(answered),
        oldest_s=round(max(answered.values(), default=0.0), 1),
        step_s=step_s,
        wait_s=wait_s,
        temperature_c=temperature_c,
    )


def _known(value: float, digits: int) -> float | None:
    return None if math.isnan(value) else round(value, digits)


# ---------------------------------------------------------------- exceptions


@dataclass(frozen=True, slots=True)
class ErrorsWanted:
    """Where exceptions of a job may be. `generations`: those whose logs agents may have, newest first. `nodes`: in the order in
    which they are asked."""

    generations: Sequence[Generation]
    nodes: Sequence[str]
    since: float  # Unix seconds, when the run was submitted
    incidents: Sequence[Incident]  # that name the first failing rank


def errors_wanted(
    generations: Iterable[Generation], incidents: Iterable[Incident], since: float, wanted: int
) -> ErrorsWanted:
    """`wanted`: number of a generation; 0 = the newest one in which a rank has left an exception. Nodes that an incident names
    come first."""
    known = {each.number: each for each in generations}
    newest = sorted(known, reverse=True)[:GENERATIONS_MAX]
    chosen = [known[number] for number in ([wanted] if wanted else newest) if number in known]
    numbers = {each.number for each in chosen}
    named = [each for each in incidents if each.rank is not None and each.node and each.generation in numbers]
    named.sort(key=lambda each: (-each.generation, each.fault_at))
    placed = [node for each in chosen for node in each.nodes]
    return ErrorsWanted(chosen, list(dict.fromkeys([*(each.node for each in named), *placed])), since, named)


def errors(job: str, wanted: ErrorsWanted, asked: int, answers: Mapping[str, Sequence[RaisedError]]) -> RankErrors:
    """`answers`: by node. Only exceptions of ranks that the node had in that generation count."""
    found = [
        (node, raised)
        for node, some in answers.items()
        for raised in some
        if _belongs(wanted, node, raised) and (not raised.error.at or raised.error.at >= wanted.since - OTHER_CLOCK_S)
    ]
    generation = max((raised.generation for _, raised in found), default=0)
    ours = [each for each in found if each[1].generation == generation]
    ours.sort(key=lambda each: (each[1].error.at or math.inf, each[1].rank))
    incident = next(
        (
            each
            for each in wanted.incidents
            if (each.generation, each.rank) in {(r.generation, r.rank) for _, r in ours}
        ),
        None,
    )
    if incident is not None:
        ours.sort(key=lambda each: each[1].rank != incident.rank)  # stable: the others stay in the order of time
    return RankErrors(
        job=job,
        generation=generation,
        nodes=len(wanted.nodes),
        asked=asked,
        answered=len(answers),
        decided_by="incident" if incident else "time" if ours else "",
        incident=incident.id if incident else "",
        errors=[
            RankError(
                rank=raised.rank,
                node=node,
                at=raised.error.at or None,
                type=raised.error.type,
                message=raised.error.message,
                frames=list(raised.error.frames),
            )
            for node, raised in ours[:ERRORS_SHOWN_MAX]
        ],
    )


def _belongs(wanted: ErrorsWanted, node: str, raised: RaisedError) -> bool:
    return any(
        each.number == raised.generation
        and (place := each.placement_of(node)) is not None
        and raised.rank in place.ranks
        for each in wanted.generations
    )
