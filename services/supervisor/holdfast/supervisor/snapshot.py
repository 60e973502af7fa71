"""The leader's state in parts, so that a commit writes what has changed and not what the fleet is large.

Each field of `State` is a part; of a field that is a table, each row is one: `epoch`, `breaker`, `nodes/n17`, `jobs/gpt`.
Values are replaced and never changed in place, so a part is written when its object is another one than at the last commit.
All parts together are one state because a commit writes them in one atomic step (docs/adr/0016).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Prepare
from holdfast.supervisor.core import State
from holdfast.supervisor.core.evolve import evolve
from holdfast.wire import records

_HINTS = get_type_hints(State, include_extras=True)
_FIELDS = tuple(each.name for each in fields(State) if each.init)  # the index follows from the rest
_TABLES = {
    name: get_args(_HINTS[name])[1]
    for name in _FIELDS
    if isinstance(get_origin(_HINTS[name]), type) and issubclass(get_origin(_HINTS[name]), Mapping)
}
WHOLE = ""  # the one part of a snapshot that an earlier version wrote


def prepare() -> None:
    """What writing and reading the first snapshot would have to do before it."""
    records.prepare(*(_TABLES.get(name, _HINTS[name]) for name in _FIELDS))


def changes(before: State | None, after: State) -> dict[str, bytes | None]:
    """Parts to write, None = to remove, so that a snapshot of `before` becomes one of `after`. None before: every part."""
    return dict(_changes(before, after))


def _changes(before: State | None, after: State) -> Iterator[tuple[str, bytes | None]]:
    for name in _FIELDS:
        old, new = getattr(before, name, None), getattr(after, name)
        if old is new:
            continue
        if name not in _TABLES:
            if before is None or old != new:
                yield name, records.dumps(new, _HINTS[name])
            continue
        kind, old, added = _TABLES[name], old or {}, 0
        for key, value in new.items():
            if old.get(key) is not value:
                added += key not in old
                yield f"{name}/{key}", records.dumps(value, kind)
        if len(old) + added > len(new):
            for key in old:
                if key not in new:
                    yield f"{name}/{key}", None


def load(parts: Mapping[str, bytes]) -> State:
    """The state that was written. Absent parts take their defaults, unknown ones are ignored. Raises `MalformedMessage`."""
    if WHOLE in parts:
        return _upgraded(records.loads(parts[WHOLE], State))
    values: dict[str, Any] = {name: {} for name in _TABLES}
    for part, raw in parts.items():
        name, table, key = part.partition("/")
        try:
            if table and name in _TABLES:
                values[name][key] = records.loads(raw, _TABLES[name])
            elif name in _FIELDS:
                values[name] = records.loads(raw, _HINTS[name])
        except MalformedMessage as error:
            raise MalformedMessage(f"snapshot.{part}", error.problem) from error
    return _upgraded(State(**values))


def _upgraded(state: State) -> State:
    """Earlier versions counted a change's unanswered `Prepare` orders among those that it waits for, by id."""
    jobs = dict(state.jobs)
    for name, job in state.jobs.items():
        change, generation = job.change, job.generation
        if change is None or generation is None:
            continue
        sends = (state.outbox[each] for each in change.waiting if each in state.outbox)
        prepares = {send.command_id: send.order for send in sends if isinstance(send.order, Prepare)}
        if prepares:
            stops = {each: node for each, node in change.waiting.items() if each not in prepares}
            slots = Numbers(order.placement.slot for order in prepares.values())
            jobs[name] = evolve(job, change=evolve(change, waiting=stops, unprepared=change.unprepared | slots))
    return evolve(state, jobs=jobs)
