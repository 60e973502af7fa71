"""What would otherwise be sought among all nodes, jobs, incidents and orders, found by a key.

An index is a function of the state: `Index.of` makes it anew, and a turn keeps it up with everything that it writes. It holds
nothing that the state does not say, so it is in no snapshot, and two states are equal whatever their indexes are. With it an
event costs what it concerns, and not what the fleet is large: at 12,500 nodes a storm of faults is decided in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.domain.incidents import Incident, IncidentState
from holdfast.supervisor.protocol import JobPhase, Send

if TYPE_CHECKING:  # the state carries its index
    from holdfast.supervisor.core.state import Job, Node, State


class By(IntEnum):
    """What is found, by which key; "" where there is only one such group."""

    CLAIM = 0  # node → unfinished jobs whose newest generation includes it
    CONCERN = 1  # node → jobs that wait for it to stop workers; their members answer them by CLAIM
    CONNECTED = 2  # nodes with a session
    FREE = 3  # nodes with a session, in service, claimed by no job
    AVAILABLE = 4  # nodes with a session, in service
    CONDEMNED = 5  # nodes with a session, out of service
    QUARANTINED = 6  # nodes
    GONE = 7  # nodes that are lost
    SILENT = 8  # nodes with a session and a replicator that have not said what they hold
    HOLDS = 9  # job → nodes that may have workers of it
    KEEPS = 10  # job → nodes that have shards of it
    HUNGRY = 11  # unfinished jobs that might do better with other nodes, or cannot run now
    OPEN = 12  # job → its open incidents
    UNDECIDED = 13  # open incidents without a decision
    FINDING = 14  # finding → open incidents that have it
    STRUCK = 15  # node → open incidents that began there
    ORDER_FOR = 16  # node → its unanswered orders
    ORDER_ABOUT = 17  # job → unanswered orders about it
    FINISHED = 18  # jobs
    DEFERRED = 19  # unfinished jobs that wait for news of what was saved
    AWAY = 20  # nodes without a session that nobody has declared lost
    ANNOUNCED = 21  # nodes whose maintenance is announced
    SUSPECTED = 22  # nodes of which one witness says that they are lost
    UNHEARD = 23  # nodes that had a session with an earlier leader, and have none with this one yet


V = TypeVar("V")
Entry = tuple[By, str, str]  # (what, key, member)
Group = Mapping[str, None]  # a set that remembers the order of arrival; copied at the speed of a dictionary
_EMPTY: Group = {}
# What was made of a node, by its name: (what it depended on, the result). Whoever reads it compares the former, so that all
# states that follow each other can share it; it is no part of what an index says.
Memo = dict[str, tuple[tuple[object, ...], Any]]


Owned = dict[int, dict[Any, Any]]  # tables that nobody else has seen yet, by identity


def own_copy(table: Mapping[str, V], owned: Owned) -> dict[str, V]:
    """`table` itself where it is our own already, else a copy that is."""
    mine: dict[str, V] | None = owned.get(id(table))
    if mine is None:
        mine = dict(table)
        owned[id(mine)] = mine
    return mine


class Index:
    """Read by `get`; a `Draft` makes the next one."""

    __slots__ = ("groups", "memo")

    def __init__(self, groups: tuple[Mapping[str, Group], ...], memo: Memo | None = None) -> None:
        self.groups = groups
        self.memo: Memo = {} if memo is None else memo

    @classmethod
    def of(cls, state: State) -> Index:
        draft = Draft(cls(tuple({} for _ in By)))
        for node in state.nodes.values():
            draft.node(None, node)
        for job in state.jobs.values():
            draft.job(None, job)
        for incident in state.incidents.values():
            draft.incident(None, incident)
        for send in state.outbox.values():
            draft.order(None, send)
        return draft.finish()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.groups == other.groups

    __hash__ = None  # type: ignore[assignment]


class Draft:
    """An index in the making: groups are copied when they are first written to."""

    __slots__ = ("_base", "_groups", "_own", "_owned", "all_told", "pool_changed", "uses_changed", "version")

    def __init__(self, base: Index, owned: Owned | None = None) -> None:
        self._base = base
        self._owned = {} if owned is None else owned
        self._groups: dict[By, dict[str, Group]] = {}
        self._own: dict[tuple[By, str], dict[str, None]] = {}
        self.pool_changed = False  # which nodes are free, or what they can be used for
        self.uses_changed = 0  # how often what some node can be used for may have changed
        self.all_told = False  # the last node that had not said what it holds has said so, or has gone
        self.version = 0  # grows with every change of nodes or jobs that matters here

    def get(self, what: By, key: str = "") -> Group:
        table = self._groups.get(what)
        return (self._base.groups[what] if table is None else table).get(key, _EMPTY)

    @property
    def memo(self) -> Memo:
        return self._base.memo

    def finish(self) -> Index:
        if not self._groups:
            return self._base
        groups = list(self._base.groups)
        for what, table in self._groups.items():
            groups[what] = table
        return Index(tuple(groups), self._base.memo)

    # ------------------------------------------------------------ what is written

    def node(self, old: Node | None, new: Node | None) -> None:
        if old is not None and new is not None and not _node_differs(old, new):
            return
        name = new.name if new is not None else old.name if old is not None else ""
        if new is None:
            self.memo.pop(name, None)
        free, silent = name in self.get(By.FREE), name in self.get(By.SILENT)
        self._move(_of_node(old), _of_node(new))
        self._set_free(name)
        # Others than the jobs that have a claim on it can use a node only while it is free, or released for them.
        if free or name in self.get(By.FREE) or name in self.get(By.QUARANTINED):
            self._change_pool()
        elif old is None or new is None or _use_differs(old, new):
            self.uses_changed += 1
        if silent and not self.get(By.SILENT):
            self.all_told = True
        self.version += 1

    def job(self, old: Job | None, new: Job | None) -> None:
        if old is not None and new is not None and not _job_differs(old, new):
            return
        self.version += 1
        self._move(_of_job(old), _of_job(new))
        name = new.name if new is not None else old.name if old is not None else ""
        before, after = nodes_in_use(old), nodes_in_use(new)
        if before is not after:
            was, now = set(before), set(after)
            self._move({(By.CLAIM, node, name) for node in was - now}, {(By.CLAIM, node, name) for node in now - was})
            for node in was ^ now:
                self._set_free(node)

    def incident(self, old: Incident | None, new: Incident | None) -> None:
        self._move(_of_incident(old), _of_incident(new))

    def order(self, old: Send | None, new: Send | None) -> None:
        for send in (old, new):
            for what, key in () if send is None else ((By.ORDER_FOR, send.node), (By.ORDER_ABOUT, send.order.job)):
                assert send is not None
                if send is new:
                    self._group(what, key)[send.command_id] = None
                else:
                    self._remove(what, key, send.command_id)

    # ------------------------------------------------------------ inside

    def _move(self, before: set[Entry], after: set[Entry]) -> None:
        for what, key, member in before - after:
            self._remove(what, key, member)
        for what, key, member in sorted(after - before):
            self._group(what, key)[member] = None

    def _remove(self, what: By, key: str, member: str) -> None:
        group = self._group(what, key)
        group.pop(member, None)
        if not group:
            del self._groups[what][key], self._own[what, key]

    def _set_free(self, node: str) -> None:
        free = node in self.get(By.AVAILABLE) and not self.get(By.CLAIM, node)
        was = node in self.get(By.FREE)
        if free is not was:
            self._change_pool()
            entry = {(By.FREE, "", node)}
            self._move(set() if free else entry, entry if free else set())

    def _change_pool(self) -> None:
        self.pool_changed = True
        self.uses_changed += 1

    def _group(self, what: By, key: str) -> dict[str, None]:
        if (own := self._own.get((what, key))) is not None:
            return own
        if what not in self._groups:
            self._groups[what] = own_copy(self._base.groups[what], self._owned)
        own = self._own[what, key] = own_copy(self._groups[what].get(key, _EMPTY), self._owned)
        self._groups[what][key] = own
        return own


# ---------------------------------------------------------------- where a value is found


def _node_differs(old: Node, new: Node) -> bool:
    """Most reports of a node change nothing that it is found by."""
    return (
        old.connected is not new.connected
        or old.unheard is not new.unheard
        or old.lost is not new.lost
        or old.condemned != new.condemned
        or old.quarantined is not new.quarantined
        or old.inventoried is not new.inventoried
        or old.facts is not new.facts
        or old.preflight is not new.preflight
        or old.notices is not new.notices
        or old.holds is not new.holds
        or old.faults is not new.faults
        or (old.suspicion is None) is not (new.suspicion is None)
        or old.inventory.keys() != new.inventory.keys()
    )


def _use_differs(old: Node, new: Node) -> bool:
    """Whether a job that has a claim on the node may use it otherwise: that it has stopped its workers changes nothing."""
    return (
        old.connected is not new.connected
        or old.usable is not new.usable
        or old.facts is not new.facts
        or old.preflight is not new.preflight
        or old.notices is not new.notices
        or (bool(new.unfit) and old.holds is not new.holds)
    )


def _of_node(node: Node | None) -> set[Entry]:
    if node is None:
        return set()
    name = node.name
    entries: set[Entry] = {(By.HOLDS, job, name) for job in node.holds} | {
        (By.KEEPS, job, name) for job in node.inventory
    }
    if node.connected:
        entries.add((By.CONNECTED, "", name))
        entries.add((By.AVAILABLE if node.usable else By.CONDEMNED, "", name))
        if not node.inventoried and node.facts.replicator_endpoint:
            entries.add((By.SILENT, "", name))
        if node.unheard:
            entries.add((By.UNHEARD, "", name))
    elif not node.lost:
        entries.add((By.AWAY, "", name))
    if node.quarantined:
        entries.add((By.QUARANTINED, "", name))
    if node.lost:
        entries.add((By.GONE, "", name))
    if node.notices and node.notice is not None:
        entries.add((By.ANNOUNCED, "", name))
    if node.suspicion is not None:
        entries.add((By.SUSPECTED, "", name))
    return entries


def _job_differs(old: Job, new: Job) -> bool:
    return (
        old.phase is not new.phase
        or old.generation is not new.generation
        or _stops(old) is not _stops(new)
        or old.stopping is not new.stopping
        or old.target_dp != new.target_dp
        or old.stays is not new.stays
        or old.blocked is not new.blocked
    )


def _of_job(job: Job | None) -> set[Entry]:
    if job is None:
        return set()
    name = job.name
    if job.phase.finished:
        return {(By.FINISHED, "", name)}
    entries: set[Entry] = set()
    if job.change is not None:
        entries |= {(By.CONCERN, node, name) for node in job.change.waiting.values()}
    elif (
        job.phase is not JobPhase.RUNNING
        or job.generation is None
        or job.generation.mesh.dp != job.target_dp
        or job.stays
    ):
        entries.add((By.HUNGRY, "", name))
    if job.blocked is not None and job.blocked.until:
        entries.add((By.DEFERRED, "", name))
    if job.stopping is not None:
        entries |= {(By.CONCERN, node, name) for node in job.stopping.waiting.values()}
    return entries


def _stops(job: Job) -> Mapping[str, str] | None:
    """Of a change what matters here: whether there is one, and for whom it waits to stop."""
    return None if job.change is None else job.change.waiting


def nodes_in_use(job: Job | None) -> tuple[str, ...]:
    """Nodes that a job has a claim on, running or about to."""
    if job is None or job.generation is None or job.phase.finished or job.phase is JobPhase.PENDING:
        return ()
    return job.generation.nodes


def _of_incident(incident: Incident | None) -> set[Entry]:
    if incident is None:
        return set()
    entries: set[Entry] = {(By.FINDING, finding, incident.id) for finding in incident.findings}
    entries.add((By.OPEN, incident.job, incident.id))
    entries.add((By.STRUCK, incident.node, incident.id))
    if incident.state is IncidentState.OPEN:
        entries.add((By.UNDECIDED, "", incident.id))
    return entries
