"""Writes tuples of many similar values as columns, so that equal values are written once.

A node's inventory has dozens of shards of the same few steps and one mesh, a generation has 12,500 placements of the same
width. In rows, most of the bytes and of the time would be spent on names and repetitions:

    [{"rank": 0, "pid": 7, "job": "gpt"}, …]  →  {"_columns": 8, "rank": [0, …], "pid": [7, …], "job": ["gpt"]}

A column with one entry applies to all rows. Fields that are themselves plain records (`ShardKey`) are nested columns. Tuples of
few values are written in rows. Rows of earlier versions are read as well.

Shards and workers are runs of ranks (`domain.runs`). A value that is equal in a run is written once. The values of a run are
in the order of its fields. A mesh and a text are `null` if they are those of the run before. Earlier versions wrote objects
with the fields' names:

    [ShardRun(1000, 50, …, rank=8, width=2, digests="a,b")]  →  {"_runs": [[1000, 50, …, 8, 2, …, "a,b", ""]]}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

from cattrs import Converter

from holdfast.domain.generations import ShardPlace, ShardRecord
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.runs import (
    PlaceRun,
    Places,
    ShardRun,
    Shards,
    WorkerRun,
    Workers,
    place_runs,
    shard_runs,
    short,
    worker_runs,
)

MARK, RUNS = "_columns", "_runs"
ROWS_MIN = 4  # fewer values are written in rows
LARGE, LARGE_MAX = 1000, 2  # rows from which on the columns of a tuple are cached, and number of cached tuples
_SCALARS = (int, str, float, bool)
_TEXTS = ("digests", "roots")  # of a run: the same in a node's memory and on its disk
_NO_VALUE = object()


def register(converter: Converter, *kinds: type) -> None:
    """Write tuples of these dataclasses as columns, and shards and workers as runs."""
    in_runs: dict[Any, Callable[[Converter], _Table]] = {
        Sequence[ShardRecord]: partial(_Runs, ShardRecord, ShardRun, shard_runs, Shards),
        Sequence[ShardPlace]: partial(_Runs, ShardPlace, PlaceRun, place_runs, Places),
        Sequence[RunningWorker]: partial(_Runs, RunningWorker, WorkerRun, worker_runs, Workers),
    }

    def is_table(kind: Any) -> bool:
        return kind in in_runs or (
            get_origin(kind) is tuple and get_args(kind)[0] in kinds and get_args(kind)[1:] == (Ellipsis,)
        )

    def table(kind: Any, converter: Converter) -> _Table:
        return in_runs[kind](converter) if kind in in_runs else _Table(get_args(kind)[0], converter)

    def write(kind: Any, converter: Converter) -> Callable[[Any], Any]:
        return table(kind, converter).write

    def read(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
        return table(kind, converter).read

    converter.register_unstructure_hook_factory(is_table)(write)
    converter.register_structure_hook_factory(is_table)(read)


class _Table:
    def __init__(self, kind: type, converter: Converter) -> None:
        self._kind = kind
        self.columns = _Columns(kind, converter)
        self._write_row = converter.get_unstructure_hook(kind)
        self._read_row = converter.get_structure_hook(kind)
        self._large: deque[tuple[Sequence[Any], dict[str, Any]]] = deque(maxlen=LARGE_MAX)

    def write(self, values: Sequence[Any]) -> Any:
        if len(values) >= ROWS_MIN:
            tree = self._written(values)
            # otherwise all are equal, and the columns would not show their number
            if self.columns.longest(tree) == len(values):
                return {MARK: len(values), **tree}
        return [self._write_row(value) for value in values]

    def _written(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return the columns. Those of a large tuple are cached, because the placements of a generation are written in the
        state, in its orders and in five of its records."""
        if len(values) < LARGE:
            return self.columns.write(values)
        for known, tree in self._large:
            if known is values:
                return tree
        self._large.append((values, self.columns.write(values)))
        return self._large[-1][1]

    def read(self, tree: Any, _: Any) -> Sequence[Any]:
        if not isinstance(tree, dict):
            if not isinstance(tree, list):
                raise TypeError(f"rows or columns of {self._kind.__name__} were expected, not a {type(tree).__name__}")
            return tuple(self._read_row(row, self._kind) for row in tree)
        if self.columns.longest(tree) != tree.get(MARK):
            raise ValueError(f"the columns of {self._kind.__name__} do not have the length that is written with them")
        return tuple(self.columns.read(tree, tree[MARK]))


class _Runs(_Table):
    """Records in runs, without an object per record. Also reads rows and columns, which earlier versions wrote."""

    def __init__(
        self,
        kind: type,
        run: type[Any],
        runs_of: Callable[[Iterable[Any]], Sequence[Any]],
        made: Callable[[Iterable[Any]], Sequence[Any]],
        converter: Converter,
    ) -> None:
        super().__init__(kind, converter)
        self._run, self._runs_of, self._made = run, runs_of, made
        self._parts = [_Part(name, hint, converter) for name, hint in get_type_hints(run).items()]
        # Values that successive runs often have in common: a mesh, which is also converted only once, and long texts.
        self._writes = [
            (at, _newest(part.write) if part.converted else _unchanged)
            for at, part in enumerate(self._parts)
            if part.repeats
        ]

    def write(self, values: Sequence[Any]) -> Any:
        runs = self._runs_of(values)
        if not (runs and runs[0].width >= ROWS_MIN) and sum([run.width for run in runs]) < ROWS_MIN:
            return super().write(values)
        if not self._writes:
            return {RUNS: runs}  # a tuple is written as a list
        rows, last = [], (_NO_VALUE,) * len(self._parts)
        for run in runs:
            row = list(run)
            for at, write in self._writes:
                value, before = run[at], last[at]
                row[at] = None if value is before or value == before else write(value)
            rows.append(row)
            last = run
        return {RUNS: rows}

    def read(self, tree: Any, kind: Any) -> Sequence[Any]:
        if not isinstance(tree, dict) or RUNS not in tree:
            return self._made(self._runs_of(super().read(tree, kind)))
        runs: list[Any] = []
        for run in tree[RUNS]:
            runs.append(self._read_run(run, runs[-1] if runs else None))
        return self._made(runs)

    def _read_run(self, tree: Any, last: Any) -> Any:
        """`last`: the run before, which has the values that are None in a list."""
        if isinstance(tree, list):
            values = self._listed(tree, last)
        else:
            values = [
                self._absent(part) if part.name not in tree else part.read(tree[part.name]) for part in self._parts
            ]
        run = self._run(*values)
        if not run.fits:
            raise ValueError(f"a run of {run.width} ranks of {self._kind.__name__} has another number of values")
        return run

    def _listed(self, tree: list[Any], last: Any) -> list[Any]:
        """The values of a run, without those that a newer version added at the end."""
        parts = zip(self._parts, tree, last or tree, strict=False)
        values = [
            old if value is None and part.repeats and last is not None else part.read(value)
            for part, value, old in parts
        ]
        return [*values, *map(self._absent, self._parts[len(tree) :])]

    def _absent(self, part: _Part) -> Any:
        """The value that an earlier version did not write. Raises KeyError if it wrote one always."""
        if part.name not in self._run._field_defaults:
            raise KeyError(part.name)
        return self._run._field_defaults[part.name]


class _Part:
    """One value of a run, or one for each of its ranks."""

    def __init__(self, name: str, hint: Any, converter: Converter) -> None:
        self.name = name
        self.column = get_origin(hint) is tuple
        self._hint = get_args(hint)[0] if self.column else hint
        self._read = converter.get_structure_hook(self._hint)
        unstructure = converter.get_unstructure_hook(self._hint)
        if self.column:
            self.write: Callable[[Any], Any] = _unchanged
        else:
            self.write = unstructure if self._hint not in _SCALARS else _unchanged
        self.converted = self.write is not _unchanged
        self.repeats = self.converted or name in _TEXTS

    def read(self, tree: Any) -> Any:
        if not self.column:
            return self._read(tree, self._hint)
        if self._hint is float or set(map(type, tree)) != {self._hint}:
            tree = [self._read(value, self._hint) for value in tree]
        return tuple(tree)


def _unchanged(value: Any) -> Any:
    return value


def _newest(write: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`write`, with the result for the newest object cached."""
    known: tuple[Any, Any] = (write, None)  # no value to write is `write` itself

    def newest(value: Any) -> Any:
        nonlocal known
        if value is not known[0]:
            known = value, write(value)
        return known[1]

    return newest


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
        self._is_json = self._scalar or (get_origin(hint) is tuple and set(get_args(hint)) <= {*_SCALARS, ...})
        self.record = _Columns(hint, converter) if _is_plain(hint) else None
        self._write = converter.get_unstructure_hook(hint)
        self._read = converter.get_structure_hook(hint)
        items = get_args(hint) if get_origin(hint) is tuple else ()
        rows = len(items) == 2 and items[1] is ... and _is_plain(items[0])
        self._write_item = converter.get_unstructure_hook(items[0]) if rows else None

    def write(self, values: Sequence[Any]) -> Any:
        if self.record is not None:
            return self.record.write(values)
        values = short(values)
        if self._is_json:
            return list(values)
        if self._write_item is not None:
            return _written_once(self._write_item, values)
        return [self._write(value) for value in values]

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


def _written_once(write: Callable[[Any], Any], rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the rows with each object converted once: many shards of a checkpoint have the same sources."""
    known: dict[int, Any] = {}  # by the object's id, which is unique while `rows` exist
    written = []
    for row in rows:
        trees = []
        for each in row:
            if (tree := known.get(id(each))) is None:
                tree = known[id(each)] = write(each)
            trees.append(tree)
        written.append(trees)
    return written


def _is_plain(hint: Any) -> bool:
    """Whether a type is a record of scalars only, without checks in its constructor."""
    if not is_dataclass(hint) or not isinstance(hint, type) or hasattr(hint, "__post_init__"):
        return False
    return all(each in _SCALARS for each in get_type_hints(hint).values())
