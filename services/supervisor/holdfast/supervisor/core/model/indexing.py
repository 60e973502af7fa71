"""Maintains the index: the groups that each value of the state belongs to, while a turn writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import is_not, ne
from typing import Any

from holdfast.domain.incidents import Incident, IncidentState, RungEnd
from holdfast.supervisor.core.model.index import EMPTY, By, Group, Index, Memo
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import (
    Deferred,
    Pending,
    Preparing,
    Resetting,
    Running,
    Starting,
    Stopping,
    Suspended,
    Waiting,
)
from holdfast.supervisor.core.model.live import nodes_of
from holdfast.supervisor.core.model.state import Node, State
from holdfast.supervisor.protocol import JobPhase, Send

Entry = tuple[By, str, str]  # (what, key, member)
_WITH_STOPS = (Preparing, Stopping)
_NO_STOPS: Mapping[str, str] = {}
_KEPT_NONE: Mapping[str, float] = {}


def index_of(state: State) -> Index:
    draft = Draft(Index(tuple({} for _ in By)))
    for node in state.nodes.values():
        draft.node(None, node)
    for job in state.jobs.values():
        draft.job(None, job)
    names = {node.number: node.name for node in state.nodes.values()}
    for name, live in state.live.items():
        draft.live(name, began=[names[number] for number in nodes_of(live) if number in names])
    for incident in state.incidents.values():
        draft.incident(None, incident)
    for send in state.outbox.values():
        draft.order(None, send)
    return draft.finish()


class Draft:
    """The index of a turn: groups are copied when they are first written to."""

    __slots__ = ("_base", "_groups", "_own", "all_reported", "pool_changed", "uses_changed", "version")

    def __init__(self, base: Index) -> None:
        self._base = base
        self._groups: dict[By, dict[str, Group]] = {}
        self._own: dict[tuple[By, str], dict[str, None]] = {}
        self.pool_changed = False  # the free nodes, or their possible uses, have changed
        self.uses_changed = 0  # how often the possible uses of some node may have changed
        self.all_reported = False  # the last node without an inventory has reported it, or has disconnected
        self.version = 0  # grows with every change of nodes or jobs that changes the index

    def get(self, what: By, key: str = "") -> Group:
        return self.table(what).get(key, EMPTY)

    def table(self, what: By) -> Mapping[str, Group]:
        return self._groups.get(what, self._base.groups[what])

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

    # ------------------------------------------------------------ changed rows

    def node(self, old: Node | None, new: Node | None, changed: Iterable[str] = ()) -> None:
        """`changed`: the fields that may differ between the two."""
        if old is not None and new is not None and not _node_differs(old, new, changed):
            return
        name = new.name if new is not None else old.name if old is not None else ""
        if new is None:
            self.memo.pop(name, None)
        free, silent = name in self.get(By.FREE), name in self.get(By.SILENT)
        self._move(_of_node(old), _of_node(new))
        self._set_free(name)
        if free or self._is_in_pool(name):
            self._change_pool()
        elif old is None or new is None or _use_differs(old, new):
            self.uses_changed += 1
        if silent and not self.get(By.SILENT):
            self.all_reported = True
        self.version += 1

    def job(self, old: Job | None, new: Job | None) -> None:
        if old is not None and new is not None and not _job_differs(old, new):
            return
        self.version += 1
        self._move(_of_job(old), _of_job(new))
        if _reserved(old) != _reserved(new):
            self._change_pool()
        name = new.name if new is not None else old.name if old is not None else ""
        before, after = nodes_in_use(old), nodes_in_use(new)
        if before is not after:
            was, now = set(before), set(after)
            self._move({(By.CLAIM, node, name) for node in was - now}, {(By.CLAIM, node, name) for node in now - was})
            for node in was ^ now:
                self._set_free(node)

    def live(self, job: str, began: Iterable[str] = (), ended: Iterable[str] = ()) -> None:
        """Nodes that may have workers of the job from now on, and nodes that have none any more."""
        before = {entry for node in ended for entry in ((By.HOLDS, job, node), (By.HELD, node, job))}
        after = {entry for node in began for entry in ((By.HOLDS, job, node), (By.HELD, node, job))}
        self._move(before, after)
        for node in (*began, *ended):
            self.version += 1
            if self._is_in_pool(node):
                self._change_pool()
            elif node in self.get(By.UNFIT):
                self.uses_changed += 1

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

    # ------------------------------------------------------------ groups

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

    def _is_in_pool(self, node: str) -> bool:
        """Whether jobs that have no claim on the node can use it: it is free, or may be released for them."""
        return any(node in self.get(what) for what in (By.FREE, By.QUARANTINED, By.RETURNING))

    def _change_pool(self) -> None:
        self.pool_changed = True
        self.uses_changed += 1

    def _group(self, what: By, key: str) -> dict[str, None]:
        if (own := self._own.get((what, key))) is not None:
            return own
        if what not in self._groups:
            self._groups[what] = dict(self._base.groups[what])
        own = self._own[what, key] = dict(self._groups[what].get(key, EMPTY))
        self._groups[what][key] = own
        return own


# ---------------------------------------------------------------- the groups of a value


def _other_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return old is not new and old.keys() != new.keys()


# The fields of a node that its groups depend on, and when two values of a field mean different groups.
_GROUPED_BY: Mapping[str, Callable[[Any, Any], bool]] = {
    "connected": is_not,
    "unheard": is_not,
    "lost": is_not,
    "unschedulable_reason": ne,
    "quarantined": is_not,
    "reset_due": is_not,
    "removal": is_not,
    "probation": is_not,
    "announced": lambda old, new: (old == ()) is not (new == ()),
    "facts": is_not,
    "preflight": ne,  # reported again with each session
    "notices": is_not,
    "faults": is_not,
    "suspicion": lambda old, new: (old is None) is not (new is None),
    "inventory": _other_keys,
}


def groups_of_fields(names: Iterable[str]) -> list[tuple[str, Callable[[Any, Any], bool]]]:
    """Those of the fields that the groups of a node depend on, with their comparisons."""
    return [(name, _GROUPED_BY[name]) for name in names if name in _GROUPED_BY]


def _node_differs(old: Node, new: Node, changed: Iterable[str]) -> bool:
    """Whether the node's groups may differ. Most reports of a node do not change them."""
    return any(differs(getattr(old, name), getattr(new, name)) for name, differs in groups_of_fields(changed))


def _use_differs(old: Node, new: Node) -> bool:
    """Whether a job with a claim on the node may use it differently. That it has stopped its workers does not matter."""
    return (
        old.connected is not new.connected
        or old.usable is not new.usable
        or old.facts is not new.facts
        or old.preflight != new.preflight
        or old.notices is not new.notices
    )


def _of_node(node: Node | None) -> set[Entry]:
    if node is None:
        return set()
    name = node.name
    entries: set[Entry] = {(By.KEEPS, job, name) for job in node.inventory}
    if node.connected:
        entries.add((By.CONNECTED, "", name))
        entries.add((By.AVAILABLE if node.usable else By.CONDEMNED, "", name))
        if not node.inventoried and node.facts.replicator_endpoint:
            entries.add((By.SILENT, "", name))
        if node.unheard:
            entries.add((By.UNHEARD, "", name))
        if node.removal is not None:
            entries.add((By.RETURNING, "", name))
    elif not node.lost:
        entries.add((By.AWAY, "", name))
    if node.removal is not None:
        entries.add((By.REMOVED, "", name))
    if node.quarantined:
        entries.add((By.QUARANTINED, "", name))
    if node.probation is not None:
        entries.add((By.ON_PROBATION, "", name))
    if node.unfit:
        entries.add((By.UNFIT, "", name))
    if node.reset_due is not None:
        entries.add((By.RESET_DUE, "", name))
    if node.lost:
        entries.add((By.GONE, "", name))
    if node.notices and node.notice is not None:
        entries.add((By.ANNOUNCED, "", name))
    if node.suspicion is not None:
        entries.add((By.SUSPECTED, "", name))
    return entries


def _job_differs(old: Job, new: Job) -> bool:
    return (
        type(old.doing) is not type(new.doing)
        or old.generation is not new.generation
        or _stops(old) is not _stops(new)
        or old.target_dp != new.target_dp
        or (old.awaited_nodes is None) is not (new.awaited_nodes is None)
        or old.deferred_evictions is not new.deferred_evictions
        or old.warnings is not new.warnings
        or _reserved(old) != _reserved(new)
    )


def _of_job(job: Job | None) -> set[Entry]:
    if job is None:
        return set()
    name = job.name
    if job.phase.finished:
        return {(By.FINISHED, "", name)}
    entries: set[Entry] = {(By.CONCERN, node, name) for node in _stops(job).values()}
    if job.spec.priority:
        entries.add((By.RANKED, "", name))
    if reserves(job) or job.kept:
        entries.add((By.RESERVES, "", name))
    match job.doing:
        case Preparing() | Starting() | Resetting():
            return entries
        case Running() if (
            job.generation is not None
            and job.generation.mesh.dp == job.target_dp
            and job.awaited_nodes is None
            and not job.deferred_evictions
            and all(each.had_spare for each in job.warnings.values() if each.answered)
        ):
            return entries
        case Deferred():
            entries.add((By.DEFERRED, "", name))
    entries.add((By.WANTS_NODES, "", name))
    return entries


def reserves(job: Job) -> bool:
    """Whether free nodes are reserved as its spares. Not for a job that lacks nodes: the free nodes do not suffice for it, and
    may suffice for others. A job that waits for a time, or for inventories, keeps them."""
    if not job.spec.spares or job.phase.finished:
        return False
    match job.doing:
        case Waiting(awaited=awaited):
            return awaited.for_time
        case Pending() | Suspended():
            return False
        case _:
            return True


def _reserved(job: Job | None) -> tuple[bool, Mapping[str, float], tuple[str, ...]]:
    """(has reserved nodes, nodes kept for it, nodes excluded for it): the nodes that other jobs may take depend on these."""
    if job is None or job.phase.finished:
        return False, _KEPT_NONE, ()
    return reserves(job), job.kept, job.change.excluded if job.spec.spares and job.change is not None else ()


def _stops(job: Job) -> Mapping[str, str]:
    """Stop orders whose answers the job waits for: order id → node."""
    return job.doing.stops if isinstance(job.doing, _WITH_STOPS) else _NO_STOPS


def nodes_in_use(job: Job | None) -> tuple[str, ...]:
    """Nodes that a job claims: of its running or its next generation."""
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
    elif incident.walk and incident.walk[-1].end in (RungEnd.FAILED, RungEnd.LATE):
        entries.add((By.RUNG_OVER, "", incident.id))
    return entries
