"""Which rank of a job failed first, and with what exception: from the agents of all its nodes, and from local files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast.cli.client import Client
from holdfast.domain.errors import HoldfastError
from holdfast.domain.signals import WorkerError
from holdfast.domain.words import plural

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception that a rank has recorded."""

    generation: int
    rank: int
    node: str
    error: WorkerError


@dataclass(frozen=True, slots=True)
class FirstError:
    """`raised`: the exceptions of one generation, the first failure first; empty = none is known. `reason`: how the first
    failure was determined. `silent`: which nodes were not reached."""

    raised: Sequence[Raised]
    reason: str = ""
    silent: str = ""


def of_agents(client: Client, job: str, generation: int) -> Json | None:
    """Return the exceptions that the agents report; None if the supervisor no longer knows the job, or is of a version that
    cannot ask agents. `generation` 0 = the newest generation in which a rank has recorded an exception."""
    try:
        return client.rank_errors(job, generation)
    except HoldfastError:
        return None


def first_error(answer: Json | None, here: Iterable[Raised]) -> FirstError:
    """Join the exceptions that agents have reported, `answer`, with those in files of this machine, `here`, which include
    exceptions on nodes whose agents are not connected. Only the newest generation counts."""
    remote = [] if answer is None else [_raised(answer, each) for each in answer["errors"]]
    known = {(each.generation, each.rank) for each in remote}
    every = [*remote, *(each for each in here if (each.generation, each.rank) not in known)]
    newest = max((each.generation for each in every), default=0)
    ours = [each for each in every if each.generation == newest]
    by_incident = answer is not None and answer["decided_by"] == "incident" and answer["generation"] == newest
    first = ours[:1] if by_incident else []
    rest = sorted(ours[len(first) :], key=lambda each: (each.error.at or float("inf"), each.rank))
    reason = f"incident {answer['incident']}" if answer is not None and by_incident else "time of the exceptions"
    return FirstError([*first, *rest], reason if ours else "", _silent(answer))


def _raised(answer: Json, each: Json) -> Raised:
    error = WorkerError(each["type"], each["message"], tuple(each["frames"]), each["at"] or 0.0)
    return Raised(answer["generation"], each["rank"], each["node"], error)


def _silent(answer: Json | None) -> str:
    """Describe how many agents did not answer; empty = all have answered."""
    if answer is None or answer["answered"] == answer["nodes"]:
        return ""
    nodes = plural(answer["nodes"], "node")
    if answer["asked"] < answer["nodes"]:
        return f"{answer['asked']} of {nodes} were asked, and {answer['answered']} have answered"
    return f"{answer['answered']} of {nodes} have answered: the agents of the others are not connected, or not in time"


def headline(found: FirstError) -> str:
    """Name the first failure, and how many followed."""
    first = found.raised[0]
    at = first.error.at
    when = f" at {datetime.fromtimestamp(at).strftime('%H:%M:%S.%f')[:-3]}" if at else ""
    others = len(found.raised) - 1
    more = f"; {plural(others, 'other rank')} raised as well" if others else ""
    return f"rank {first.rank} on {first.node} raised{when} in generation {first.generation}{more} (by {found.reason})"


def nothing(found: FirstError, job: str, generation: int) -> str:
    """Return the message that no exception was found, with the nodes that were not reached."""
    where = f"generation {generation} of {job}" if generation else job
    asked = f"; {found.silent}" if found.silent else ""
    return f"no rank of {where} has left an exception on a node that was reached{asked}"
