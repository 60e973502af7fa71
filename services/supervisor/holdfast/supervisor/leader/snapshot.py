"""The snapshot of the leader's state, in parts: a commit writes only the changed parts, whatever the size of the fleet.

Each field of `State` is a part. Of a field that is a table, each row is a part: `epoch`, `breaker`, `nodes/n17`, `jobs/gpt`.
Large fields of a row that seldom change are parts of their own (docs/adr/0024). Values are replaced and never changed in place,
so a part is written if its object is not the one of the last commit. All parts together are one state because a commit writes
them in one atomic step (docs/adr/0016).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from functools import partial
from itertools import compress
from operator import is_not
from typing import Any, get_args, get_origin, get_type_hints

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.evolve import evolve
from holdfast.domain.generations import Placement, RankRestore, ShardSource
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Prepare
from holdfast.supervisor.core import Node, State, Written
from holdfast.supervisor.core.model.lifecycle import Preparing
from holdfast.supervisor.leader import upgrades
from holdfast.supervisor.protocol import Send
from holdfast.supervisor.timers import Timer
from holdfast.wire import records

_HINTS = get_type_hints(State, include_extras=True)
_FIELDS = tuple(each.name for each in fields(State) if each.init)  # the index is derived from the rest
_TABLES = {
    name: get_args(_HINTS[name])[1]
    for name in _FIELDS
    if isinstance(get_origin(_HINTS[name]), type) and issubclass(get_origin(_HINTS[name]), Mapping)
}
# Fields of a row that change together, separately from the rest: `nodes/n17:held`. Each group is a part of its own.
_GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "nodes": {
        "held": ("inventory", "inventory_from"),
        "live": ("workers", "workers_version", "workers_at", "ended"),
    },
    "jobs": {"spec": ("spec",), "generation": ("generation",), "running": ("running",)},
}
_EARLIER = {"nodes": ("inventory", "workers")}  # groups of one field, of format 4
_NODE = get_type_hints(Node, include_extras=True)


class _Group:
    """Some fields of a row. The part of several fields is an object; the part of one field is its value."""

    def __init__(self, table: str, names: tuple[str, ...]) -> None:
        hints = get_type_hints(_TABLES[table], include_extras=True)
        self.kind = _part_of(_TABLES[table], names)  # keeps the class alive while it is used
        self.hint: Any = self.kind if len(names) > 1 else hints[names[0]]
        self._names = names
        self._write = records.writer(self.hint)
        self._write_fields = records.writer_of_fields({name: hints[name] for name in names})
        # A value without elements is the default.
        if any(each is not MISSING and each for each in map(_default_value, fields(self.kind))):
            raise TypeError(f"a field of {self.kind.__name__} has a default that is not empty")

    def dumps(self, row: Any) -> bytes | None:
        """None if all fields have their default values."""
        known = vars(row)
        if self.hint is self.kind:
            return self._write_fields(known)
        value = known[self._names[0]]
        return self._write(value) if value else None

    def loads(self, raw: bytes) -> dict[str, Any]:
        value = records.loads(raw, self.hint)
        return {name: getattr(value, name) if self.hint is self.kind else value for name in self._names}


def _part_of(kind: type, names: Iterable[str]) -> type:
    """A dataclass with some of the fields of another one, written without those that have their default values."""
    hints = get_type_hints(kind, include_extras=True)
    known = {each.name: each for each in fields(kind)}
    part = make_dataclass(
        f"{kind.__name__}_{'_'.join(names)}",
        [(name, hints[name], _default_of(known[name])) for name in names],
        slots=True,
    )
    records.omit_defaults(part)
    return part


def _default_of(known: Field[Any]) -> Any:
    if known.default_factory is not MISSING:
        return field(default_factory=known.default_factory)
    return field() if known.default is MISSING else field(default=known.default)


def _default_value(known: Field[Any]) -> Any:
    return known.default_factory() if known.default_factory is not MISSING else known.default


class _Row:
    """Splits the rows of a table into the parts of its groups and the rest, whose name is ""."""

    def __init__(self, table: str) -> None:
        self._kind = _TABLES[table]
        self.groups = {part: _Group(table, names) for part, names in _GROUPS[table].items()}
        part_of = {name: part for part, names in _GROUPS[table].items() for name in names}
        self._part_of = {each.name: part_of.get(each.name, "") for each in fields(self._kind)}
        self._own = [name for name, part in self._part_of.items() if not part]
        self.rest = _part_of(self._kind, self._own)
        self._write = records.writer(self.rest)
        self._newest: tuple[Iterable[str] | None, list[tuple[str, list[str]]]] = (None, [])

    def differing(self, was: Any, value: Any, names: Iterable[str] | None = None) -> list[str]:
        """The parts in which two rows differ. `names`: the fields that may differ; None = any."""
        before, after = vars(was), vars(value)
        if names is None:  # the fields are in the same order in every copy
            names = compress(self._part_of, map(is_not, before.values(), after.values()))
            by_part = self._by_part(names)
        elif names is self._newest[0]:  # nodes that were written together have the same object
            by_part = self._newest[1]
        else:
            by_part = self._by_part(names)
            self._newest = names, by_part
        parts: list[str] = []
        for part, fields_of in by_part:
            for name in fields_of:
                old, new = before[name], after[name]
                if old is not new and old != new:
                    parts.append(part)
                    break
        return parts

    def _by_part(self, names: Iterable[str]) -> list[tuple[str, list[str]]]:
        by_part: dict[str, list[str]] = {}
        for name in names:
            by_part.setdefault(self._part_of[name], []).append(name)
        return list(by_part.items())

    def dumps(self, part: str, row: Any) -> bytes | None:
        return (
            self.groups[part].dumps(row)
            if part
            else self._write(self.rest(*[getattr(row, name) for name in self._own]))
        )

    def whole(self, rest: Any, grouped: Mapping[str, Any]) -> Any:
        """The row made of its parts. Raises TypeError if a part is missing that every row has."""
        return self._kind(**{name: getattr(rest, name) for name in self._own}, **grouped)


_APART = {name: _Row(name) for name in _GROUPS}
# 2: the groups of `_APART`, and the common part of orders, are parts of their own. 3: so are a node's workers and its newest
# report. 4: the fields of a job are grouped, its state is one value, and timers are values (`upgrades`).
# 5: the fields of a node that change together are parts of their own, shards and workers are runs, and fields of nodes, orders,
# the breaker and its settings have the names of the glossary. 6: a job's specification, with the text of its policy, is a part
# of its own, and a row contains no fields of its groups. 7: incidents, findings and pre-flight tests have the names of the
# glossary; `records` also reads the former names. 8: runs of shards and of workers are lists of their values, without the names
# of the fields. 9: which generations may live on which nodes is a table by job, and nodes have numbers.
_FORMAT, _NOW = "format", b"9"
_SAME_PARTS = (b"6", b"7", b"8", _NOW)  # formats with the same rows and the same parts of rows, but for `_GENERATIONS`
_BEFORE = tuple(str(number).encode() for number in range(2, int(_NOW)))
_UPGRADES = {
    "jobs": upgrades.job,
    "incidents": upgrades.incident,
    "nodes": upgrades.node,
    "outbox": upgrades.send,
    "breaker": upgrades.breaker,
    "config": upgrades.config,
}

_SLOT, _PREPARE = "slot", "prepare"
_GENERATIONS = "generations"  # the part of a node, until format 8, with the generations that may live on it
_TIMER: Any = tuple[Timer, float]  # a row of the timers; its key is only for people


@dataclass(frozen=True, slots=True)
class _Slot:
    """The part of an unanswered `Prepare` that is its own, `outbox/c-1:slot`, as written by an earlier version. The common part
    of the slots was `jobs/gpt:prepare`. Today this is a broadcast."""

    node: str
    job: str
    generation: int
    placement: Placement
    restore: tuple[RankRestore, ...] = ()
    peers: tuple[ShardSource, ...] = ()


def prepare() -> None:
    """Compile the encoders and decoders, which the first snapshot would otherwise have to wait for."""
    records.prepare(*(_TABLES.get(name, _HINTS[name]) for name in _FIELDS), _TIMER)
    records.prepare(*(group.hint for row in _APART.values() for group in row.groups.values()))
    records.prepare(*(row.rest for row in _APART.values()))


def is_current(parts: Mapping[str, bytes]) -> bool:
    """Whether the parts have this version's format, so that changes can be written to them."""
    nodes = (raw for part, raw in parts.items() if part.startswith("nodes/"))
    return parts.get(_FORMAT) == _NOW and not any(map(upgrades.has_last_seq, nodes))


def changes(before: State | None, after: State, written: Written | None = None) -> dict[str, bytes | None]:
    """Parts to write (None = to remove) so that a snapshot of `before` becomes one of `after`. If `before` is None: every part.
    `written`: the rows that may differ, by table, and their fields; None = any."""
    parts: dict[str, bytes | None] = {}
    if before is None:
        parts[_FORMAT] = _NOW
        written = None
    for name in _FIELDS:
        old, new = getattr(before, name, None), getattr(after, name)
        if old is new:
            continue
        if name not in _TABLES:
            if before is None or old != new:
                parts[name] = records.dumps(new, _HINTS[name])
            continue
        old = old or {}
        rows: Mapping[Any, Iterable[str] | None]
        rows = dict.fromkeys((*old, *new)) if written is None else written.get(name, {})
        before_of, after_of = old.get, new.get
        changed = [
            (key, was, now, names)
            for key, names in rows.items()
            if (was := before_of(key)) is not (now := after_of(key))
        ]
        write = _timers if name == "timers" else _rows_apart if name in _APART else _rows
        write(parts, name, changed)
    return parts


# Of rows: key, before, after (None = the row does not exist), names of the fields that may differ (None = any).
_Changed = Iterable[tuple[Any, Any, Any, Iterable[str] | None]]


def _rows(parts: dict[str, bytes | None], table: str, changed: _Changed) -> None:
    write = records.writer(_TABLES[table])
    for key, _, value, _ in changed:
        parts[f"{table}/{key}"] = None if value is None else write(value)


def _rows_apart(parts: dict[str, bytes | None], table: str, changed: _Changed) -> None:
    row = _APART[table]
    for key, was, value, names in changed:
        if was is None or value is None:
            for part in ("", *row.groups):
                raw = None if value is None else row.dumps(part, value)
                if raw is not None or was is not None:
                    parts[f"{table}/{key}:{part}" if part else f"{table}/{key}"] = raw
        else:
            for part in row.differing(was, value, names):
                parts[f"{table}/{key}:{part}" if part else f"{table}/{key}"] = row.dumps(part, value)


def _timers(parts: dict[str, bytes | None], table: str, changed: _Changed) -> None:
    write = records.writer(_TIMER)
    for timer, _, due, _ in changed:
        parts[f"{table}/{timer}"] = None if due is None else write((timer, due))


def load(parts: Mapping[str, bytes]) -> State:
    """The state that was written. Absent parts have their defaults, unknown ones are ignored. Raises `MalformedMessage`, also
    for a snapshot of a newer version, and of the first one."""
    # The first version wrote no format, and one part in a key of its own.
    if (written := parts.get(_FORMAT, b"1" if parts else _NOW)) not in (*_BEFORE, _NOW):
        known = f"{_BEFORE[0].decode()} to {_NOW.decode()}"
        problem = (
            f"{written.decode(errors='replace')!r}, and this version reads {known}: start the version that wrote it"
        )
        raise MalformedMessage(f"snapshot.{_FORMAT}", problem)
    values: dict[str, Any] = {name: {} for name in _TABLES}
    apart: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)  # (table, row): its fields
    shared: dict[str, Prepare] = {}
    slots: dict[str, _Slot] = {}
    current = written in _SAME_PARTS
    numbers: dict[str, int] = {}  # node → number of its newest report, as earlier versions stored it
    live_on: dict[str, upgrades.LiveOn] = {}  # node → generations that may live on it, until format 8
    for part, raw in parts.items():
        name, table, key = part.partition("/")
        row, colon, group = key.rpartition(":")
        group = group if colon else ""
        try:
            if table and name == "timers":
                timer, due = records.loads(raw, _TIMER, partial(upgrades.timer, key))
                values[name][timer] = due
            elif name == "jobs" and group == _PREPARE:
                shared[row] = records.loads(raw, Prepare)
            elif name == "outbox" and group == _SLOT:
                slots[row] = records.loads(raw, _Slot)
            elif name == "nodes" and group == _GENERATIONS and written != _NOW:
                live_on[row] = records.loads(raw, upgrades.LiveOn)
            elif name in _APART and group in _APART[name].groups:
                apart[name, row] |= _APART[name].groups[group].loads(raw)
            elif group in _EARLIER.get(name, ()):
                apart[name, row][group] = records.loads(raw, _NODE[group])
            elif table and name in _TABLES:
                values[name][key] = _read(name, raw, _row_kind(name, current), current)
                if name == "nodes" and written != _NOW:
                    live_on.setdefault(key, upgrades.live_on(raw))
                if name == "nodes" and upgrades.has_last_seq(raw):
                    numbers[key] = upgrades.last_seq(raw)
            elif name in _FIELDS:
                values[name] = _read(name, raw, _HINTS[name], current)
        except MalformedMessage as error:
            raise MalformedMessage(f"snapshot.{part}", error.problem) from error
    if current:
        values |= {name: _whole_rows(name, values[name], apart) for name in _APART}
    else:
        for (name, row), changes in apart.items():
            if row in values[name]:
                values[name][row] = evolve(values[name][row], **changes)
    for command, slot in slots.items():
        values["outbox"][command] = _send(command, slot, shared.get(slot.job))
    if written != _NOW:
        values["nodes"], values["live"] = upgrades.live(values["nodes"], live_on)
    if numbers:
        values["heard"] = upgrades.heard(values["heard"], numbers)
    return _upgraded(State(**values))


def _row_kind(table: str, current: bool) -> Any:
    """The type of a stored row. Until format 5, the row also contained the fields of its groups, with their defaults."""
    return _APART[table].rest if current and table in _APART else _TABLES[table]


def _whole_rows(table: str, rests: Mapping[str, Any], apart: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    rows = {}
    for key, rest in rests.items():
        try:
            rows[key] = _APART[table].whole(rest, apart.get((table, key), {}))
        except TypeError as error:
            raise MalformedMessage(f"snapshot.{table}/{key}", f"a part of the row is missing ({error})") from error
    return rows


def _read(name: str, raw: bytes, kind: Any, current: bool) -> Any:
    if current or name not in _UPGRADES:
        return records.loads(raw, kind)
    return records.loads(raw, kind, _UPGRADES[name])


def _send(command: str, slot: _Slot, shared: Prepare | None) -> Send:
    if shared is None or shared.generation != slot.generation:
        problem = f"the common part of the orders of generation {slot.generation} of {slot.job} is missing"
        raise MalformedMessage(f"snapshot.outbox/{command}", problem)
    order = evolve(shared, placement=slot.placement, restore=slot.restore, peers=slot.peers)
    return Send(slot.node, command, order)


def _upgraded(state: State) -> State:
    """Earlier versions listed unanswered `Prepare` orders, by id, among the orders that a change waits for."""
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
