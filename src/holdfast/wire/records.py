"""Any frozen dataclass ↔ canonical JSON: inbox events, records of what changed, the core's snapshot.

The caller names the type. If the type is a union of dataclasses, the class name is written with the fields as `"_"`. Renaming a
class therefore changes the format. Adding a field with a default does not: absent fields take their defaults, unknown fields
are ignored. Canonical: fields in the order of their declaration, mappings and sets sorted, so equal values have equal bytes.

Numbers, strings and booleans are accepted unchanged or rejected, never converted. Non-finite floats are written in the
extension that Python's json reads and writes (`NaN`, `Infinity`), sets of numbers (`Numbers`) as their bits in hexadecimal.
pydantic_core writes and parses the text, five times as fast as the standard library. Tuples of thousands of values are written
in columns (`columns.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, overload

from cattrs import Converter, transform_error
from cattrs.gen import make_dict_unstructure_fn
from pydantic_core import from_json, to_json

from holdfast.domain.errors import HoldfastError, MalformedMessage
from holdfast.domain.generations import Placement, RankRestore, RestoreRun
from holdfast.domain.mesh import Mesh
from holdfast.domain.numbers import Numbers
from holdfast.log.protocol import Entry
from holdfast.wire import columns, former_names

T = TypeVar("T")
TAG = "_"

_prepared: dict[Any, None] = {}

Hook = Callable[[Any, Any], Any]
Upgrade = Callable[[Any], Any]


def _as_it_is(tree: Any) -> Any:
    return tree


def dumps(value: object, kind: type[Any] | UnionType) -> bytes:
    """Return `value` of type `kind` as canonical JSON. Raises TypeError for types that JSON cannot represent."""
    return to_json(_FAST.unstructure(value, unstructure_as=kind), inf_nan_mode="constants")


def writer(kind: Any) -> Callable[[Any], bytes]:
    """Return `dumps` for many values of one type, which looks up the converter only once."""
    unstructure: Callable[[Any], Any] = _FAST.get_unstructure_hook(kind)
    return lambda value: to_json(unstructure(value), inf_nan_mode="constants")


def writer_of_fields(kinds: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bytes | None]:
    """Return a function that writes some fields of a dataclass, in this order, as `writer` would, without empty ones. `kinds`:
    field → type. The function takes the values of all fields, and returns None if those to write are empty."""
    write = [(name, None if kind in _SCALARS else _FAST.get_unstructure_hook(kind)) for name, kind in kinds.items()]

    def write_fields(values: Mapping[str, Any]) -> bytes | None:
        tree = {name: value if of is None else of(value) for name, of in write if (value := values[name])}
        return to_json(tree, inf_nan_mode="constants") if tree else None

    return write_fields


@overload
def loads(raw: bytes, kind: type[T], upgrade: Upgrade = ...) -> T: ...
@overload
def loads(raw: bytes, kind: UnionType, upgrade: Upgrade = ...) -> Any: ...
def loads(raw: bytes, kind: Any, upgrade: Upgrade = _as_it_is) -> Any:
    """Return the value of type `kind` in `raw`. `upgrade` converts the JSON of an earlier version to that of this version.
    Raises `MalformedMessage` that names the wrong field."""
    read = _FAST.get_structure_hook(kind)
    try:
        tree = from_json(raw, allow_inf_nan=True)
    except ValueError as error:
        raise MalformedMessage(_name(kind), f"{len(raw)} bytes that are not JSON ({error})") from error
    try:
        tree = upgrade(tree)
        return read(tree, kind)
    except Exception as error:
        _explain(tree, kind, error)


def prepare(*kinds: Any) -> None:
    """Create the converters of these types in advance; otherwise they would be created during the first incident."""
    _prepared.update(dict.fromkeys(kinds))
    for _ in range(2):  # twice, because cattrs drops existing converters when it meets a new container type
        # A field of a class that contains itself (`Action.before`) is written by the class of its value.
        _FAST.get_unstructure_hook(tuple)
        for kind in _prepared:
            _FAST.get_unstructure_hook(kind)
            _FAST.get_structure_hook(kind)


def omit_defaults(kind: type) -> None:
    """Write values of this dataclass without fields that have their default values. Call this before the first write."""
    for converter in (_FAST, _CAREFUL):
        hook: Callable[[Any], Any] = make_dict_unstructure_fn(kind, converter, _cattrs_omit_if_default=True)
        converter.register_unstructure_hook(kind, hook)


def entry(entry_id: str, value: object, kind: type[Any] | UnionType, traceparent: str = "") -> Entry:
    """Return an entry with `value`, to append to a stream. The entry's `type` is the class name, for readers of redis-cli."""
    return Entry(id=entry_id, type=type(value).__name__, data=dumps(value, kind), traceparent=traceparent)


def _explain(tree: object, kind: Any, failure: Exception) -> NoReturn:
    """Decode again with the slower converter that records the path, so that only malformed input pays for good messages.
    `failure`: of the first attempt. It is the reason if the second one succeeds: then `upgrade` could not read the tree."""
    try:
        _CAREFUL.structure(tree, kind)
    except Exception as error:
        problems = "; ".join(transform_error(error, path=_name(kind), format_exception=_format))
        raise MalformedMessage(_name(kind), problems) from error
    raise MalformedMessage(_name(kind), f"{type(failure).__name__}: {failure}") from failure


def _format(error: BaseException, expected: type | None) -> str:
    match error:
        case KeyError():
            return f"the field {error} is missing"
        case HoldfastError() | TypeError() | ValueError():
            return str(error)
        case _:
            return f"{type(error).__name__}: {error}"


def _name(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        names = [_name(member) for member in get_args(kind)]
        return " | ".join(names) if len(names) <= 4 else f"one of {len(names)} types"
    return getattr(kind, "__name__", None) or str(kind)


# ---------------------------------------------------------------- unions, by class name


def _tagged_members(kind: Any) -> dict[str, type]:
    """Return the members of a union of several dataclasses (without None) by tag; empty for every other type."""
    if get_origin(kind) not in (Union, UnionType):
        return {}
    members = [member for member in get_args(kind) if member is not NoneType]
    if len(members) < 2 or not all(is_dataclass(member) for member in members):
        return {}
    return {member.__name__: member for member in members}


def _is_tagged(kind: Any) -> bool:
    return bool(_tagged_members(kind))


def _write_tagged(kind: Any, converter: Converter) -> Callable[[Any], Any]:
    hooks = {member: converter.get_unstructure_hook(member) for member in _tagged_members(kind).values()}
    optional = NoneType in get_args(kind)

    def write(value: Any) -> Any:
        if value is None and optional:
            return None
        try:
            hook = hooks[type(value)]
        except KeyError:
            raise TypeError(f"{type(value).__name__} does not belong to {_name(kind)}") from None
        tree: dict[str, Any] = hook(value)
        tree[TAG] = type(value).__name__
        return tree

    return write


def _read_tagged(kind: Any, converter: Converter) -> Hook:
    members = _tagged_members(kind)
    known = members | {old: members[new] for old, new in former_names.TAGS.items() if new in members}
    hooks = {tag: converter.get_structure_hook(member) for tag, member in known.items()}
    optional = NoneType in get_args(kind)

    def read(tree: Any, _: Any) -> Any:
        if tree is None and optional:
            return None
        if not isinstance(tree, dict) or TAG not in tree:
            raise TypeError(f"an object with a {TAG!r} that names its type was expected, not {_short(tree)}")
        tag = tree[TAG]
        if not isinstance(tag, str) or tag not in known:
            raise ValueError(f"unknown type {_short(tag)}; known here: {', '.join(sorted(members))}")
        return hooks[tag](tree, known[tag])

    return read


# ---------------------------------------------------------------- scalars and containers


def _strict(wanted: type, *accepted: type) -> Hook:
    allowed = {wanted, *accepted}  # exact types, so that a bool is not accepted as an int

    def read(tree: Any, kind: Any) -> Any:
        if kind is not wanted and issubclass(kind, Enum):  # cattrs uses the hook of str for a StrEnum
            return kind(tree)
        if type(tree) in allowed:
            return tree
        raise TypeError(f"{_short(tree)} is not {'an' if wanted is int else 'a'} {wanted.__name__}")

    return read


def _read_float(tree: Any, _: Any) -> float:
    if type(tree) is float:
        return tree
    if type(tree) is int:
        return float(tree)
    raise TypeError(f"{_short(tree)} is not a number")


_SCALARS = frozenset({str, int, float, bool})


def _is_scalar_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType) and _SCALARS.issuperset(get_args(kind))


def _read_scalar(kind: Any, _: Converter) -> Hook:
    members = get_args(kind)

    def read(tree: Any, _: Any) -> Any:
        if type(tree) in members:
            return tree
        raise TypeError(f"{_short(tree)} is none of {', '.join(member.__name__ for member in members)}")

    return read


def _write_scalar(_kind: Any, _: Converter) -> Callable[[Any], Any]:
    return _as_it_is


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _write_mapping(kind: Any, converter: Converter) -> Callable[[Any], Any]:
    key_type, value_type = get_args(kind)
    if key_type is str and value_type in _SCALARS:
        return lambda mapping: {key: mapping[key] for key in sorted(mapping)}  # keys sort faster than pairs
    write_value = converter.get_unstructure_hook(value_type)
    if _is_tagged(key_type):
        write_key = converter.get_unstructure_hook(key_type)
        return lambda mapping: [[write_key(key), write_value(mapping[key])] for key in sorted(mapping)]
    return lambda mapping: {key: write_value(mapping[key]) for key in sorted(mapping)}


def _read_mapping(kind: Any, converter: Converter) -> Hook:
    """Read a mapping. JSON's keys are strings, which are converted to integers and enums. Mappings with dataclasses as keys are
    lists of pairs."""
    key_type, value_type = get_args(kind)
    if _is_tagged(key_type):
        pairs: Any = list[tuple[key_type, value_type]]  # type: ignore[valid-type]
        read_pairs = converter.get_structure_hook(pairs)
        return lambda tree, _: dict(read_pairs(tree, pairs))
    if key_type is not str and key_type is not int and not (isinstance(key_type, type) and issubclass(key_type, Enum)):
        raise TypeError(f"{kind}: keys must be str, int or an enum to be JSON keys")
    read_value = converter.get_structure_hook(value_type)

    def read(tree: Any, _: Any) -> Any:
        if type(tree) is not dict:
            raise TypeError(f"{_short(tree)} is not an object")
        if key_type is str:
            return {key: read_value(value, value_type) for key, value in tree.items()}
        return {key_type(key): read_value(value, value_type) for key, value in tree.items()}

    return read


def _is_object(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _may_be_empty(kind: Any) -> bool:
    return _is_object(kind) and all(
        field.default is not MISSING or field.default_factory is not MISSING for field in fields(kind)
    )


def _needs_read_object(kind: Any) -> bool:
    return _is_object(kind) and (kind in former_names.FIELDS or _may_be_empty(kind))


def _read_object(kind: Any, converter: Converter) -> Hook:
    """Read a dataclass, from an object only: without required fields, the hook of cattrs accepts every container."""
    read_fields = converter.gen_structure_attrs_fromdict(kind)
    former = former_names.FIELDS.get(kind, {})

    def read(tree: Any, _: Any) -> Any:
        if type(tree) is not dict:
            raise TypeError(f"{_short(tree)} is not an object")
        if not former.keys().isdisjoint(tree):
            tree = {former.get(name, name): value for name, value in tree.items()}
        return read_fields(tree, kind)

    return read


def _is_set(kind: Any) -> bool:
    return get_origin(kind) in (set, frozenset)


def _write_set(kind: Any, converter: Converter) -> Callable[[Any], Any]:
    write_item = converter.get_unstructure_hook(get_args(kind)[0])
    return lambda values: sorted(write_item(value) for value in values)


def _write_numbers(numbers: Numbers) -> str:
    return f"{numbers.bits:x}"


def _read_numbers(tree: Any, _: Any) -> Numbers:
    """Read a set of numbers; also a list, which earlier versions wrote."""
    if type(tree) is str and (bits := int(tree, 16)) >= 0:
        return Numbers.of_bits(bits)
    if type(tree) is list and all(type(number) is int and number >= 0 for number in tree):
        return Numbers(tree)
    raise TypeError(f"{_short(tree)} is not a set of numbers")


_MESHES_MAX = 1024  # cached meshes; nearly all of thousands of shards have the same mesh


@lru_cache(_MESHES_MAX)
def _write_mesh(mesh: Mesh) -> Any:
    return {"dims": [list(dim) for dim in mesh.dims]}


def _short(tree: object) -> str:
    text = repr(tree)
    return text if len(text) <= 80 else text[:77] + "..."


def _converter(*, detailed: bool) -> Converter:
    converter = Converter(detailed_validation=detailed)
    for scalar in (int, str, bool):
        converter.register_structure_hook(scalar, _strict(scalar))
    converter.register_structure_hook(float, _read_float)
    # The fast converter checks only the types that need it; a failure of the others is explained by the careful one.
    converter.register_structure_hook_factory(_is_object if detailed else _needs_read_object)(_read_object)
    converter.register_structure_hook(Numbers, _read_numbers)
    converter.register_unstructure_hook(Numbers, _write_numbers)
    converter.register_unstructure_hook(Mesh, _write_mesh)
    converter.register_structure_hook_factory(_is_mapping)(_read_mapping)
    converter.register_unstructure_hook_factory(_is_mapping)(_write_mapping)
    converter.register_unstructure_hook_factory(_is_set)(_write_set)
    converter.register_structure_hook_factory(_is_scalar_union)(_read_scalar)
    converter.register_unstructure_hook_factory(_is_scalar_union)(_write_scalar)
    columns.register(converter, Placement, RankRestore, RestoreRun)
    converter.register_structure_hook_factory(_is_tagged)(_read_tagged)
    converter.register_unstructure_hook_factory(_is_tagged)(_write_tagged)
    return converter


_FAST = _converter(detailed=False)
_CAREFUL = _converter(detailed=True)
