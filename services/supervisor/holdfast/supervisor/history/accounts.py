"""What lists show of each job's past: the goodput of the last day and a trend of its rate.

Theory. A ledger of a hundred thousand steps takes up to a second of a thread, and a page with a hundred jobs asks for a hundred
of them every few seconds. So each account is kept, and computed again at the earliest `REST` times as long afterwards as it
took, whoever asks, and however often. After `BUDGET_S` an answer begins no further one: what is not computed yet is missing,
and the next request goes on with it. The account of a job that is over does not change any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread

from holdfast.supervisor.history.goodput import recent
from holdfast.supervisor.history.ledger import to_history
from holdfast.supervisor.history.protocol import History, Series
from holdfast.supervisor.history.time_classes import Recent

WINDOW_S = 86_400.0  # of the goodput
TREND_S = 3600.0
TREND_POINTS = 48
REST = 20
AGE_MIN_S = 15.0
BUDGET_S = 0.5
JOBS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Account:
    """`goodput` covers the last `WINDOW_S`, `trend` the last `TREND_S`, until `at` or the end of the job (Unix seconds)."""

    at: float
    goodput: Recent
    trend: Series


@dataclass(frozen=True, slots=True)
class Wanted:
    """One run of a job."""

    job: str
    submitted_at: float
    finished: bool


class Accounts:
    def __init__(self, history: History, clock: Callable[[], float]) -> None:
        """`clock`: Unix seconds."""
        self._history = history
        self._clock = clock
        self._known: dict[Wanted, Account] = {}
        self._due: dict[Wanted, float] = {}
        self._computing = anyio.Lock()

    async def of(self, wanted: Sequence[Wanted]) -> Mapping[Wanted, Account]:
        """Those that are known by then. Jobs beyond `JOBS_MAX` have none."""
        wanted = wanted[:JOBS_MAX]
        if not self._computing.locked():
            async with self._computing:
                await self._compute(wanted)
        return {each: self._known[each] for each in wanted if each in self._known}

    async def _compute(self, wanted: Sequence[Wanted]) -> None:
        for gone in self._due.keys() - set(wanted):
            del self._due[gone]
            self._known.pop(gone, None)
        began = anyio.current_time()
        due = [each for each in wanted if self._due.get(each, -math.inf) <= began]
        for number, each in enumerate(sorted(due, key=lambda one: self._due.get(one, -math.inf))):
            before = anyio.current_time()
            if number and before - began >= BUDGET_S:
                return
            account = await self._account(each)
            if account is not None:
                self._known[each] = account
            duration_s = anyio.current_time() - before
            over = each.finished and account is not None
            self._due[each] = math.inf if over else before + max(AGE_MIN_S, REST * duration_s)

    async def _account(self, wanted: Wanted) -> Account | None:
        """None while the history has not heard of the run."""
        run = await self._history.run(wanted.job)
        if run is None:
            return None
        now = self._clock()
        goodput = await anyio.to_thread.run_sync(lambda: recent(to_history(run, now), now - WINDOW_S))
        until = goodput.until
        since = max(run.accepted.at, until - TREND_S)
        trend = await self._history.series(wanted.job, since=since, until=until, points_max=TREND_POINTS)
        return Account(now, goodput, trend)
