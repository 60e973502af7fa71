"""One dataclass ↔ one message whose fields have the same names, derived from the dataclass.

A field that is added to both travels without a line of code; one that is added to only one of them fails at import. What
kind of field it is follows from its annotation:

* a plain value travels as it is; `X | None` is a field whose absence is None;
* `tuple[X, ...]` is a repeated field. With `columns`, all of them have one length; one with the default `()` may be absent;
* another message is required, or optional, as the annotation says; its codec is among `through`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from holdfast.domain.errors import MalformedMessage

D = TypeVar("D")
M = TypeVar("M", bound=Message)


class Through(NamedTuple):
    """How the value of one field becomes the value of the message's field, and back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Codec(Generic[D, M]):
    """`label` names the message in errors."""

    def __init__(
        self,
        domain: type[D],
        message: type[M],
        label: str,
        *,
        apart: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
        through: Mapping[str, Through] | None = None,
        columns: bool = False,
    ) -> None:
        """`apart`: first fields of the dataclass, which the message lacks; `decode` is given them. `renamed`: domain → wire.

        Raises TypeError when the two have drifted apart.
        """
        self.domain, self.label = domain, label
        self._message = message
        hints = get_type_hints(domain)
        every = fields(domain)  # type: ignore[arg-type]
        if [field.name for field in every[: len(apart)]] != list(apart):
            raise TypeError(f"{domain.__name__} does not begin with {', '.join(apart)}")
        known = every[len(apart) :]
        self._names = tuple(field.name for field in known)
        self._wire_names = tuple((renamed or {}).get(name, name) for name in self._names)
        on_wire = message.DESCRIPTOR.fields_by_name
        if drifted := set(on_wire) ^ set(self._wire_names):
            raise TypeError(f"{domain.__name__} and its message differ in {sorted(drifted)}")
        self._of_value, self._of_message = _values(self._names), _values(self._wire_names)
        places = range(len(known))
        self._repeated = tuple(i for i in places if get_origin(hints[self._names[i]]) is tuple)
        self._optional = tuple(i for i in places if _is_optional(hints[self._names[i]]))
        self._required = tuple(
            i
            for i in places
            if on_wire[self._wire_names[i]].message_type is not None and i not in (*self._optional, *self._repeated)
        )
        self._through = tuple((self._names.index(name), *both) for name, both in (through or {}).items())
        self._columns = self._repeated if columns else ()
        self._may_lack = frozenset(i for i in places if known[i].default is not MISSING)

    def encode(self, value: D) -> M:
        """Raises `MalformedMessage` for columns of unequal length."""
        values = list(self._of_value(value))
        self._check_columns(values)
        for i, encode, _ in self._through:
            if values[i] is not None:
                values[i] = encode(values[i])
        return self._message(**dict(zip(self._wire_names, values, strict=True)))

    def decode(self, message: M, *apart: object) -> D:
        """Raises `MalformedMessage` for columns of unequal length, for a required part that is missing, and for what the
        codecs of its parts refuse."""
        values = list(self._of_message(message))
        for i in self._required:
            if not message.HasField(self._wire_names[i]):
                raise MalformedMessage(f"{self.label}.{self._names[i]}", "missing")
        for i in self._optional:
            if not message.HasField(self._wire_names[i]):
                values[i] = None
        for i in self._repeated:
            values[i] = tuple(values[i][:])  # of a slice: twice as fast as of the container
        self._check_columns(values)
        for i, _, decode in self._through:
            if values[i] is not None:
                values[i] = decode(values[i])
        return self.domain(*apart, *values)

    def _check_columns(self, values: Sequence[Any]) -> None:
        if len({len(values[i]) for i in self._columns}) <= 1:
            return
        rows = len(values[self._columns[0]])
        for i in self._columns:
            if len(values[i]) != rows and (values[i] or i not in self._may_lack):
                listed = ", ".join(f"{self._names[i]} {len(values[i])}" for i in self._columns)
                raise MalformedMessage(self.label, f"columns of unequal length: {listed}")


def _values(names: Sequence[str]) -> Callable[[Any], Sequence[Any]]:
    """The attributes of these names, in order; `attrgetter` gives a single one as it is."""
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda value: (get(value),)


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
