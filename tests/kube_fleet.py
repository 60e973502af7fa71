"""The fleet as the bridge to Kubernetes sees it, with a record of what the bridge tells it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from waiting import wait_until_async

from holdfast.kubernetes.changes import Announce, Change, Forget, Known, SetZone, Withdraw

WAIT_S = 90.0


class KnownFleet:
    """Takes every change at once, and records it in `said`."""

    def __init__(self, *names: str) -> None:
        self.nodes: Mapping[str, Known] = {name: Known(name) for name in names}
        self.said: list[Change] = []

    def version(self) -> object:
        return self.nodes

    def known(self) -> Mapping[str, Known]:
        return self.nodes

    def tell(self, change: Change) -> None:
        self.said.append(change)
        nodes = dict(self.nodes)
        before = nodes[change.node]
        match change:
            case Announce(event=event, starts_at=starts_at):
                nodes[change.node] = replace(before, event=event, starts_at=starts_at, notified_at=time.time())
            case Withdraw():
                nodes[change.node] = replace(before, event="", starts_at=None)
            case SetZone(zone=zone):
                nodes[change.node] = replace(before, zone=zone)
            case Forget():
                del nodes[change.node]
        self.nodes = nodes

    def leaving(self) -> dict[str, str]:
        return {name: each.event for name, each in self.nodes.items() if each.event}

    async def until(self, leaving: Mapping[str, str]) -> None:
        await wait_until_async(
            lambda: self.leaving() == leaving, description=f"the notices {leaving}", timeout_s=WAIT_S
        )
