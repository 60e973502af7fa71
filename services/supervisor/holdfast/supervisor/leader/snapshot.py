"""The leader's state in parts, so that a commit writes what has changed and not what the fleet is large.

Each field of `State` is a part; of a field that is a table, each row is one: `epoch`, `breaker`, `nodes/n17`, `jobs/gpt`. What
is large in a row and seldom changes stands apart (docs/adr/0024).
Values are replaced and never changed in place, so a part is written when its object is another one than at the last commit.
All parts together are one state because a commit writes them in one atomic step (docs/adr/0016).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.evolve import evolve
from holdfast.domain.generations import Placement, RankRestore, ShardSource
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Prepare
from holdfast.supervisor.core import Node, State
from holdfast.supervisor.core.lifecycle import Preparing
from holdfast.supervisor.leader import upgrades
from holdfast.supervisor.protocol import Send
from holdfast.supervisor.timers import Timer
from holdfast.wire import records

_HINTS = get_type_hints(State, include_extras=True)
_FIELDS = tuple(each.name for each in fields(State) if each.init)  # the index follows from the rest
_TABLES = {
    name: get_args(_HINTS[name])[1]
    for name in _FIELDS
    if isinstance(get_origin(_HINTS[name]), type) and issubclass(get_origin(_HINTS[name]), Mapping)
}
# Large fields of a row that seldom change: `nodes/n17:inventory`.
_APART: dict[str, dict[str, Any]] = {
    "nodes": {"inventory": {}, "workers": ()},
    "jobs": {"generation": None, "running": None},
}
_ROWS = {name: get_type_hints(_TABLES[name], include_extras=True) for name in _APART}
records.omit_defaults(Node)
WHOLE = ""  # the one part of a snapshot that an early version wrote
# 2: what `_APART` names stands apart, and what orders have in common. 3: so do a node's workers and what it was heard to say.
# 4: the fields of a job are grouped, what it does is one value, and timers are values (`upgrades`).
# 5: fields of nodes, orders, the breaker and its settings have the names of the glossary.
_FORMAT, _NOW = "format", b"5"
_UPGRADES = {
    "jobs": upgrades.job,
    "incidents": upgrades.incident,
    "nodes": upgrades.node,
    "outbox": upgrades.send,
    "breaker": upgrades.breaker,
    "config": upgrades.config,
}

_SLOT, _PREPARE = "slot", "prepare"
_TIMER: Any = tuple[Timer, float]  # a row of the timers: its name is for people


@dataclass(frozen=True, slots=True)
class _Slot:
    """What an unanswered `Prepare` has of its own, `outbox/c-1:slot`, as an earlier version wrote it. What the slots have in
    common stands in `jobs/gpt:prepare`. Now it is a broadcast."""

    node: str
    job: str
    generation: int
    placement: Placement
    restore: tuple[RankRestore, ...] = ()
    peers: tuple[ShardSource, ...] = ()


def prepare() -> None:
    """What writing and reading the first snapshot would have to do before it."""
    records.prepare(*(_TABLES.get(name, _HINTS[name]) for name in _FIELDS), _TIMER)
    records.prepare(*(_ROWS[name][each] for name, apart in _APART.items() for each in apart))


def is_current(parts: Mapping[str, bytes]) -> bool:
    """Whether these are parts as this version writes them, to which changes can be written."""
    return parts.get(_FORMAT) == _NOW


def changes(
    before: State | None, after: State, written: Mapping[str, Iterable[str]] | None = None
) -> dict[str, bytes | None]:
    """Parts to write, None = to remove, so that a snapshot of `before` becomes one of `after`. None before: every part.
    `written`: the rows that may differ, by table; None = any."""
    return dict(_changes(before, after, written))


def _changes(
    before: State | None, after: State, written: Mapping[str, Iterable[str]] | None
) -> Iterator[tuple[str, bytes | None]]:
    if before is None:
        yield _FORMAT, _NOW
        written = None
    for name in _FIELDS:
        old, new = getattr(before, name, None), getattr(after, name)
        if old is new:
            continue
        if name not in _TABLES:
            if before is None or old != new:
                yield name, records.dumps(new, _HINTS[name])
            continue
        old = old or {}
        rows: Iterable[Any] = {**old, **new} if written is None else written.get(name, ())
        changed = [(key, old.get(key), new.get(key)) for key in rows]
        changed = [each for each in changed if each[1] is not each[2]]
        if name == "timers":
            yield from _timers(changed)
            continue
        for key, was, value in changed:
            yield from _row(name, key, was, value)


def _row(name: str, key: str, was: Any, value: Any) -> Iterator[tuple[str, bytes | None]]:
    apart = _APART.get(name, {})
    for field in apart:
        known, found = getattr(was, field, None), getattr(value, field, None)
        if found and found is not known:
            yield f"{name}/{key}:{field}", records.dumps(found, _ROWS[name][field])
        elif known and not found:
            yield f"{name}/{key}:{field}", None
    if value is None:
        yield f"{name}/{key}", None
    else:
        yield f"{name}/{key}", records.dumps(evolve(value, **apart) if apart else value, _TABLES[name])


def _timers(changed: Iterable[tuple[Timer, float | None, float | None]]) -> Iterator[tuple[str, bytes | None]]:
    for timer, _, due in changed:
        yield f"timers/{timer}", None if due is None else records.dumps((timer, due), _TIMER)


def load(parts: Mapping[str, bytes]) -> State:
    """The state that was written. Absent parts take their defaults, unknown ones are ignored. Raises `MalformedMessage`."""
    if WHOLE in parts:
        return _upgraded(records.loads(parts[WHOLE], State, upgrades.state))
    values: dict[str, Any] = {name: {} for name in _TABLES}
    apart: list[tuple[str, str, str, Any]] = []
    shared: dict[str, Prepare] = {}
    slots: dict[str, _Slot] = {}
    current = is_current(parts)
    for part, raw in parts.items():
        name, table, key = part.partition("/")
        row, colon, field = key.rpartition(":")
        try:
            if table and name == "timers":
                timer, due = records.loads(raw, _TIMER, partial(upgrades.timer, key))
                values[name][timer] = due
            elif not colon and table and name in _TABLES:
                values[name][key] = _read(name, raw, _TABLES[name], current)
            elif name == "jobs" and field == _PREPARE:
                shared[row] = records.loads(raw, Prepare)
            elif name == "outbox" and field == _SLOT:
                slots[row] = records.loads(raw, _Slot)
            elif field and field in _APART.get(name, ()):
                apart.append((name, row, field, records.loads(raw, _ROWS[name][field])))
            elif table and name in _TABLES:
                values[name][key] = _read(name, raw, _TABLES[name], current)
            elif name in _FIELDS:
                values[name] = _read(name, raw, _HINTS[name], current)
        except MalformedMessage as error:
            raise MalformedMessage(f"snapshot.{part}", error.problem) from error
    for name, row, field, value in apart:
        if row in values[name]:
            values[name][row] = evolve(values[name][row], **{field: value})
    for command, slot in slots.items():
        values["outbox"][command] = _send(command, slot, shared.get(slot.job))
    return _upgraded(State(**values))


def _read(name: str, raw: bytes, kind: Any, current: bool) -> Any:
    if current or name not in _UPGRADES:
        return records.loads(raw, kind)
    return records.loads(raw, kind, _UPGRADES[name])


def _send(command: str, slot: _Slot, shared: Prepare | None) -> Send:
    if shared is None or shared.generation != slot.generation:
        problem = f"what it shares with the other orders of generation {slot.generation} of {slot.job} is not there"
        raise MalformedMessage(f"snapshot.outbox/{command}", problem)
    order = evolve(shared, placement=slot.placement, restore=slot.restore, peers=slot.peers)
    return Send(slot.node, command, order)


def _upgraded(state: State) -> State:
    """Earlier versions counted a change's unanswered `Prepare` orders among those that it waits for, by id."""
    jobs = dict(state.jobs)
    for name, job in state.jobs.items():
        doing = job.doing
        if not isinstance(doing, Preparing):
            continue
        sends = (state.outbox[each] for each in doing.stops if each in state.outbox)
        prepares = {send.command_id: send.order for send in sends if isinstance(send.order, Prepare)}
        if prepares:
            stops = {each: node for each, node in doing.stops.items() if each not in prepares}
            slots = Numbers(order.placement.slot for order in prepares.values())
            jobs[name] = evolve(job, doing=evolve(doing, stops=stops, unprepared=doing.unprepared | slots))
    return evolve(state, jobs=jobs)
