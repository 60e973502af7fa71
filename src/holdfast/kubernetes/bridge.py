"""The shell of the bridge: watches the cluster, and sends changes to the supervisor. The leader runs it for its term.

It never ends and raises nothing. If the cluster cannot be read, notices are missing, but the leader is not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import anyio
import structlog

from holdfast.domain.errors import MalformedMessage
from holdfast.kubernetes import machines
from holdfast.kubernetes.api import Access, Api, Resource
from holdfast.kubernetes.changes import Change, Known, changes, words
from holdfast.kubernetes.machines import NODE, POD, Cluster, ClusterEvent, Rules
from holdfast.kubernetes.watch import Watch

AGENTS = "app.kubernetes.io/name=holdfast,app.kubernetes.io/component=agent"
LOOK_S = 1.0  # interval at which the fleet is compared with the cluster if the cluster has not changed
CONFIRMED_S = 180.0  # notices are repeated while the API server has answered within this long
SAID_AGAIN_S = 5.0  # a change that does not show in the supervisor's state after this time is sent again
FAILED_PAUSE_S = 5.0

log = structlog.get_logger("holdfast.kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`namespaces`: namespaces with pods of agents that share machines; empty = no pods are watched. `selector`: labels of the
    machines to watch; empty = all."""

    access: Access
    rules: Rules = field(default_factory=Rules)
    namespaces: tuple[str, ...] = ()
    selector: str = ""


@dataclass(frozen=True, slots=True)
class Sight:
    """The state of the watch of one collection of objects."""

    what: str  # such as "pods of namespace ml"
    problem: str  # why the collection cannot be read now; empty = it can, or has not been requested yet
    problem_since: float | None  # Unix seconds; None = no problem
    confirmed_at: float | None  # Unix seconds, when the API server last answered; None = never


class Fleet(Protocol):
    """The supervisor's side, for one term."""

    def version(self) -> object:
        """Return an object that is another one whenever a node may have changed."""
        ...

    def known(self) -> Mapping[str, Known]:
        """Return the nodes of the fleet, by name."""
        ...

    def tell(self, change: Change) -> None:
        """Send a change of a node to the supervisor. Never waits."""
        ...


class Bridge:
    """Runs for the length of a term, with this term's view of the fleet."""

    def __init__(self, options: Options, wall: Callable[[], float]) -> None:
        """`wall`: Unix seconds."""
        self._options, self._wall = options, wall
        self._cluster = Cluster()
        self._watches: list[Watch] = []
        self._sent: dict[str, tuple[Change, float]] = {}  # node → the last change that was sent, and its time
        self._changed = anyio.Event()
        self._failed: tuple[float, str] | None = None  # start of a failure to run (loop's clock), and its reason

    def sights(self) -> list[Sight]:
        """Return the state of each watch; empty = none has been started yet."""
        at, wall = anyio.current_time(), self._wall()

        def unix(loop_time: float | None) -> float | None:
            return None if loop_time is None else wall - (at - loop_time)

        if self._failed is not None and not self._watches:
            failed_at, why = self._failed
            return [Sight("cluster", f"the bridge failed, and begins again: {why}", unix(failed_at), None)]
        return [
            Sight(each.what, each.problem, unix(each.problem_since), unix(each.confirmed_at)) for each in self._watches
        ]

    @property
    def problems(self) -> list[str]:
        """The problems of the watches; empty = the cluster can be read."""
        return [each.problem for each in self._watches if each.problem]

    async def run(self, fleet: Fleet) -> NoReturn:
        while True:
            try:
                await self._run(fleet)
            except Exception as error:  # a bug here, or a wrong setting, must not cost the leader its term
                log.error("the bridge to Kubernetes failed, and begins again", exc_info=error)
                since = self._failed[0] if self._failed is not None else anyio.current_time()
                self._failed = since, _cause(error)
            finally:
                self._watches = []  # a supervisor that no longer leads watches nothing
            await anyio.sleep(FAILED_PAUSE_S)

    async def _run(self, fleet: Fleet) -> None:
        options = self._options
        self._cluster, self._sent = Cluster(), {}
        resources = [Resource(NODE, "nodes", "", options.selector)]
        resources += [Resource(POD, "pods", namespace, AGENTS) for namespace in options.namespaces]
        async with Api(options.access) as api, anyio.create_task_group() as tasks:
            self._watches = [Watch(api, each, self._take) for each in resources]
            for watch in self._watches:
                tasks.start_soon(watch.run)
            self._failed = None
            await self._compare(fleet)

    def _take(self, event: ClusterEvent) -> None:
        try:
            cluster = machines.fold(self._cluster, event, self._options.rules)
        except MalformedMessage as error:
            log.warning("an object of the API server is left out", reason=str(error))
            return
        if cluster is not self._cluster:
            self._cluster = cluster
            self._changed.set()

    async def _compare(self, fleet: Fleet) -> NoReturn:
        seen: tuple[object, Cluster] | None = None
        looked_at = 0.0
        while True:
            now = (fleet.version(), self._cluster)
            # Also compared after some time without a change, because maintenance approaches and notices must be repeated.
            if seen is None or now[0] is not seen[0] or now[1] is not seen[1] or self._later(looked_at):
                seen, looked_at = now, anyio.current_time()
                known = fleet.known()
                self._sent = {name: each for name, each in self._sent.items() if name in known}
                for change in changes(self._cluster, known, self._wall(), confirmed=self._confirmed()):
                    self._send(fleet, change)
            with anyio.move_on_after(LOOK_S):
                await self._changed.wait()
            self._changed = anyio.Event()

    @staticmethod
    def _later(looked_at: float) -> bool:
        return anyio.current_time() - looked_at >= SAID_AGAIN_S

    def _confirmed(self) -> bool:
        machines_at = self._watches[0].confirmed_at
        return machines_at is not None and anyio.current_time() - machines_at < CONFIRMED_S

    def _send(self, fleet: Fleet, change: Change) -> None:
        at = anyio.current_time()
        sent, sent_at = self._sent.get(change.node, (None, 0.0))
        if sent == change and at - sent_at < SAID_AGAIN_S:
            return  # sent, but not in the supervisor's state yet
        self._sent[change.node] = (change, at)
        if sent != change:
            log.info("the cluster says", node=change.node, what=words(change))
        fleet.tell(change)


def _cause(error: BaseException) -> str:
    """Return the text of the first failure in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
