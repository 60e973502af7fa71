"""One kind of object, listed and then watched, for ever.

list ──► watch from the list's version ──► watch from the newest version …
  ▲          │ 410, or an event that is none            │ ended by the server after a minute
  └──────────┴── pause, longer each time, when the server refuses or does not answer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import anyio
import structlog

from holdfast.domain.errors import HoldfastError, MalformedMessage
from holdfast.kubernetes.api import Api, Expired, Refused, Resource
from holdfast.kubernetes.machines import ClusterEvent, Deleted, Listed, Object, Put
from holdfast.runtime.backoff import Backoff

PAUSE_S_MAX = 15.0  # rights are given, and API servers started, by people and without telling us
BRIEF_S = 1.0
SAY_AGAIN_S = 300.0  # that it does not work, while the reason stays the same

log = structlog.get_logger("holdfast.kubernetes")


class Watch:
    """`event` is called with each change. `confirmed_at`: when the server last answered, by the loop's clock."""

    def __init__(self, api: Api, resource: Resource, event: Callable[[ClusterEvent], None]) -> None:
        self._api, self._resource, self._event = api, resource, event
        self._version = ""  # empty: to be listed
        self._said, self._said_at = "", -SAY_AGAIN_S
        self.confirmed_at: float | None = None
        self.problem = ""  # why it does not work now; empty = it does
        self.problem_since: float | None = None  # by the loop's clock; None = no problem

    @property
    def what(self) -> str:
        """The collection, for people."""
        return str(self._resource)

    async def run(self) -> NoReturn:
        """Until cancelled. Raises nothing that an API server can cause."""
        backoff = Backoff(first_s=0.2, max_s=PAUSE_S_MAX)
        while True:
            try:
                await self._turn(backoff)
            except Expired as error:
                log.info("listing again", what=str(self._resource), reason=str(error))
                self._version = ""
            except MalformedMessage as error:
                self._version = ""  # what was missed is in the list
                self._complain(error)
            except HoldfastError as error:
                self._complain(error)
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
            await backoff.sleep()  # something ends every watch at once
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
        self.problem = self._said = ""
        self.problem_since = None

    def _complain(self, error: HoldfastError) -> None:
        self.problem = str(error)
        if self.problem_since is None:
            self.problem_since = anyio.current_time()
        if self.problem != self._said or anyio.current_time() - self._said_at >= SAY_AGAIN_S:
            advice = "give the service account the right to list and watch it" if isinstance(error, Refused) else ""
            log.warning(
                "the cluster is not seen: notices stay as they are",
                what=str(self._resource),
                reason=self.problem,
                **({"advice": advice} if advice else {}),
            )
            self._said, self._said_at = self.problem, anyio.current_time()
