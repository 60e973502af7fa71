"""Codecs between a dataclass and a message whose fields have the same names, derived from the dataclass.

A field that is added to both needs no further code; a field that is added to only one of them raises an error at import. The
annotation of a field determines its form in the message:

* a plain value is unchanged; `X | None` is a field whose absence is None; a mapping is a map;
* `tuple[X, ...]` and `Sequence[X]` are a repeated field. With `columns`, all of them have the same length; a field with the
  default `()` may be absent;
* `tuple[tuple[X, Y], ...]`, or a tuple of named tuples, is a repeated message with as many fields, in their order;
* a dataclass is a message, whose codec was created before; it is required unless it is annotated `| None` or has a default.

Exceptions are arguments of the codec. As in `dataclasses`, the two functions are generated as source and compiled when the
codec is created: an incident needs tens of thousands of control messages within seconds, and a loop over the fields would take
longer than the fields themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from holdfast.domain.construct import constructor_of
from holdfast.domain.errors import MalformedMessage

D = TypeVar("D")
M = TypeVar("M", bound=Message)


class Through(NamedTuple):
    """Functions that convert the value of one field to that of the message's field, and back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Instead(NamedTuple):
    """Another form of a repeated field, which the message has in its field `name` instead.

    `encode` creates this form from a value that is not empty; None: the sender writes the field itself.
    """

    name: str
    decode: Callable[[Any], Any]
    encode: Callable[[Any], Any] | None = None


_CODECS: dict[type, Codec[Any, Any]] = {}  # of dataclasses that are fields of others
# Functions to encode and decode other types; decoding also needs the field's name.
_VALUES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, str], Any]]] = {}


def register(kind: type, encode: Callable[[Any], Any], decode: Callable[[Any, str], Any]) -> None:
    """Allow fields of this type in dataclasses. `decode(value, field)` raises `MalformedMessage` that names the field."""
    _VALUES[kind] = encode, decode


def check_time(at: float, field: str) -> float:
    """Return `at`. Raises `MalformedMessage` unless it is a finite time, because order and deadlines are computed from it."""
    if not math.isfinite(at):
        raise MalformedMessage(field, f"{at} is not a time")
    return at


class Codec(Generic[D, M]):
    """A pair of functions for one dataclass. `label` names the message in errors.

    `tree(value)` returns the message's fields as a dictionary, from which protobuf fills a part of another message in place.
    `encode(value, **beside)` returns the message, with the forms of `instead`, and raises `MalformedMessage` for columns of
    unequal length. `decode(message, *apart)` returns the value, and raises `MalformedMessage` also for a missing
    required part or text, for an invalid time, and for errors of the codecs of its parts.
    """

    encode: Callable[..., M]
    tree: Callable[[D], dict[str, Any]]
    decode: Callable[..., D]

    def __init__(
        self,
        domain: type[D],
        message: type[M],
        label: str,
        *,
        apart: Sequence[str] = (),
        beside: Sequence[str] = (),
        inline: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
        through: Mapping[str, Through] | None = None,
        instead: Mapping[str, Instead] | None = None,
        named: Sequence[str] = (),
        times: Sequence[str] = (),
        columns: bool = False,
    ) -> None:
        """`apart`: fields of the dataclass that the message lacks; `beside`: fields of the message that the dataclass lacks.
        `inline`: dataclasses whose fields are the message's own. `renamed`: domain → wire. `instead`: other forms of repeated
        fields. `named`: text that must not be empty. `times`: numbers that must be finite.

        Raises TypeError if the fields of the dataclass and of the message differ.
        """
        self.domain, self.label = domain, label
        self.apart = tuple(apart)
        self._message, self._renamed, self._through, self._columnar = message, renamed or {}, through or {}, columns
        self._named, self._times, self._inline, self._instead = named, times, inline, instead or {}
        self._on_wire = message.DESCRIPTOR.fields_by_name
        self._names: dict[str, Any] = {"Malformed": MalformedMessage, "finite": math.isfinite, "check_time": check_time}
        self._used: set[str] = set(beside)
        self._checks: list[str] = []
        self._columns: list[tuple[str, str, bool]] = []  # (field, expression that decodes it, whether it may be absent)
        encoded, decoded = self._record(domain, "v", apart)
        if drifted := set(self._on_wire) ^ self._used:
            raise TypeError(f"{domain.__name__} and its message differ in {sorted(drifted)}")
        self._names |= {"Message": message, "unequal": self._unequal}
        passed = "".join(f", {name}={name}" for name in beside)
        checked = self._column_checks("v.") if columns else []
        self.encode = self._compile(
            [
                f"def encode({', '.join(('v', '*', *beside) if beside else 'v')}):",
                *checked,
                f"return Message({_as_arguments(encoded)}{passed})",
            ]
        )
        self.tree = self._compile(["def tree(v):", f"return {_as_dictionary(encoded)}"])
        taken = [f"c_{name} = {read}" for name, read, _ in self._columns] + self._column_checks("c_") if columns else []
        self.decode = self._compile(
            [f"def decode({', '.join(('m', *apart))}):", *self._checks, *taken, f"return {decoded}"]
        )
        _CODECS.setdefault(domain, self)

    # ------------------------------------------------------------ source

    def _compile(self, lines: Iterable[str]) -> Callable[..., Any]:
        found: dict[str, Any] = {}
        exec(compile("\n ".join(lines), f"<codec of {self.label}>", "exec"), self._names, found)
        [function] = found.values()
        made: Callable[..., Any] = function
        return made

    def _name(self, value: object) -> str:
        name = f"_{len(self._names)}"
        self._names[name] = value
        return name

    def _record(self, kind: type, value: str, apart: Iterable[str] = ()) -> tuple[dict[str, str], str]:
        """Return (field of the message → expression that writes it, call of `kind`'s constructor)."""
        hints = get_type_hints(kind)
        written: dict[str, str] = {}
        values = []
        for field in _made_of(kind):
            name, hint = field.name, hints[field.name]
            if name in apart:
                values.append(name)
            elif name in self._inline:
                encoded, decoded = self._record(hint, f"{value}.{name}")
                written |= encoded
                values.append(decoded)
            else:
                wire_name = self._renamed.get(name, name)
                self._use(wire_name)
                written[wire_name], decoded = self._field(field, hint, f"{value}.{name}", wire_name)
                if name in self._instead:
                    decoded = self._in_either_form(self._instead[name], written, wire_name, decoded, f"{value}.{name}")
                values.append(decoded)
        return written, f"{self._name(constructor_of(kind))}({', '.join(values)})"

    def _use(self, wire_name: str) -> Any:
        if wire_name not in self._on_wire:
            raise TypeError(f"{self.domain.__name__} and its message differ in {[wire_name]}")
        self._used.add(wire_name)
        return self._on_wire[wire_name]

    def _field(self, field: Field[Any], hint: Any, value: str, wire_name: str) -> tuple[str, str]:
        read, on_wire = f"m.{wire_name}", self._on_wire[wire_name]
        optional = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
        if optional:
            [hint] = [each for each in get_args(hint) if each is not NoneType]
        if field.name in self._named:
            self._checks.append(f"if not {read}: raise Malformed({f'{self.label}.{field.name}'!r}, 'missing')")
        encoded, decoded = self._converted(field.name, hint, value, read, on_wire)
        if get_origin(hint) is tuple and self._columnar:
            self._columns.append((field.name, decoded, field.default is not MISSING))
            decoded = f"c_{field.name}"
        if optional:
            present = f"m.HasField({wire_name!r})"
            return (
                encoded if encoded == value else f"{encoded} if {value} is not None else None",
                f"{decoded} if {present} else None",
            )
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if on_wire.message_type is not None and get_origin(hint) is None and not has_default:
            where = f"{self.label}.{field.name}"
            self._checks.append(f"if not m.HasField({wire_name!r}): raise Malformed({where!r}, 'missing')")
        return encoded, decoded

    def _converted(self, name: str, hint: Any, value: str, read: str, on_wire: Any) -> tuple[str, str]:
        own, label = self._through.get(name), repr(f"{self.label}.{name}")
        if get_origin(hint) in (tuple, Sequence):
            if own is not None:
                return f"{self._name(own.encode)}({value})", f"{self._name(own.decode)}(tuple({read}[:]))"
            return self._repeated(get_args(hint)[0], value, read, label, on_wire)
        if name in self._times:
            return value, f"({read} if finite({read}) else check_time({read}, {label}))"
        if own is not None:
            return f"{self._name(own.encode)}({value})", f"{self._name(own.decode)}({read})"
        if get_origin(hint) is not None:
            return value, f"dict({read})"
        return self._single(hint, value, read, label)

    def _in_either_form(self, other: Instead, written: dict[str, str], wire_name: str, decoded: str, value: str) -> str:
        read = f"m.{other.name}"
        present = f"m.HasField({other.name!r})" if self._use(other.name).has_presence else read
        if other.encode is not None:
            written[wire_name] = "()"
            written[other.name] = f"{self._name(other.encode)}({value}) if {value} else None"
        return f"{self._name(other.decode)}({read}) if {present} else {decoded}"

    def _single(self, hint: Any, value: str, read: str, label: str) -> tuple[str, str]:
        if hint in _VALUES:
            encode, decode = map(self._name, _VALUES[hint])
            return f"{encode}({value})", f"{decode}({read}, {label})"
        if not is_dataclass(hint):
            return value, read
        if hint not in _CODECS:
            raise TypeError(f"{self.label}: there is no codec for {hint} yet")
        codec = _CODECS[hint]
        return codec._written_into(self, value), f"{self._name(codec.decode)}({read})"

    def _written_into(self, other: Codec[Any, Any], value: str) -> str:
        """Return the expression with which `other` encodes a part of this kind: without a call per row, unless there are
        columns to check.

        The expression is a dictionary, from which protobuf fills the part in place. A message would be created and copied."""
        if self._columnar:
            return f"{other._name(self.encode)}({value})"
        writer = copy(self)
        writer._names = other._names
        written, _ = writer._record(self.domain, value)
        return _as_dictionary(written) if written else f"{other._name(self._message)}()"

    def _repeated(self, item: Any, value: str, read: str, label: str, on_wire: Any) -> tuple[str, str]:
        named = getattr(item, "_fields", None)  # of a NamedTuple
        if get_origin(item) is not tuple and named is None:
            encoded, decoded = self._single(item, "x", "x", label)
            if decoded == "x":
                return value, f"tuple({read}[:])"  # a tuple of a slice is built twice as fast as one of the container
        else:
            parts = tuple([part.name for part in on_wire.message_type.fields])
            if parts != named if named else len(parts) != len(get_args(item)):
                raise TypeError(f"{on_wire.full_name} has the fields {parts} for {item}")
            encoded = _as_dictionary({part: f"x[{place}]" for place, part in enumerate(parts)})
            decoded = f"{self._name(item) if named else ''}({', '.join(f'x.{part}' for part in parts)})"
        # Most repeated fields are empty in most messages.
        return f"[{encoded} for x in {value}]", f"(tuple([{decoded} for x in rows]) if (rows := {read}) else ())"

    # ------------------------------------------------------------ columns

    def _column_checks(self, of: str) -> list[str]:
        """Return statements that compare the lengths of the columns. `of`: prefix of the expressions of the columns."""
        lengths = [f"len({of}{name})" for name, _, _ in self._columns]
        listed = f"unequal([{', '.join(lengths)}])"
        may_lack = [lacks for _, _, lacks in self._columns]
        differ = [
            f"{length} != n" + (f" and {length}" if lacks else "")
            for length, lacks in zip(lengths[1:], may_lack[1:], strict=True)
        ]
        return [f"n = {lengths[0]}", *(f"if {each}: {listed}" for each in differ)]

    def _unequal(self, lengths: Sequence[int]) -> NoReturn:
        named = zip(self._columns, lengths, strict=True)
        listed = ", ".join(f"{name} {length}" for (name, _, _), length in named)
        raise MalformedMessage(self.label, f"columns of unequal length: {listed}")


def _as_arguments(written: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={expression}" for name, expression in written.items())


def _as_dictionary(written: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{name!r}: {expression}' for name, expression in written.items())}}}"


def _made_of(kind: type) -> list[Field[Any]]:
    return [field for field in fields(kind) if field.init]
