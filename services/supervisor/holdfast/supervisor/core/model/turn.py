"""A turn: the next state while events are folded, and the resulting commands.

From outside, `step` is pure: it takes a state and returns another. Inside, transitions write to a turn. This is the only place
where values are copied in order to be changed:

* A table of the state, a row of `heard` and a group of the index is copied when the turn first writes to it. From then on the
  turn writes to its own copy, however many events follow. A batch of events thus copies each table once (0.1 ms for 12,500
  rows), and writing a row costs as much as in a dictionary.
* A row (`Node`, `Job`, …) is never changed: `evolve` makes another.
* `finish` returns the state so far. It shares the turn's tables, so do not keep it while the turn is still written to.

Measured against persistent maps (`rpds-py`, `immutables`): docs/adr/0026-broadcasts-and-batches.md.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from hashlib import blake2s
from typing import Any

from holdfast.domain import tracing
from holdfast.domain.evolve import evolve, evolver
from holdfast.domain.findings import Finding
from holdfast.domain.generations import Placement, RestoreRun, ShardSource
from holdfast.domain.incidents import Incident, IncidentState, RungEnd
from holdfast.domain.nodes import NodeState
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Order, Prepare, Start
from holdfast.supervisor.core.model import lifecycle
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.indexing import groups_of_fields
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Cause, Doing
from holdfast.supervisor.core.model.live import begun, ended, nodes_of
from holdfast.supervisor.core.model.present import TABLES, Present
from holdfast.supervisor.core.model.state import Node, State, heard_in, last_seq
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

_NO_FIELDS: Mapping[str, Any] = {}


class Turn(Present):
    """`commands` are those of the present event. `written`: by table, keys of the rows that differ from `state`; of a node that
    was in `state`, with the fields that may differ, None = any."""

    def __init__(self, state: State, at: float) -> None:
        super().__init__(state)
        self.written: dict[str, dict[Any, Mapping[str, Any] | None]] = {}
        self._tables: dict[str, dict[Any, Any]] = {}
        self._heard: dict[str, dict[str, int]] = {}  # rows of `State.heard` that the turn has copied
        self.begin(at)

    def begin(self, at: float) -> None:
        """Begin the next event, at this time."""
        self.at = at
        self.commands: list[Command] = []
        self._changed = False
        self._touched: set[str] = set()  # jobs that this event may affect
        self._touched_nodes: set[str] = set()
        self._unreviewed: set[str] = set()  # changed nodes that a fault took out of service
        self._everything = False
        self._index.pool_changed = self._index.all_reported = False
        self._pooled.clear()
        if at and not self._value("born"):
            self.set(born=at)

    def end(self) -> tuple[Command, ...]:
        """End the event. Returns its commands."""
        if self._changed:
            self._changes["folded_at"] = self.at
        return tuple(self.commands)

    def finish(self) -> State:
        """The state after all events so far; the original object if they changed nothing."""
        if not self._tables and not self._changes:
            return self._state
        self._changes["uses"], self._index.uses_changed = self.uses, 0
        return evolve(self._state, **self._tables, **self._changes, index=self._index.finish())

    # ------------------------------------------------------------ what to reconcile

    def touch(self, job: str) -> None:
        """Mark `job` for reconciliation: a condition that it waits for may have become true."""
        self._touched.add(job)

    def touch_all(self) -> None:
        self._everything = True

    def _touch_users(self) -> None:
        """Mark the jobs that have workers, shards, ranks or orders on a changed node."""
        nodes, touched = self.nodes, self._touched
        users = [self._index.table(what) for what in (By.CLAIM, By.CONCERN, By.HELD)]
        for name in self._touched_nodes:
            if len(touched) >= len(self.jobs) and touched >= self.jobs.keys():
                break  # all jobs are marked: the other nodes can add none
            if (node := nodes.get(name)) is not None:
                touched.update(node.inventory)
            for groups in users:
                touched.update(groups.get(name, ()))
        self._touched_nodes = set()

    def touched(self) -> list[str]:
        """Unfinished jobs that this event may affect, in order. A later call returns the jobs marked since the previous one.

        A job is skipped if only others are busy: at 12,500 nodes, checking it anyway would cost more than everything else.
        """
        self._touch_users()
        if not (self._touched or self._everything or self._index.pool_changed or self._index.all_reported):
            return []
        jobs, names = self.jobs, self._touched
        if self._everything:
            names = set(jobs)
        if self._index.pool_changed:
            names = names | self._index.get(By.WANTS_NODES).keys()
        if self._index.all_reported:
            names = names | self._index.get(By.DEFERRED).keys()
        self._touched, self._everything = set(), False
        self._index.pool_changed = self._index.all_reported = False
        known = (each for each in names if each in jobs and not jobs[each].phase.finished)
        return [job.name for job in self.in_order(known)]

    def removed(self) -> list[str]:
        """Nodes that a fault took out of service and that this event may affect, in order. A later call returns those marked
        since the previous one. After many failures there can be thousands of such nodes; only changed ones are reviewed."""
        out = self._index.get(By.REMOVED)
        names = out.keys() if self._everything else self._unreviewed & out.keys()
        self._unreviewed = set()
        return sorted(names)

    # ------------------------------------------------------------ nodes and jobs

    def put_node(self, name: str, **changes: Any) -> Node:
        old = self.nodes[name]
        node = evolve(old, **changes)
        table, written = self._own("nodes")
        table[name] = node
        known = written.get(name, _NO_FIELDS)
        if known is not None:
            written[name] = {**known, **changes} if known else changes
        self._index.node(old, node, changes)
        self._touched_nodes.add(name)
        if node.removal is not None:
            self._unreviewed.add(name)
        if old.inventory is not node.inventory:
            self._touched.update(old.inventory)
        return node

    def put_nodes(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """`put_node` of many nodes, each at most once: (node, changed fields), the same fields of each."""
        if not rows:
            return
        table, written = self._own("nodes")
        fields = dict.fromkeys(rows[0][1])  # one object for all: the snapshot recognizes it
        names = [name for name, _ in rows]
        self._touched_nodes.update(names)
        if written.keys().isdisjoint(names):
            written.update(dict.fromkeys(names, fields))
        else:
            for name in names:
                known = written.get(name, _NO_FIELDS)
                if known is not None:
                    written[name] = {**known, **fields} if known else fields
        copy, touched = evolver(Node), self._touched
        inventories = "inventory" in fields
        grouped = groups_of_fields(fields)
        for name, values in rows:
            old = table[name]
            node = table[name] = copy(old, values)
            before = vars(old)
            for each, differs in grouped:
                if differs(before[each], values[each]):
                    self._index.node(old, node, fields)
                    break
            if node.removal is not None:
                self._unreviewed.add(name)
            if inventories:
                touched.update(old.inventory)

    def last_seq(self, node: Node) -> int:
        return last_seq(self._tables.get("heard", self._state.heard), node)

    def heard(self, name: str, seq: int, *, again: bool = True) -> bool:
        """Record the number of a node's newest report. Without `again`, returns False if the node has reported this number
        before."""
        group = heard_in(name)
        mine = self._heard.get(group)
        if not again and seq <= (self._state.heard.get(group, {}) if mine is None else mine).get(name, 0):
            return False
        if mine is None:
            table = self._write("heard", group)
            mine = self._heard[group] = table[group] = dict(table.get(group, {}))
        mine[name] = seq
        self._changed = True
        return True

    def add_node(self, node: Node) -> None:
        """Add the node, with a number that no other node has."""
        unused: Numbers = self._value("unused_numbers")
        number = next(iter(unused), len(self.nodes))
        if unused:
            self.set(unused_numbers=unused.without(number))
        node = evolve(node, number=number)
        self._write("nodes", node.name)[node.name] = node
        self._index.node(None, node)

    def drop_node(self, name: str) -> None:
        for job in [*self.group(By.HELD, name)]:
            self.end_live(job, (name,))
        self.set(unused_numbers=self._value("unused_numbers").with_((self.nodes[name].number,)))
        self._index.node(self._write("nodes", name).pop(name), None)
        self.heard(name, 0)
        del self._heard[heard_in(name)][name]

    def begin_live(self, job: str, generation: int, names: Collection[str]) -> None:
        """Record that these nodes may have workers of this generation from now on."""
        numbers = Numbers([self.nodes[name].number for name in names])
        self._write("live", job)[job] = begun(self.live.get(job, {}), generation, numbers)
        known = self.group(By.HOLDS, job)
        self._live_changed(job, began=[name for name in names if name not in known])

    def end_live(self, job: str, names: Collection[str], up_to: int | None = None) -> None:
        """Record that these nodes have no workers of generation `up_to` or older any more. None = of no generation."""
        numbers = Numbers([self.nodes[name].number for name in names])
        live, held = ended(self.live.get(job, {}), numbers, up_to), self.group(By.HOLDS, job)
        table = self._write("live", job)
        if live:
            table[job] = live
        else:
            table.pop(job, None)
        gone = numbers - nodes_of(live)
        self._live_changed(job, ended=[name for name in names if self.nodes[name].number in gone and name in held])

    def _live_changed(self, job: str, *, began: Sequence[str] = (), ended: Sequence[str] = ()) -> None:
        self._touched.add(job)
        self._touched_nodes.update(began, ended)
        self._unreviewed.update(began, ended)
        self._index.live(job, began, ended)

    def set_node_state(self, name: str, state: NodeState, job: str, reason: str) -> None:
        """Set the node's state, and publish it if it changed."""
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
        """Move the job to another state, or to the same one with new data. Raises `IllegalTransition`."""
        job = self.jobs[name]
        lifecycle.check(name, job.doing, cause, doing)
        if (job.phase, job.reason) != (doing.phase, reason):
            self.publish(JobChanged(self.at, name, doing.phase, reason))
        return self.put_job(name, doing=doing, reason=reason, **changes)

    def update(self, name: str, **changes: Any) -> Job:
        """Change the data of the job's present state."""
        return self.put_job(name, doing=evolve(self.jobs[name].doing, **changes))

    def explain(self, name: str, reason: str) -> None:
        """Change the reason of the job's present state."""
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
        """Store and publish the incident. A closed one moves to `closed`."""
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
        """Close the incident. `rung_end`: how its current rung ends, if it has one."""
        if (incident := self.incidents.get(incident_id)) is not None:
            self.cancel_timer(RungTimeout(incident.job, incident.id))
            incident = incident.rung_ended(self.at, rung_end, outcome)
            self.put_incident(evolve(incident, state=state, outcome=outcome, **changes))

    def ask(self, incident: Incident) -> None:
        """Ask the job's policy; the default policy decides if no answer arrives in time."""
        if incident.id not in self.questions:
            self.set(questions=(*self.questions, incident.id))
        self.commands.append(Evaluate(incident.id, incident.job))
        self.set_timer(PolicyTimeout(incident.id), self.at + self.config.policy_s)

    def withdraw(self, incident_id: str) -> None:
        """Withdraw the question about this incident."""
        if incident_id in (questions := self.questions):
            place = questions.index(incident_id)
            self.set(questions=questions[:place] + questions[place + 1 :])
        self.cancel_timer(PolicyTimeout(incident_id))

    def withdraw_all(self, incidents: Iterable[str]) -> None:
        """Withdraw the questions about these incidents."""
        gone = set(incidents)
        self.set(questions=tuple(each for each in self.questions if each not in gone))
        for each in sorted(gone):
            self.cancel_timer(PolicyTimeout(each))

    # ------------------------------------------------------------ commands

    def publish(self, record: Record) -> None:
        self.commands.append(Publish(record))

    def judge(self, finding: Finding, verdict: str, incident: str = "") -> None:
        """Publish what becomes of a finding. Every finding that arrives is judged at least once; a repeat that leads to no
        incident is not recorded again."""
        if finding.repeat and not incident:
            return
        self.publish(FindingJudged(self.at, finding, verdict, incident))

    def note(self, subject: str, text: str) -> None:
        self.publish(Noted(self.at, subject, text))

    def send(self, node: str, order: Order) -> str:
        """Put the order into the outbox, and send it if the node has a session. Returns the command id."""
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
        """Send the order to every slot of the job's newest generation."""
        broadcast = Broadcast(self._new_command_id(), order, placements, restore, peers, suspected or Numbers())
        self._write("broadcasts", order.job)[order.job] = broadcast
        self._write("unanswered", order.job)[order.job] = Numbers.below(len(placements))
        nodes = self.nodes
        self.commands.append(Post(broadcast, Numbers(each.slot for each in placements if nodes[each.node].connected)))

    def _new_command_id(self) -> str:
        number = self._value("commands") + 1
        self.set(commands=number)
        # The epoch: an event log that lost its last second makes a later term issue the same numbers again.
        # The proof cannot be guessed: an answer from a node that never received the order has no valid id.
        proof = blake2s(f"{self._value('secret')}/{number}".encode(), digest_size=6).hexdigest()
        return f"c-{self._origin}-{self._value('epoch'):x}-{number}.{proof}"

    def forget_order(self, send: Send) -> None:
        """Remove an order that was answered or is withdrawn."""
        if send.command_id in self.outbox:
            self._index.order(self._write("outbox", send.command_id).pop(send.command_id), None)
            return
        job = send.order.job
        broadcast = self.broadcasts.get(job)
        if broadcast is not None and (slot := broadcast.slot_of(send.command_id)) is not None:
            self.answered(job, (slot,))

    def answered(self, job: str, slots: Iterable[int]) -> None:
        """Mark these slots as having answered the job's broadcast."""
        left = self.unanswered[job] - (slots if isinstance(slots, Numbers) else Numbers(slots))
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
        """Set a timer that no leader has armed yet, without a command to the shell."""
        self._write("timers", timer)[timer] = due

    def cancel_timer(self, timer: Timer) -> None:
        if timer in self.timers:
            del self._write("timers", timer)[timer]
            self.commands.append(CancelTimer(timer))

    def timer_fired(self, timer: Timer) -> bool:
        """Whether the timer was still set. False also if it fired early, because it was set again meanwhile."""
        due = self.timers.get(timer)
        if due is None or due > self.at + 1e-6:
            return False
        del self._write("timers", timer)[timer]
        return True

    def trace(self, incident_id: str) -> str:
        """Trace id of an incident that no finding of diagnostics opened; the same on every replay."""
        return tracing.new_trace(f"{self._origin}/{incident_id}").trace_id

    def set(self, **values: Any) -> None:
        self._changes.update(values)
        self._changed = True

    # ------------------------------------------------------------ inside

    @property
    def _origin(self) -> str:
        """Time of the first event, in milliseconds, in hex."""
        return f"{int(self._value('born') * 1000):x}"

    def _write(self, name: str, key: Hashable) -> dict[Any, Any]:
        """The turn's own copy of a table, whose row `key` the caller is about to change."""
        table, written = self._own(name)
        written[key] = None
        return table

    def _own(self, name: str) -> tuple[dict[Any, Any], dict[Any, Mapping[str, Any] | None]]:
        """The turn's own copy of a table, which the caller is about to change, and its written rows."""
        self._changed = True
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = dict(getattr(self._state, name))
            self.written[name] = {}
            if name in TABLES:
                setattr(self, name, table)
        return table, self.written[name]
