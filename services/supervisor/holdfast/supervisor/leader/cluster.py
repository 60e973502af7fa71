"""The view of the fleet for the bridge to Kubernetes, for one term."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_not
from typing import Protocol, assert_never

from holdfast.domain.numbers import Numbers
from holdfast.kubernetes.bridge import Fleet
from holdfast.kubernetes.changes import Announce, Change, Forget, Known, SetZone, Withdraw
from holdfast.supervisor.core import Node, State
from holdfast.supervisor.core.model.live import nodes_of
from holdfast.supervisor.protocol import MachineDeleted, MachineLabelled, NoticeRequested

SOURCE = "kubernetes"  # of the bridge's notices
ClusterEvent = NoticeRequested | MachineLabelled | MachineDeleted


class ClusterBridge(Protocol):
    """A watcher of a cluster: `holdfast.kubernetes.bridge.Bridge`. Never ends and never raises."""

    async def run(self, fleet: Fleet) -> object: ...


class FleetOfTerm:
    def __init__(
        self, state: Callable[[], State], say: Callable[[ClusterEvent], None], clock: Callable[[], float]
    ) -> None:
        """`say`: called with an event for the core. `clock`: Unix seconds, the leader's."""
        self._state, self._submit, self._clock = state, say, clock
        self._version: tuple[object, object] = (None, None)

    def version(self) -> object:
        state = self._state()
        now = (state.nodes, state.live)
        if any(map(is_not, now, self._version)):
            self._version = now
        return self._version

    def known(self) -> Mapping[str, Known]:
        state = self._state()
        unfinished = [
            live for job, live in state.live.items() if job in state.jobs and not state.jobs[job].phase.finished
        ]
        held = Numbers.union(map(nodes_of, unfinished))
        return {name: _known(node, held) for name, node in state.nodes.items()}

    def tell(self, change: Change) -> None:
        at = self._clock()
        match change:
            case Announce(node, event, starts_at):
                self._submit(NoticeRequested(at, node, SOURCE, event, starts_at))
            case Withdraw(node):
                self._submit(NoticeRequested(at, node, SOURCE, ""))
            case SetZone(node, zone):
                self._submit(MachineLabelled(at, node, zone))
            case Forget(node, reason):
                self._submit(MachineDeleted(at, node, reason))
            case _:
                assert_never(change)


def _known(node: Node, held: Numbers) -> Known:
    """`held`: nodes that may have workers of unfinished jobs."""
    notice = next((each for each in node.notices if each.source == SOURCE and each.event), None)
    return Known(
        node=node.name,
        event=notice.event if notice is not None else "",
        starts_at=notice.starts_at if notice is not None else None,
        notified_at=notice.at if notice is not None else 0.0,
        zone=node.machine_zone,
        away=node.lost and not node.connected and node.number not in held,
    )
