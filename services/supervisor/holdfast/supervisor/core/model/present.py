"""What is true now, while events are folded: the present rows, and queries over the index.

`Turn` writes to it. A query costs as much as its result, whatever the size of the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from holdfast.domain.generations import Generation
from holdfast.domain.incidents import Incident
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Order
from holdfast.supervisor.core.model.index import By, Group, Memo
from holdfast.supervisor.core.model.indexing import Draft, index_of
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.live import Live, generations_on
from holdfast.supervisor.core.model.state import Breaker, Config, Invite, Node, State
from holdfast.supervisor.protocol import (
    Broadcast,
    Send,
)
from holdfast.supervisor.timers import Timer

T = TypeVar("T")


class Unanswered(NamedTuple):
    """A broadcast, and the slots that have not answered it."""

    broadcast: Broadcast
    left: Numbers

    def slot_of(self, node: str, command_id: str) -> int | None:
        """The slot whose unanswered order to `node` has this id; None if there is none."""
        slot = self.broadcast.slot_of(command_id)
        if slot is None or self.broadcast.placements[slot].node != node or slot not in self.left:
            return None
        return slot


class Present:
    """The state with what the turn has written so far."""

    nodes: Mapping[str, Node]  # the present tables; plain attributes, because one incident reads them a million times
    jobs: Mapping[str, Job]
    live: Mapping[str, Live]
    incidents: Mapping[str, Incident]
    outbox: Mapping[str, Send]
    broadcasts: Mapping[str, Broadcast]
    unanswered: Mapping[str, Numbers]
    timers: Mapping[Timer, float]

    def __init__(self, state: State) -> None:
        self._state = state
        for name in TABLES:
            setattr(self, name, getattr(state, name))
        self._changes: dict[str, Any] = {}  # fields of the state that are no tables
        self._index = Draft(state.index or index_of(state))
        self._pooled: Memo = {}
        self._pooled_version = 0

    @property
    def config(self) -> Config:
        config: Config = self._value("config")
        return config

    @property
    def closed(self) -> tuple[Incident, ...]:
        closed: tuple[Incident, ...] = self._value("closed")
        return closed

    @property
    def questions(self) -> tuple[str, ...]:
        questions: tuple[str, ...] = self._value("questions")
        return questions

    @property
    def replaced(self) -> tuple[float, ...]:
        replaced: tuple[float, ...] = self._value("replaced")
        return replaced

    @property
    def invites(self) -> tuple[Invite, ...]:
        invites: tuple[Invite, ...] = self._value("invites")
        return invites

    @property
    def breaker(self) -> Breaker:
        breaker: Breaker = self._value("breaker")
        return breaker

    @property
    def diagnostics_at(self) -> float:
        received: float = self._value("diagnostics_at")
        return received

    @property
    def secret(self) -> str:
        secret: str = self._value("secret")
        return secret

    @property
    def led_at(self) -> float:
        began: float = self._value("led_at")
        return began

    @property
    def last_fault(self) -> tuple[float, str]:
        last: tuple[float, str] = self._value("last_fault")
        return last

    @property
    def uses(self) -> int:
        known: int = self._value("uses")
        return known + self._index.uses_changed

    def found(self, what: By, key: str = "") -> list[str]:
        """Names or ids, sorted: groups have no order of their own, which a snapshot would not preserve."""
        return sorted(self._index.get(what, key))

    def group(self, what: By, key: str = "") -> Group:
        """The same without an order, for callers whose result does not depend on it."""
        return self._index.get(what, key)

    def groups(self, what: By) -> Mapping[str, Group]:
        """All groups of this kind, by key."""
        return self._index.table(what)

    def generations_on(self, node: str, job: str) -> tuple[int, ...]:
        """Generations of the job that may have live workers on the node, ascending."""
        return generations_on(self.live.get(job, {}), self.nodes[node].number)

    def count(self, what: By) -> int:
        return len(self._index.get(what))

    def members(self, generation: Generation, what: By) -> list[str]:
        """The generation's nodes that are in this group, by slot. The cost is that of the smaller of the two."""
        group = self._index.get(what)
        if len(group) >= len(generation.placements):
            return [node for node in generation.nodes if node in group]
        slots = [(slot, node) for node in group if (slot := generation.slot_of(node)) is not None]
        return [node for _, node in sorted(slots)]

    def concerned(self, node: str) -> list[Job]:
        """Jobs in a change that waits for an answer of the node, or for its workers to stop, in order."""
        changing = {name for name in self._index.get(By.CLAIM, node) if self.jobs[name].change is not None}
        return self.in_order(changing | self._index.get(By.CONCERN, node).keys())

    def open_incidents(self, job: str) -> list[Incident]:
        """Oldest first."""
        mine = (self.incidents[each] for each in self._index.get(By.OPEN, job))
        return sorted(mine, key=lambda incident: (incident.detected_at, len(incident.id), incident.id))

    def in_order(self, names: Iterable[str]) -> list[Job]:
        """These jobs in the order in which they get free nodes: by priority, then by submission."""
        jobs = self.jobs
        found = [jobs[name] for name in names]
        if len(found) < 2:
            return found
        return sorted(found, key=lambda job: (-job.spec.priority, job.submitted_at, job.name))

    def orders(self, *, node: str = "", job: str = "", to_one: bool = False) -> list[Send]:
        """Unanswered orders for a node, or about a job, or both; oldest first. `to_one`: without those of broadcasts."""
        known: Iterable[str] = self._index.get(By.ORDER_FOR, node) if node else self.outbox
        if job:
            about = self._index.get(By.ORDER_ABOUT, job)
            known = [each for each in known if each in about] if node else about
        found = [self.outbox[each] for each in known]
        jobs = () if to_one else self._index.get(By.CLAIM, node) if node else self.broadcasts
        for name, broadcast in ((name, self.broadcasts.get(name)) for name in jobs if job in ("", name)):
            if broadcast is not None:
                slots = self.unanswered[name]
                found += [broadcast.send(slot) for slot in slots if node in ("", broadcast.placements[slot].node)]
        return sorted(found, key=_age)

    def order_to(self, node: str, kind: type[Order]) -> Send | None:
        """The oldest unanswered order of this kind to the node alone."""
        return next((send for send in self.orders(node=node, to_one=True) if isinstance(send.order, kind)), None)

    def asked(self, node: str, command_id: str) -> Send | None:
        """The unanswered order of this id. If it is of a broadcast, only if `node` is one of its nodes."""
        if (send := self.outbox.get(command_id)) is not None:
            return send
        found = self._in_broadcast(node, command_id)
        return None if found is None else found[0].broadcast.send(found[1])

    def addressee(self, node: str, command_id: str) -> str | None:
        """The node that the unanswered order of this id was sent to; of a broadcast only if `node` is among its nodes."""
        if (found := self._in_broadcast(node, command_id)) is not None:  # nearly always
            return found[0].broadcast.placements[found[1]].node
        send = self.outbox.get(command_id)
        return None if send is None else send.node

    def slot_asked(self, node: str, command_id: str) -> tuple[Unanswered, int] | None:
        """The broadcast and the slot of the order of this id to the node, if it belongs to a broadcast and is not answered."""
        found = self._in_broadcast(node, command_id)
        return found if found is not None and found[0].broadcast.placements[found[1]].node == node else None

    def _in_broadcast(self, node: str, command_id: str) -> tuple[Unanswered, int] | None:
        """The broadcast that includes `node`, and the slot whose unanswered order has this id."""
        for job in self._index.table(By.CLAIM).get(node, ()):
            broadcast = self.broadcasts.get(job)
            if broadcast is not None and (slot := broadcast.slot_of(command_id)) is not None:
                left = self.unanswered[job]
                return (Unanswered(broadcast, left), slot) if slot in left else None
        return None

    def pooled(self, key: Hashable, make: Callable[[], T], *of: object) -> T:
        """A value that depends only on the present nodes, jobs and `of`, computed once: a decision asks for it many times."""
        if self._pooled_version != self._index.version:
            self._pooled_version = self._index.version
            self._pooled.clear()
        return _once(self._pooled, key, make, of)

    def remembered(self, node: Node, make: Callable[[], T], *of: object) -> T:
        """A value that depends only on `node` and `of`, cached across events."""
        return _once(self._index.memo, node.name, make, (node, *of))

    def _value(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._state, name)


TABLES = tuple(Present.__annotations__)


def _age(send: Send) -> tuple[int, str]:
    """Sort key, oldest order first. Command ids share a prefix and end with a number, and the slot of a broadcast."""
    number = send.command_id.partition("/")[0]
    return len(number), send.command_id


def _once(memo: Memo, key: Hashable, make: Callable[[], T], of: tuple[object, ...]) -> T:
    """The cached value for `key`, computed again if any value in `of` has changed."""
    known = memo.get(key)
    if known is None or known[0] != of:
        known = memo[key] = (of, make())
    value: T = known[1]
    return value
