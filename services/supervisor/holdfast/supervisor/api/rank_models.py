"""What agents tell about the ranks of a job when they are asked, as the API tells it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.supervisor.api.models import Model


class RankMeasurements(Model):
    """Every rank of the newest generation; entry n is rank n, null = not known. Empty while no rank is placed."""

    at: float
    job: str
    generation: int
    nodes: Annotated[int, Field(description="number of nodes of the generation")]
    answered: Annotated[
        int, Field(description="number of them whose measurements are here; of the others nothing is known")
    ]
    oldest_s: Annotated[
        float,
        Field(description="age of the oldest measurement here: one round asks 1,024 nodes, the next round others"),
    ]
    step_s: Annotated[
        list[float | None],
        Field(description="median duration of the last 20 steps, or of the last blocks that were observed"),
    ]
    wait_s: Annotated[
        list[float | None],
        Field(
            description="of it, time in which the rank waited for others: the slowest rank is the one that waits least"
        ),
    ]
    temperature_c: Annotated[
        list[float | None], Field(description="of the GPU with the number of the rank's place on its node")
    ]


class RankError(Model):
    """The exception that ended a rank."""

    rank: int
    node: str
    at: Annotated[float | None, Field(description="Unix seconds by the node's clock; null: not known")]
    type: str
    message: str
    frames: Annotated[list[str], Field(description='"file:line function", innermost last')]


class RankErrors(Model):
    """Exceptions that ranks of one generation have left. `errors[0]` is the first failure."""

    job: str
    generation: Annotated[int, Field(description="0: no rank has left an exception on a node that answered")]
    nodes: Annotated[int, Field(description="number of nodes that ran the generations that were asked about")]
    asked: Annotated[int, Field(description="number of them that were asked; at most 512")]
    answered: int
    decided_by: Annotated[
        str,
        Field(
            description="incident: the supervisor has found which rank failed first; time: the earliest exception, by the "
            "nodes' own clocks; empty: there is none"
        ),
    ]
    incident: Annotated[str, Field(description="the incident that names the first rank; empty: none does")]
    errors: Annotated[list[RankError], Field(description="the first failure, then the others by time; at most 100")]
