"""The bounded table against a model: a list of entries in the order in which they were last written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.diagnostics.bounded import Bounded

KEYS = st.integers(0, 9)
LIMIT = 4


class Model(RuleBasedStateMachine):
    """Weights are the values, when `weighed`."""

    weighed = False

    def __init__(self) -> None:
        super().__init__()
        self.table: Bounded[int, int] = Bounded(LIMIT, weigh=(lambda value: value) if self.weighed else None)
        self.model: list[tuple[int, int]] = []
        self.evicted = 0

    def write(self, key: int, value: int) -> None:
        self.model = [entry for entry in self.model if entry[0] != key] + [(key, value)]
        while len(self.model) > 1 and sum(each if self.weighed else 1 for _, each in self.model) > LIMIT:
            del self.model[0]
            self.evicted += 1

    @rule(key=KEYS, value=st.integers(0, 6))
    def set(self, key: int, value: int) -> None:
        self.table[key] = value
        self.write(key, value)

    @rule(key=KEYS, value=st.integers(0, 6))
    def get_or_add(self, key: int, value: int) -> None:
        known = dict(self.model).get(key)
        assert self.table.get_or_add(key, lambda: value) == (value if known is None else known)
        if known is None:
            self.write(key, value)

    @rule(key=KEYS, value=st.integers(0, 6))
    def setdefault(self, key: int, value: int) -> None:
        known = dict(self.model).get(key)
        assert self.table.setdefault(key, value) == (value if known is None else known)
        if known is None:
            self.write(key, value)

    @rule(entries=st.dictionaries(KEYS, st.integers(0, 6)))
    def update(self, entries: dict[int, int]) -> None:
        self.table.update(entries)
        for key, value in entries.items():
            self.write(key, value)

    @rule(key=KEYS)
    def pop(self, key: int) -> None:
        assert self.table.pop(key, None) == dict(self.model).get(key)
        self.model = [entry for entry in self.model if entry[0] != key]

    @rule(key=KEYS)
    def delete(self, key: int) -> None:
        if key in self.table:
            del self.table[key]
        self.model = [entry for entry in self.model if entry[0] != key]

    @rule(key=KEYS)
    def read(self, key: int) -> None:
        assert self.table.get(key) == dict(self.model).get(key)
        assert (key in self.table) == (key in dict(self.model))

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.model.clear()

    @invariant()
    def same(self) -> None:
        assert list(self.table.items()) == self.model
        assert self.table.evicted == self.evicted


class Weighed(Model):
    weighed = True


TestCounted = Model.TestCase
TestWeighed = Weighed.TestCase


@given(st.lists(KEYS, unique=True, min_size=LIMIT + 1))
def test_the_entry_written_longest_ago_goes_first(keys: list[int]) -> None:
    table: Bounded[int, None] = Bounded(LIMIT)
    for key in keys:
        table[key] = None
    assert list(table) == keys[-LIMIT:]
    assert table.evicted == len(keys) - LIMIT


def test_a_value_that_cannot_be_made_adds_no_entry() -> None:
    table: Bounded[str, int] = Bounded(LIMIT)
    with pytest.raises(ZeroDivisionError):
        table.get_or_add("a", lambda: 1 // 0)
    assert not table
