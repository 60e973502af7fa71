"""Lists one kind of object and then watches it, until cancelled.

list ──► watch from the list's version ──► watch from the newest version …
  ▲          │ 410, or an invalid event                 │ ended by the server after a minute
  └──────────┴── pause, longer each time, if the server refuses or does not answer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import anyio
import structlog

from holdfast.domain.errors import HoldfastError, MalformedMessage
from holdfast.kubernetes.api import Api, Expired, Refused, Resource
from holdfast.kubernetes.machines import ClusterEvent, Deleted, Listed, Object, Put
from holdfast.runtime.rpc.backoff import Backoff

PAUSE_S_MAX = 15.0  # short, because changes of rights and starts of API servers are not announced
BRIEF_S = 1.0
SAY_AGAIN_S = 300.0  # interval at which a problem with an unchanged reason is logged again

log = structlog.get_logger("holdfast.kubernetes")


class Watch:
    """`event` is called with each change. `confirmed_at`: time of the server's last answer, by the loop's clock."""

    def __init__(self, api: Api, resource: Resource, event: Callable[[ClusterEvent], None]) -> None:
        self._api, self._resource, self._event = api, resource, event
        self._version = ""  # empty: the objects must be listed
        self._logged, self._logged_at = "", -SAY_AGAIN_S
        self.confirmed_at: float | None = None
        self.problem = ""  # why the watch fails now; empty = it works
        self.problem_since: float | None = None  # by the loop's clock; None = no problem

    @property
    def what(self) -> str:
        """The name of the collection, for people."""
        return str(self._resource)

    async def run(self) -> NoReturn:
        """Watch until cancelled. Raises no error that an API server can cause."""
        backoff = Backoff(first_s=0.2, max_s=PAUSE_S_MAX)
        while True:
            try:
                await self._turn(backoff)
            except Expired as error:
                log.info("listing again", what=str(self._resource), reason=str(error))
                self._version = ""
            except MalformedMessage as error:
                self._version = ""  # the list contains missed changes
                self._log_problem(error)
            except HoldfastError as error:
                self._log_problem(error)
            else:
                continue
            await backoff.sleep()

    async def _turn(self, backoff: Backoff) -> None:
        if not self._version:
            objects, version = await self._api.list(self._resource)
            self._event(Listed(self._resource.kind, tuple(objects), self._resource.namespace))
            self._works(f"{len(objects)} listed")
            self._version = version
        began_at = anyio.current_time()
        async with self._api.watch(self._resource, self._version) as events:
            self._works("watching")
            async for kind, found in events:
                self._take(kind, found)
        self._works("watching")
        if anyio.current_time() - began_at < BRIEF_S:
            await backoff.sleep()  # the watch was ended immediately
        else:
            backoff.reset()

    def _take(self, kind: str, found: Object) -> None:
        self.confirmed_at = anyio.current_time()
        match kind:
            case "ADDED" | "MODIFIED":
                self._event(Put({**found, "kind": self._resource.kind}))
            case "DELETED":
                self._event(Deleted({**found, "kind": self._resource.kind}))
            case _:
                pass  # BOOKMARK: only its version counts
        about = found.get("metadata")
        if isinstance(about, dict) and isinstance(version := about.get("resourceVersion"), str):
            self._version = version

    def _works(self, how: str) -> None:
        self.confirmed_at = anyio.current_time()
        if self.problem:
            log.info("the API server answers again", what=str(self._resource), now=how)
        self.problem = self._logged = ""
        self.problem_since = None

    def _log_problem(self, error: HoldfastError) -> None:
        self.problem = str(error)
        if self.problem_since is None:
            self.problem_since = anyio.current_time()
        if self.problem != self._logged or anyio.current_time() - self._logged_at >= SAY_AGAIN_S:
            advice = "give the service account the right to list and watch it" if isinstance(error, Refused) else ""
            log.warning(
                "the cluster is not seen: notices stay as they are",
                what=str(self._resource),
                reason=self.problem,
                **({"advice": advice} if advice else {}),
            )
            self._logged, self._logged_at = self.problem, anyio.current_time()
