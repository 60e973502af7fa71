"""A turn: the next state while events are folded, and the commands that go with them.

From outside, `step` is pure: it takes a state and returns another. Inside, transitions write to a turn, and this is the one
place where values are copied to be changed:

* A table of the state, a row of `heard` and a group of the index is copied when the turn first writes to it. From then on the
  turn writes to its own copy, however many events follow. So a batch of events copies each table once, 0.1 ms for 12,500
  rows, and a row costs what a dictionary does.
* A row (`Node`, `Job`, …) is never changed: `evolve` makes another.
* `finish` gives the state so far. It has the turn's own tables: whoever goes on writing to the turn must not keep it.

Measured against persistent maps (`rpds-py`, `immutables`): docs/adr/0026-broadcasts-and-batches.md.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from hashlib import blake2s
from typing import Any, TypeVar

from holdfast.domain import tracing
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding
from holdfast.domain.generations import Generation, Placement, RestoreRun, ShardSource
from holdfast.domain.incidents import Incident, IncidentState, RungEnd
from holdfast.domain.nodes import NodeState
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Order, Prepare, Start
from holdfast.supervisor.core import lifecycle
from holdfast.supervisor.core.index import By, Group, Memo
from holdfast.supervisor.core.indexing import Draft, index_of
from holdfast.supervisor.core.job import Job
from holdfast.supervisor.core.lifecycle import Cause, Doing
from holdfast.supervisor.core.state import Breaker, Config, Node, State, heard_in, last_seq
from holdfast.supervisor.protocol import (
    Broadcast,
    CancelTimer,
    Command,
    Evaluate,
    FindingJudged,
    IncidentChanged,
    JobChanged,
    NodeChanged,
    Noted,
    Post,
    Publish,
    Record,
    Send,
    SetTimer,
)
from holdfast.supervisor.timers import PolicyTimeout, RungTimeout, Timer

T = TypeVar("T")


class Turn:
    """`commands` are the present event's. `written`: the rows that are others than in `state`, by table."""

    nodes: Mapping[str, Node]  # the tables as they are now: attributes, which an incident reads a million times
    jobs: Mapping[str, Job]
    incidents: Mapping[str, Incident]
    outbox: Mapping[str, Send]
    broadcasts: Mapping[str, Broadcast]
    unanswered: Mapping[str, Numbers]
    timers: Mapping[Timer, float]

    def __init__(self, state: State, at: float) -> None:
        self.written: dict[str, dict[Any, None]] = {}
        self._state = state
        self._tables: dict[str, dict[Any, Any]] = {}
        self._heard: dict[str, dict[str, int]] = {}  # rows of `State.heard` of its own
        for name in _TABLES:
            setattr(self, name, getattr(state, name))
        self._changes: dict[str, Any] = {}
        self._index = Draft(state.index or index_of(state))
        self._pooled: Memo = {}
        self._pooled_version = 0
        self.begin(at)

    def begin(self, at: float) -> None:
        """The next event, at this time."""
        self.at = at
        self.commands: list[Command] = []
        self._changed = False
        self._touched: set[str] = set()  # jobs that this event may have changed something for
        self._touched_nodes: set[str] = set()
        self._unreviewed: set[str] = set()  # nodes that a fault took out of service and that are others now
        self._everything = False
        self._index.pool_changed = self._index.all_told = False
        self._pooled.clear()
        if at and not self._value("born"):
            self.set(born=at)

    def end(self) -> tuple[Command, ...]:
        """What follows from the event."""
        if self._changed:
            self._changes["folded_at"] = self.at
        return tuple(self.commands)

    def finish(self) -> State:
        """The state that all events so far amount to; the very same when they changed nothing."""
        if not self._tables and not self._changes:
            return self._state
        self._changes["uses"], self._index.uses_changed = self.uses, 0
        return evolve(self._state, **self._tables, **self._changes, index=self._index.finish())

    # ------------------------------------------------------------ reading

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
    def breaker(self) -> Breaker:
        breaker: Breaker = self._value("breaker")
        return breaker

    @property
    def diagnostics_at(self) -> float:
        heard: float = self._value("diagnostics_at")
        return heard

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
        """Names or ids, sorted: groups themselves have no order, a snapshot forgets it."""
        return sorted(self._index.get(what, key))

    def group(self, what: By, key: str = "") -> Group:
        """The same in no order: for what does not depend on one."""
        return self._index.get(what, key)

    def groups(self, what: By) -> Mapping[str, Group]:
        """All of this kind, by key."""
        return self._index.table(what)

    def count(self, what: By) -> int:
        return len(self._index.get(what))

    def members(self, generation: Generation, what: By) -> list[str]:
        """Of a generation's nodes those of this group, by slot; costs what the smaller of the two has."""
        group = self._index.get(what)
        if len(group) >= len(generation.placements):
            return [node for node in generation.nodes if node in group]
        slots = [(slot, node) for node in group if (slot := generation.slot_of(node)) is not None]
        return [node for _, node in sorted(slots)]

    def concerned(self, node: str) -> list[Job]:
        """Jobs that are changing and wait for an answer of the node, or for it to stop, in order."""
        changing = {name for name in self._index.get(By.CLAIM, node) if self.jobs[name].change is not None}
        return self.in_order(changing | self._index.get(By.CONCERN, node).keys())

    def open_incidents(self, job: str) -> list[Incident]:
        """Oldest first."""
        mine = (self.incidents[each] for each in self._index.get(By.OPEN, job))
        return sorted(mine, key=lambda incident: (incident.t_detected, len(incident.id), incident.id))

    def in_order(self, names: Iterable[str]) -> list[Job]:
        """These jobs, the one first that gets a free node before the others: by priority, then as submitted."""
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
        """The unanswered order of this id; of a broadcast only if `node` is among its nodes."""
        if (send := self.outbox.get(command_id)) is not None:
            return send
        found = self._in_broadcast(node, command_id)
        return None if found is None else found[0].send(found[1])

    def addressee(self, node: str, command_id: str) -> str | None:
        """The node to which the unanswered order of this id went; of a broadcast only if `node` is among its nodes."""
        if (send := self.outbox.get(command_id)) is not None:
            return send.node
        found = self._in_broadcast(node, command_id)
        return None if found is None else found[0].placements[found[1]].node

    def slot_asked(self, node: str, command_id: str) -> tuple[str, int] | None:
        """(job, slot) of the node's order of this id, if it is of a broadcast and not answered."""
        found = self._in_broadcast(node, command_id)
        if found is None or found[0].placements[found[1]].node != node:
            return None
        return found[0].order.job, found[1]

    def _in_broadcast(self, node: str, command_id: str) -> tuple[Broadcast, int] | None:
        """The broadcast to nodes of which `node` is one, and the slot in it, whose order has this id and is not answered."""
        for job in self._index.get(By.CLAIM, node):
            broadcast = self.broadcasts.get(job)
            if broadcast is not None and (slot := broadcast.slot_of(command_id)) is not None:
                return (broadcast, slot) if slot in self.unanswered[job] else None
        return None

    def pooled(self, key: Hashable, make: Callable[[], T], *of: object) -> T:
        """What follows from nodes and jobs as they are and from `of`, made once: a decision asks many times."""
        if self._pooled_version != self._index.version:
            self._pooled_version = self._index.version
            self._pooled.clear()
        return _once(self._pooled, key, make, of)

    def remembered(self, node: Node, make: Callable[[], T], *of: object) -> T:
        """What follows from `node` and `of`, remembered beyond this event."""
        return _once(self._index.memo, node.name, make, (node, *of))

    # ------------------------------------------------------------ what to look at again

    def touch(self, job: str) -> None:
        """Something that `job` waits for may have come."""
        self._touched.add(job)

    def touch_all(self) -> None:
        self._everything = True

    def _touch_users(self) -> None:
        """Of the nodes that are others now: the jobs that have something there, or want something of them."""
        nodes, touched = self.nodes, self._touched
        claims, concerns = self._index.table(By.CLAIM), self._index.table(By.CONCERN)
        for name in self._touched_nodes:
            if len(touched) >= len(self.jobs) and touched >= self.jobs.keys():
                break  # all of them: the many nodes of a large job say the same
            if (node := nodes.get(name)) is not None:
                touched.update(node.live_generations, node.inventory)
            touched.update(claims.get(name, ()), concerns.get(name, ()))
        self._touched_nodes = set()

    def touched(self) -> list[str]:
        """Unfinished jobs for which this event may have made something possible, in order; asked again, those since then.

        A job at rest is not looked at because another one is busy: at 12,500 nodes that alone would cost more than all else.
        """
        self._touch_users()
        if not (self._touched or self._everything or self._index.pool_changed or self._index.all_told):
            return []
        jobs, names = self.jobs, self._touched
        if self._everything:
            names = set(jobs)
        if self._index.pool_changed:
            names = names | self._index.get(By.WANTS_NODES).keys()
        if self._index.all_told:
            names = names | self._index.get(By.DEFERRED).keys()
        self._touched, self._everything = set(), False
        self._index.pool_changed = self._index.all_told = False
        known = (each for each in names if each in jobs and not jobs[each].phase.finished)
        return [job.name for job in self.in_order(known)]

    def removed(self) -> list[str]:
        """Nodes that a fault took out of service and for which this event may have made something possible, in order; asked
        again, those since then. After a storm there are thousands of them: only those that are others now are looked at."""
        out = self._index.get(By.REMOVED)
        names = out.keys() if self._everything else self._unreviewed & out.keys()
        self._unreviewed = set()
        return sorted(names)

    # ------------------------------------------------------------ nodes and jobs

    def put_node(self, name: str, **changes: Any) -> Node:
        old = self.nodes[name]
        node = evolve(old, **changes)
        self._write("nodes", name)[name] = node
        self._index.node(old, node, changes)
        self._touched_nodes.add(name)
        if node.removal is not None:
            self._unreviewed.add(name)
        if old.live_generations is not node.live_generations or old.inventory is not node.inventory:
            self._touched.update(old.live_generations, old.inventory)
        return node

    def last_seq(self, node: Node) -> int:
        return last_seq(self._tables.get("heard", self._state.heard), node)

    def heard(self, name: str, seq: int, known: Node | None = None) -> bool:
        """The newest report of a node. By itself this makes nothing possible. False: `known` has reported it before."""
        group = heard_in(name)
        mine = self._heard.get(group)
        if known is not None:
            rows = self._state.heard.get(group, {}) if mine is None else mine
            if seq <= rows.get(name, known.last_seq):
                return False
        if mine is None:
            table = self._write("heard", group)
            mine = self._heard[group] = table[group] = dict(table.get(group, {}))
        mine[name] = seq
        self._changed = True
        return True

    def add_node(self, node: Node) -> None:
        self._write("nodes", node.name)[node.name] = node
        self._index.node(None, node)

    def drop_node(self, name: str) -> None:
        self._index.node(self._write("nodes", name).pop(name), None)
        self.heard(name, 0)
        del self._heard[heard_in(name)][name]

    def set_node_state(self, name: str, state: NodeState, job: str, reason: str) -> None:
        """Publish when it is news."""
        if self.nodes[name].state is not state:
            self.put_node(name, state=state)
            self.publish(NodeChanged(self.at, name, state, job, reason))

    def put_job(self, name: str, **changes: Any) -> Job:
        old = self.jobs[name]
        job = evolve(old, **changes)
        self._write("jobs", name)[name] = job
        self._index.job(old, job)
        self._touched.add(name)
        return job

    def put_membership(self, name: str, **changes: Any) -> Job:
        return self.put_job(name, membership=evolve(self.jobs[name].membership, **changes))

    def put_progress(self, name: str, **changes: Any) -> Job:
        return self.put_job(name, progress=evolve(self.jobs[name].progress, **changes))

    def put_checkpoints(self, name: str, **changes: Any) -> Job:
        return self.put_job(name, checkpoints=evolve(self.jobs[name].checkpoints, **changes))

    def add_job(self, job: Job) -> None:
        self._index.job(self.jobs.get(job.name), job)
        self._write("jobs", job.name)[job.name] = job
        self._touched.add(job.name)
        self.publish(JobChanged(self.at, job.name, job.phase, job.reason))

    def drop_job(self, name: str) -> None:
        self._index.job(self._write("jobs", name).pop(name), None)

    def move(self, name: str, cause: Cause, doing: Doing, reason: str, **changes: Any) -> Job:
        """The job comes to another state, or to the same one anew. Raises `IllegalTransition`."""
        job = self.jobs[name]
        lifecycle.check(name, job.doing, cause, doing)
        if (job.phase, job.reason) != (doing.phase, reason):
            self.publish(JobChanged(self.at, name, doing.phase, reason))
        return self.put_job(name, doing=doing, reason=reason, **changes)

    def update(self, name: str, **changes: Any) -> Job:
        """The job stays in its state, and knows more of it."""
        return self.put_job(name, doing=evolve(self.jobs[name].doing, **changes))

    def explain(self, name: str, reason: str) -> None:
        """The job stays in its state for another reason."""
        job = self.jobs[name]
        if job.reason != reason:
            self.publish(JobChanged(self.at, name, job.phase, reason))
            self.put_job(name, reason=reason)

    # ------------------------------------------------------------ incidents

    def new_incident_id(self) -> str:
        number = self._value("incidents_opened") + 1
        self.set(incidents_opened=number)
        return f"i-{self._origin}-{number}"

    def put_incident(self, incident: Incident) -> Incident:
        """Store and publish; a closed one moves to the history."""
        self.publish(IncidentChanged(self.at, incident))
        self._touched.add(incident.job)
        if incident.loan is not None:
            self._touched.add(incident.loan.job)
        old = self.incidents.get(incident.id)
        self._index.incident(old, None if incident.closed else incident)
        if not incident.closed:
            self._write("incidents", incident.id)[incident.id] = incident
            return incident
        self._write("incidents", incident.id).pop(incident.id, None)
        self.withdraw(incident.id)
        self.set(closed=(*self.closed, incident)[-self.config.closed_incidents_max :])
        return incident

    def close_incident(
        self,
        incident_id: str,
        state: IncidentState,
        outcome: str,
        *,
        rung_end: RungEnd = RungEnd.OVERTAKEN,
        **changes: Any,
    ) -> None:
        """`rung_end`: how the rung ends that is being carried out for it, if there is one."""
        if (incident := self.incidents.get(incident_id)) is not None:
            self.cancel_timer(RungTimeout(incident.job, incident.id))
            incident = incident.rung_ended(self.at, rung_end, outcome)
            self.put_incident(evolve(incident, state=state, outcome=outcome, **changes))

    def ask(self, incident: Incident) -> None:
        """Ask the job's policy; the default decides when no answer comes."""
        if incident.id not in self.questions:
            self.set(questions=(*self.questions, incident.id))
        self.commands.append(Evaluate(incident.id, incident.job))
        self.set_timer(PolicyTimeout(incident.id), self.at + self.config.policy_s)

    def withdraw(self, incident_id: str) -> None:
        """No answer is wanted any more."""
        if incident_id in (questions := self.questions):
            place = questions.index(incident_id)
            self.set(questions=questions[:place] + questions[place + 1 :])
        self.cancel_timer(PolicyTimeout(incident_id))

    def withdraw_all(self, incidents: Iterable[str]) -> None:
        """No answer about any of these is wanted any more."""
        gone = set(incidents)
        self.set(questions=tuple(each for each in self.questions if each not in gone))
        for each in sorted(gone):
            self.cancel_timer(PolicyTimeout(each))

    # ------------------------------------------------------------ commands

    def publish(self, record: Record) -> None:
        self.commands.append(Publish(record))

    def judge(self, finding: Finding, verdict: str, incident: str = "") -> None:
        """Say what becomes of a finding: every finding that arrives is judged at least once. One that is only said again, and
        leads to nothing, is not written down each time."""
        if finding.repeat and not incident:
            return
        self.publish(FindingJudged(self.at, finding, verdict, incident))

    def note(self, subject: str, text: str) -> None:
        self.publish(Noted(self.at, subject, text))

    def send(self, node: str, order: Order) -> str:
        """Into the outbox and, when the node has a session, on its way. Returns the command id."""
        send = Send(node, self._new_command_id(), order)
        self._write("outbox", send.command_id)[send.command_id] = send
        self._index.order(None, send)
        if self.nodes[node].connected:
            self.commands.append(send)
        return send.command_id

    def broadcast(
        self,
        order: Prepare | Start,
        placements: tuple[Placement, ...],
        restore: tuple[RestoreRun, ...] = (),
        peers: tuple[tuple[ShardSource, ...], ...] = (),
        suspected: Numbers | None = None,
    ) -> None:
        """`send` to every slot of the job's newest generation."""
        broadcast = Broadcast(self._new_command_id(), order, placements, restore, peers, suspected or Numbers())
        self._write("broadcasts", order.job)[order.job] = broadcast
        self._write("unanswered", order.job)[order.job] = Numbers.below(len(placements))
        nodes = self.nodes
        self.commands.append(Post(broadcast, Numbers(each.slot for each in placements if nodes[each.node].connected)))

    def _new_command_id(self) -> str:
        number = self._value("commands") + 1
        self.set(commands=number)
        # With the epoch: a log that lost its last second hands the same numbers out again, in a later term.
        # And with what nobody can guess: an answer by somebody who was never asked is known by its id.
        proof = blake2s(f"{self._value('secret')}/{number}".encode(), digest_size=6).hexdigest()
        return f"c-{self._origin}-{self._value('epoch'):x}-{number}.{proof}"

    def forget_order(self, send: Send) -> None:
        """It was answered, or is withdrawn."""
        if send.command_id in self.outbox:
            self._index.order(self._write("outbox", send.command_id).pop(send.command_id), None)
            return
        job = send.order.job
        broadcast = self.broadcasts.get(job)
        if broadcast is not None and (slot := broadcast.slot_of(send.command_id)) is not None:
            self.answered(job, (slot,))

    def answered(self, job: str, slots: Iterable[int]) -> None:
        """These slots have answered the job's broadcast."""
        left = self.unanswered[job] - Numbers(slots)
        if left:
            self._write("unanswered", job)[job] = left
        else:
            self.withdraw_broadcast(job)

    def withdraw_broadcast(self, job: str) -> None:
        if job in self.broadcasts:
            del self._write("broadcasts", job)[job], self._write("unanswered", job)[job]

    def set_timer(self, timer: Timer, due: float) -> None:
        self._write("timers", timer)[timer] = due
        self.commands.append(SetTimer(timer, due))

    def postpone_timer(self, timer: Timer, due: float) -> None:
        """One that nobody has armed yet."""
        self._write("timers", timer)[timer] = due

    def cancel_timer(self, timer: Timer) -> None:
        if timer in self.timers:
            del self._write("timers", timer)[timer]
            self.commands.append(CancelTimer(timer))

    def timer_fired(self, timer: Timer) -> bool:
        """Whether it was still wanted. One that comes early (it was set again meanwhile) is not."""
        due = self.timers.get(timer)
        if due is None or due > self.at + 1e-6:
            return False
        del self._write("timers", timer)[timer]
        return True

    def trace(self, incident_id: str) -> str:
        """Trace id of an incident that no finding of diagnostics started: the same on every replay."""
        return tracing.new_trace(f"{self._origin}/{incident_id}").trace_id

    def set(self, **values: Any) -> None:
        self._changes.update(values)
        self._changed = True

    # ------------------------------------------------------------ inside

    @property
    def _origin(self) -> str:
        """Milliseconds of birth in hex."""
        return f"{int(self._value('born') * 1000):x}"

    def _value(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._state, name)

    def _write(self, name: str, key: Hashable) -> dict[Any, Any]:
        """A table of our own, of which the row `key` is going to be another one."""
        self._changed = True
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = dict(getattr(self._state, name))
            self.written[name] = {}
            if name in _TABLES:
                setattr(self, name, table)
        self.written[name][key] = None
        return table


_TABLES = tuple(Turn.__annotations__)


def _age(send: Send) -> tuple[int, str]:
    """Command ids begin alike and end with a number, and the slot of a broadcast."""
    number = send.command_id.partition("/")[0]
    return len(number), send.command_id


def _once(memo: Memo, key: Hashable, make: Callable[[], T], of: tuple[object, ...]) -> T:
    """What was made by this key, made anew when one of the values that it follows `of` is another."""
    known = memo.get(key)
    if known is None or known[0] != of:
        known = memo[key] = (of, make())
    value: T = known[1]
    return value
