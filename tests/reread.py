"""The state of a supervisor as a standby reads it from snapshots, fold after fold.

Most folds change little of it, and writing and reading all of it takes longer than two folds. Values are replaced and never
changed in place: an object that was read before is not written and read again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from holdfast.supervisor.core import Job, Node, State
from holdfast.wire import records

WHOLE_EVERY = 8  # folds
FIELD_BY_FIELD = (State, Node, Job)

Reader = Callable[[Any, Any, Any], Any]  # value before, what was read of it, value now → what is read of that


class Reread:
    def __init__(self) -> None:
        self._number = 0
        self._state: State | None = None
        self._read: State | None = None

    def __call__(self, state: State) -> State:
        """`loads(dumps(state))`. Every few folds this is what happens, and shows that reading the differences is the same."""
        self._read = _reader(State)(self._state, self._read, state)
        self._state = state
        self._number += 1
        assert self._read is not None
        if self._number % WHOLE_EVERY:
            return self._read
        whole = records.loads(records.dumps(state, State), State)
        assert whole == self._read
        return whole


@cache
def _reader(hint: Any) -> Reader:
    """What a value of this type is read by: each value of its own if there are many, else all at once."""
    if hint in FIELD_BY_FIELD:
        return _reader_of_fields(hint)
    origin = get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping) and get_args(hint)[0] is str:
        return _reader_of_rows(get_args(hint)[1])
    write = records.writer(hint)

    def read(was: Any, known: Any, now: Any) -> Any:
        return known if now is was else records.loads(write(now), hint)

    return read


def _reader_of_rows(hint: Any) -> Reader:
    read_row = _reader(hint)

    def read(was: Any, known: Any, now: Any) -> Any:
        if now is was:
            return known
        if known is None:
            was = known = {}
        return {key: read_row(was.get(key), known.get(key), row) for key, row in now.items()}

    return read


def _reader_of_fields(kind: type) -> Reader:
    hints = get_type_hints(kind, include_extras=True)
    readers = {each.name: _reader(hints[each.name]) for each in fields(kind) if each.init}

    def read(was: Any, known: Any, now: Any) -> Any:
        if now is was:
            return known
        return kind(
            **{
                name: read_field(getattr(was, name, _ABSENT), getattr(known, name, None), getattr(now, name))
                for name, read_field in readers.items()
            }
        )

    return read


_ABSENT = object()  # no value of a state, not even None
