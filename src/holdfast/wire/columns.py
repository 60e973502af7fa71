"""Tuples of many like values as columns: what all of them have in common is written once.

A node's inventory is dozens of shards of the same few steps and one mesh, a generation 12,500 places of the same width. In rows
most of the bytes, and of the time, would be names and repetitions:

    [{"rank": 0, "pid": 7, "job": "gpt"}, …]  →  {"_columns": 8, "rank": [0, …], "pid": [7, …], "job": ["gpt"]}

A column of one entry holds for all rows. Fields that are themselves plain records (`ShardKey`) are columns within. Few values
stand in rows, and so does what earlier versions wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from cattrs import Converter

from holdfast.domain.generations import ShardRecord, Shards, rows_of

T = TypeVar("T")

MARK = "_columns"
ROWS_MIN = 4  # fewer stay rows
_SCALARS = (int, str, float, bool)


def register(converter: Converter, *kinds: type) -> None:
    """Let tuples of these dataclasses travel as columns."""

    def is_table(kind: Any) -> bool:
        if kind == Sequence[ShardRecord]:
            return True
        return get_origin(kind) is tuple and get_args(kind)[0] in kinds and get_args(kind)[1:] == (Ellipsis,)

    def table(kind: Any, converter: Converter) -> _Table:
        return (_Shards if kind == Sequence[ShardRecord] else _Table)(get_args(kind)[0], converter)

    def write(kind: Any, converter: Converter) -> Callable[[Any], Any]:
        return table(kind, converter).write

    def read(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
        return table(kind, converter).read

    converter.register_unstructure_hook_factory(is_table)(write)
    converter.register_structure_hook_factory(is_table)(read)


def short(column: Sequence[T]) -> Sequence[T]:
    """A column of equal entries as one."""
    return column[:1] if column and column.count(column[0]) == len(column) else column


class _Table:
    def __init__(self, kind: type, converter: Converter) -> None:
        self._kind = kind
        self.columns = _Columns(kind, converter)
        self._write_row = converter.get_unstructure_hook(kind)
        self._read_row = converter.get_structure_hook(kind)

    def write(self, values: Sequence[Any]) -> Any:
        if len(values) >= ROWS_MIN:
            tree = self._write_columns(values)
            if self.columns.longest(tree) == len(
                values
            ):  # else all are equal, and nothing would say how many there are
                return {MARK: len(values), **tree}
        return [self._write_row(value) for value in values]

    def read(self, tree: Any, _: Any) -> Sequence[Any]:
        if not isinstance(tree, dict):
            if not isinstance(tree, list):
                raise TypeError(f"rows or columns of {self._kind.__name__} were expected, not a {type(tree).__name__}")
            return tuple(self._read_row(row, self._kind) for row in tree)
        if self.columns.longest(tree) != tree.get(MARK):
            raise ValueError(f"the columns of {self._kind.__name__} are not as long as they say")
        return self._read_columns(tree, tree[MARK])

    def _write_columns(self, values: Sequence[Any]) -> dict[str, Any]:
        return self.columns.write(values)

    def _read_columns(self, tree: dict[str, Any], count: int) -> Sequence[Any]:
        return tuple(self.columns.read(tree, count))


class _Shards(_Table):
    """An inventory: from rows and into rows, without a record of any shard."""

    def _write_columns(self, values: Sequence[ShardRecord]) -> dict[str, Any]:
        return self.columns.write_each(zip(*rows_of(values), strict=True))

    def _read_columns(self, tree: dict[str, Any], count: int) -> Shards:
        return Shards(zip(*self.columns.read_each(tree, count), strict=True))


class _Columns:
    def __init__(self, kind: type, converter: Converter) -> None:
        hints = get_type_hints(kind)
        known = [each for each in fields(kind) if each.init]
        self._kind = kind
        self._row = attrgetter(*(each.name for each in known))
        self._each = [(each, _Column(each, hints[each.name], converter)) for each in known]

    def write(self, values: Sequence[Any]) -> dict[str, Any]:
        columns = zip(*map(self._row, values), strict=True)
        return {field.name: column.write(found) for (field, column), found in zip(self._each, columns, strict=True)}

    def write_each(self, columns: Iterator[tuple[Any, ...]]) -> dict[str, Any]:
        """The same from the columns of all fields, those of records within among them, in order."""
        return {
            field.name: column.write(next(columns)) if column.record is None else column.record.write_each(columns)
            for field, column in self._each
        }

    def read_each(self, tree: Any, count: int) -> Iterator[Iterable[Any]]:
        """The columns of all fields, those of records within among them, in order."""
        for field, column in self._each:
            found = tree.get(field.name)
            if column.record is not None and isinstance(found, dict):
                yield from column.record.read_each(found, count)
            else:
                yield column.read(found, count)

    def read(self, tree: Any, count: int) -> Iterable[Any]:
        if not isinstance(tree, dict):
            raise TypeError(f"columns of {self._kind.__name__} were expected, not a {type(tree).__name__}")
        return map(self._kind, *[column.read(tree.get(field.name), count) for field, column in self._each])

    def longest(self, tree: Any) -> int:
        if not isinstance(tree, dict):
            return 0
        return max((column.length(tree.get(field.name)) for field, column in self._each), default=0)


class _Column:
    def __init__(self, field: Field[Any], hint: Any, converter: Converter) -> None:
        self._field = field
        self._hint = hint
        self._scalar = hint in _SCALARS
        self.record = _Columns(hint, converter) if _is_plain(hint) else None
        self._write = converter.get_unstructure_hook(hint)
        self._read = converter.get_structure_hook(hint)

    def write(self, values: Sequence[Any]) -> Any:
        if self.record is not None:
            return self.record.write(values)
        values = short(values)
        return list(values) if self._scalar else [self._write(value) for value in values]

    def length(self, tree: Any) -> int:
        if self.record is not None:
            return self.record.longest(tree)
        return len(tree) if isinstance(tree, list) else 0

    def read(self, tree: Any, count: int) -> Iterable[Any]:
        name = self._field.name
        if self.record is not None and tree is not None:
            return self.record.read(tree, count)
        if tree is None:
            return self._absent(count)
        if not isinstance(tree, list) or len(tree) not in (1, count):
            raise ValueError(f"the column {name} is not as long as the others")
        if not (self._scalar and self._hint is not float and set(map(type, tree)) == {self._hint}):
            tree = [self._read(value, self._hint) for value in tree]
        return tree if len(tree) == count else repeat(tree[0], count)

    def _absent(self, count: int) -> Iterable[Any]:
        if self._field.default is not MISSING:
            return repeat(self._field.default, count)
        if self._field.default_factory is not MISSING:
            return repeat(self._field.default_factory(), count)
        raise KeyError(self._field.name)


def _is_plain(hint: Any) -> bool:
    """A record of scalars only, which checks nothing when it is made."""
    if not is_dataclass(hint) or not isinstance(hint, type) or hasattr(hint, "__post_init__"):
        return False
    return all(each in _SCALARS for each in get_type_hints(hint).values())
