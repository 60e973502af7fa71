"""What the ranks of a job measure now, asked of their agents while somebody looks: durations of steps, temperatures of GPUs.

Nothing is asked while nobody looks. A round is asked at most every `FRESH_S`, whoever looks, and ten viewers share it. It asks
at most `NODES_MAX` nodes: on larger jobs consecutive rounds reach the other nodes, and an answer counts for `KEPT_S`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from holdfast.domain.generations import Generation
from holdfast.domain.rank_reads import MeasuredRanks
from holdfast.supervisor.agents.ask_many import ask_each, nodes_to_ask

FRESH_S = 4.0
KEPT_S = 120.0
NODES_MAX = 1024  # asked in one round
JOBS_MAX = 16  # whose answers are kept


class Asked(Protocol):
    async def read_ranks(self, node: str, job: str) -> MeasuredRanks: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """The answer of one node, `age_s` old."""

    age_s: float
    ranks: MeasuredRanks


@dataclass(slots=True)
class _Job:
    """The answers of one generation's nodes, and when each node was asked (seconds of a clock that is never set)."""

    generation: int
    begun_at_s: float = -math.inf
    asked_at_s: dict[str, float] = field(default_factory=dict)
    answers: dict[str, tuple[float, MeasuredRanks]] = field(default_factory=dict)
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class RankMeasuring:
    """`clock`: seconds of a clock that is never set."""

    def __init__(self, clock: Callable[[], float] = anyio.current_time) -> None:
        self._clock = clock
        self._jobs: OrderedDict[tuple[str, float], _Job] = OrderedDict()

    async def of(self, agents: Asked, job: str, submitted_at: float, generation: Generation) -> Mapping[str, Measured]:
        """Return the answers by node. A node that has not answered when it was asked last has none."""
        known = self._known((job, submitted_at), generation.number)
        async with known.lock:  # whoever comes meanwhile waits for this round, and finds its answers
            if self._clock() - known.begun_at_s >= FRESH_S:
                await self._ask(agents, job, generation, known)
        now_s = self._clock()
        return {node: Measured(now_s - read_at_s, ranks) for node, (read_at_s, ranks) in known.answers.items()}

    def _known(self, run: tuple[str, float], generation: int) -> _Job:
        known = self._jobs.get(run)
        if known is None or known.generation != generation:
            known = self._jobs[run] = _Job(generation)
        self._jobs.move_to_end(run)
        while len(self._jobs) > JOBS_MAX:
            self._jobs.popitem(last=False)
        return known

    async def _ask(self, agents: Asked, job: str, generation: Generation, known: _Job) -> None:
        begun_at_s = self._clock()
        chosen = nodes_to_ask(tuple(dict.fromkeys(generation.nodes)), known.asked_at_s, NODES_MAX)
        answers = await ask_each(chosen, lambda node: agents.read_ranks(node, job))
        known.begun_at_s, read_at_s = begun_at_s, self._clock()
        known.asked_at_s |= dict.fromkeys(chosen, begun_at_s)
        kept = {node: each for node, each in known.answers.items() if read_at_s - each[0] <= KEPT_S}
        for node in chosen:
            kept.pop(node, None)  # whatever it said before, a node that does not answer now is not known
        number = generation.number
        known.answers = kept | {
            node: (read_at_s, ranks) for node, ranks in answers.items() if ranks.generation == number
        }
