"""The fast constructor makes the values that the class makes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from values import value_of

from holdfast.domain.construct import constructor_of
from holdfast.domain.orders import OrderDone, Report
from holdfast.supervisor.protocol import NodeReported


@pytest.mark.parametrize("kind", [*get_args(Report), NodeReported], ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_values_are_those_of_the_class(kind: type, data: st.DataObject) -> None:
    value = data.draw(value_of(kind))
    made = constructor_of(kind)(*[getattr(value, field.name) for field in fields(kind)])
    assert type(made) is kind
    assert made == value
    assert hash(made) == hash(value)
    assert repr(made) == repr(value)


def test_they_are_frozen() -> None:
    names = [field.name for field in fields(OrderDone)]
    done = OrderDone("c-1", True)
    made = constructor_of(OrderDone)(*[getattr(done, name) for name in names])
    with pytest.raises(FrozenInstanceError):
        made.ok = False
    assert replace(made, ok=False) == OrderDone("c-1", False)


def test_all_fields_are_required() -> None:
    with pytest.raises(TypeError):
        constructor_of(OrderDone)("c-1", True)


@dataclass(frozen=True)
class Checked:
    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError("no width")


class Row(NamedTuple):
    rank: int


@dataclass
class Thawed:
    rank: int


@dataclass(frozen=True)
class Derived(Checked):
    rank: int


@pytest.mark.parametrize("kind", [Checked, Row, Thawed, Derived])
def test_classes_that_need_their_own_constructor_keep_it(kind: type) -> None:
    assert constructor_of(kind) is kind
