"""A faster `dataclasses.replace`. An incident of a large job replaces a hundred thousand values of thirty fields.

The supervisor's state, its rows (`Node`, `Job`, `Change`) and `Prepare` have no slots for this purpose: the fields of such a
value are one dictionary, which is copied as a whole. For other classes the constructor is called with all fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

from holdfast.domain.construct import constructor_of

T = TypeVar("T")


def evolve(value: T, **changes: Any) -> T:
    """Return a copy of `value`, a dataclass with at least two fields, with these fields changed. Fields that the constructor
    does not take are reset to their defaults. Raises KeyError for a field that the class does not have."""
    made: T = evolver(type(value))(value, changes)
    return made


def evolver(kind: type[Any]) -> _Copy:
    """Return `evolve` for many values of one class: a function of a value and its changed fields, as a mapping."""
    return _COPIES.get(kind) or _COPIES.setdefault(kind, _copy_of(kind))


_Copy = Callable[[Any, Mapping[str, Any]], Any]
_COPIES: dict[type, _Copy] = {}


def _copy_of(kind: type[Any]) -> _Copy:
    taken = [field.name for field in fields(kind) if field.init]
    derived = {field.name: field.default for field in fields(kind) if not field.init}
    if hasattr(kind, "__slots__") or hasattr(kind, "__post_init__"):
        return _constructed(kind, taken)
    return _cloned(kind, derived)


def _constructed(kind: Any, names: list[str]) -> _Copy:
    read, places = attrgetter(*names), {name: place for place, name in enumerate(names)}
    make = constructor_of(kind)

    def copy(value: Any, changes: Mapping[str, Any]) -> Any:
        values = list(read(value))
        for name, new in changes.items():
            values[places[name]] = new
        return make(*values)

    return copy


def _cloned(kind: type[Any], derived: dict[str, Any]) -> _Copy:
    size, new, put = len(fields(kind)), object.__new__, object.__setattr__
    grown = {field.name: None for field in fields(kind)}
    compact = dict(grown).__sizeof__()

    def copy(value: Any, changes: Mapping[str, Any]) -> Any:
        known = value.__dict__.copy()  # copied as a whole: filling a new dictionary takes three times as long
        if known.__sizeof__() > compact:  # grown field by field: its copies would be as large
            known = dict(known)
        if derived:
            known.update(derived)
        known.update(changes)
        if len(known) != size:
            raise KeyError(*(changes.keys() - {field.name for field in fields(kind)}))
        made = new(kind)
        put(made, "__dict__", known)
        return made

    return copy
