"""The shell of the bridge: watches, and tells the supervisor what has changed. The leader runs it for its term.

It never ends and raises nothing: a cluster that is not seen costs notices, not the leader.
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
LOOK_S = 1.0  # how often the fleet is compared with the cluster when nothing is heard of the latter
CONFIRMED_S = 180.0  # notices are repeated while the API server has answered within this long
SAID_AGAIN_S = 5.0  # what the supervisor was told may take this long to show in its state
FAILED_PAUSE_S = 5.0

log = structlog.get_logger("holdfast.kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`namespaces`: where the pods of agents are that share machines; empty = none is looked at. `selector`: labels of the
    machines to watch; empty = all."""

    access: Access
    rules: Rules = field(default_factory=Rules)
    namespaces: tuple[str, ...] = ()
    selector: str = ""


@dataclass(frozen=True, slots=True)
class Sight:
    """How well the bridge sees one collection of objects."""

    what: str  # such as "pods of namespace ml"
    problem: str  # why it is not seen now; empty = it is, or has not been asked for yet
    problem_since: float | None  # Unix seconds; None = no problem
    confirmed_at: float | None  # Unix seconds, when the API server last answered; None = never


class Fleet(Protocol):
    """The supervisor's side, for one term."""

    def version(self) -> object:
        """Another object whenever some node may be another than before."""
        ...

    def known(self) -> Mapping[str, Known]:
        """The nodes of the fleet, by name."""
        ...

    def tell(self, change: Change) -> None:
        """What is to become of one of them. Never waits."""
        ...


class Bridge:
    """`run` for the length of a term, with this term's view of the fleet."""

    def __init__(self, options: Options, wall: Callable[[], float]) -> None:
        """`wall`: Unix seconds."""
        self._options, self._wall = options, wall
        self._cluster = Cluster()
        self._watches: list[Watch] = []
        self._said: dict[str, tuple[Change, float]] = {}  # by node: what it was told last, and when
        self._news = anyio.Event()
        self._failed: tuple[float, str] | None = None  # since when it cannot begin, by the loop's clock, and why

    def sights(self) -> list[Sight]:
        """Return how well each collection is seen; empty = nothing has been watched yet."""
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
        """What keeps the cluster from being seen, by collection; empty = nothing does."""
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
                self._watches = []  # a supervisor that no longer leads sees nothing
            await anyio.sleep(FAILED_PAUSE_S)

    async def _run(self, fleet: Fleet) -> None:
        options = self._options
        self._cluster, self._said = Cluster(), {}
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
            self._news.set()

    async def _compare(self, fleet: Fleet) -> NoReturn:
        seen: tuple[object, Cluster] | None = None
        looked_at = 0.0
        while True:
            now = (fleet.version(), self._cluster)
            # Time alone makes a change, too: maintenance comes near, a notice is to be repeated.
            if seen is None or now[0] is not seen[0] or now[1] is not seen[1] or self._later(looked_at):
                seen, looked_at = now, anyio.current_time()
                known = fleet.known()
                self._said = {name: each for name, each in self._said.items() if name in known}
                for change in changes(self._cluster, known, self._wall(), confirmed=self._confirmed()):
                    self._tell(fleet, change)
            with anyio.move_on_after(LOOK_S):
                await self._news.wait()
            self._news = anyio.Event()

    @staticmethod
    def _later(looked_at: float) -> bool:
        return anyio.current_time() - looked_at >= SAID_AGAIN_S

    def _confirmed(self) -> bool:
        machines_at = self._watches[0].confirmed_at
        return machines_at is not None and anyio.current_time() - machines_at < CONFIRMED_S

    def _tell(self, fleet: Fleet, change: Change) -> None:
        at = anyio.current_time()
        said, said_at = self._said.get(change.node, (None, 0.0))
        if said == change and at - said_at < SAID_AGAIN_S:
            return  # it is on its way
        self._said[change.node] = (change, at)
        if said != change:
            log.info("the cluster says", node=change.node, what=words(change))
        fleet.tell(change)


def _cause(error: BaseException) -> str:
    """Return the first failure of a group in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
