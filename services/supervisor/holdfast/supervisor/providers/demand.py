"""Decides when to request more nodes from a provider, and how many. Pure.

    jobs lack nodes for `after_s` ──► request ──still lacking──► repeated after `every_s`, then twice as long, … `EVERY_S_MAX`
           └── the breaker is open, or the pool has `nodes_max`: no request

Theory of operation. A request states how many nodes a pool should have, not how many to add. So it may be repeated, also by
another leader that does not know of the first: a group of machines whose target is eight has eight. For this reason none of
this is part of the supervisor's state. Fewer nodes are never requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.domain.words import plural
from holdfast.supervisor.core.repair.capacity import Lack
from holdfast.supervisor.providers.protocol import MoreNodes

EVERY_S_MAX = 21_600.0
JOBS_MAX = 5  # that the reason names


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandRules:
    """Settings HOLDFAST_MORE_*: docs/policies.md."""

    after_s: float = 300.0
    every_s: float = 900.0
    nodes_max: int = 0  # of a pool; 0 = no requests


@dataclass(slots=True)
class _Pool:
    since: float
    asked_at: float = 0.0
    asked_for: int = 0  # nodes
    tries: int = 0  # with this number


@dataclass(slots=True)
class Demand:
    rules: DemandRules
    pools: dict[str, _Pool] = field(default_factory=dict)

    def due(self, lacks: Sequence[Lack], *, breaker_open: bool, now: float) -> list[MoreNodes]:
        """The requests to send now. `lacks`: of all pools. `now`: seconds, of a clock that only grows."""
        self.pools = {lack.pool: self.pools.get(lack.pool) or _Pool(now) for lack in lacks}
        if breaker_open:
            return []
        return [wanted for lack in lacks if (wanted := self._due(lack, self.pools[lack.pool], now)) is not None]

    def _due(self, lack: Lack, pool: _Pool, now: float) -> MoreNodes | None:
        wanted = min(lack.there + lack.missing, self.rules.nodes_max)
        if wanted <= lack.there or now - pool.since < self.rules.after_s:
            return None
        if wanted != pool.asked_for:
            pool.tries = 0
        pause_s = min(self.rules.every_s * 2 ** max(0, pool.tries - 1), EVERY_S_MAX)
        if pool.asked_for and now - pool.asked_at < pause_s:
            return None
        pool.asked_at, pool.asked_for, pool.tries = now, wanted, pool.tries + 1
        return MoreNodes(lack.pool, wanted, wanted - lack.there, lack.jobs, _reason(lack, wanted))


def _reason(lack: Lack, wanted: int) -> str:
    named = ", ".join(lack.jobs[:JOBS_MAX]) + (" …" if len(lack.jobs) > JOBS_MAX else "")
    limited = f"; {plural(wanted, 'node')} are allowed" if wanted < lack.there + lack.missing else ""
    return f"{plural(lack.missing, 'node')} missing for {named}; {lack.there} there{limited}"
