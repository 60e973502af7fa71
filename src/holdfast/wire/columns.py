"""Tuples of many like values as columns: what all of them have in common is written once.

A node's inventory is dozens of shards of the same few steps and one mesh, a generation 12,500 places of the same width. In rows
most of the bytes, and of the time, would be names and repetitions:

    [{"rank": 0, "pid": 7, "job": "gpt"}, …]  →  {"_columns": 8, "rank": [0, …], "pid": [7, …], "job": ["gpt"]}

A column of one entry holds for all rows. Fields that are themselves plain records (`ShardKey`) are columns within. Few values
stand in rows, and so does what earlier versions wrote.

Shards and workers are runs of ranks (`domain.runs`), and what is one value in a run is written once:

    [ShardRun(…, rank=8, width=2, digests="a,b")]  →  {"_runs": [{…, "rank": 8, "width": 2, "digests": "a,b"}]}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache, partial
from itertools import repeat
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

from cattrs import Converter

from holdfast.domain.generations import ShardRecord
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.runs import ShardRun, Shards, WorkerRun, Workers, shard_runs, short, worker_runs

MARK, RUNS = "_columns", "_runs"
ROWS_MIN = 4  # fewer stay rows
LARGE, LARGE_MAX = 1000, 2  # the columns of so many rows are remembered, of so many tuples
_SCALARS = (int, str, float, bool)


def register(converter: Converter, *kinds: type) -> None:
    """Let tuples of these dataclasses travel as columns, and shards and workers as runs."""
    in_runs: dict[Any, Callable[[Converter], _Table]] = {
        Sequence[ShardRecord]: partial(_Runs, ShardRecord, ShardRun, shard_runs, Shards),
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
            if self.columns.longest(tree) == len(
                values
            ):  # else all are equal, and nothing would say how many there are
                return {MARK: len(values), **tree}
        return [self._write_row(value) for value in values]

    def _written(self, values: Sequence[Any]) -> dict[str, Any]:
        """The columns. Those of a large tuple are remembered: the places of a generation stand in the state, in its orders
        and in five records of it."""
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
            raise ValueError(f"the columns of {self._kind.__name__} are not as long as they say")
        return tuple(self.columns.read(tree, tree[MARK]))


class _Runs(_Table):
    """Records in runs, without a record of any of them. Rows and columns, as earlier versions wrote them, are read."""

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
        # What all runs of a fleet have in common, its mesh, is written once.
        self._writes = [(part.name, lru_cache(part.write)) for part in self._parts if part.write is not _as_it_is]

    def write(self, values: Sequence[Any]) -> Any:
        runs = self._runs_of(values)
        if sum([run.width for run in runs]) < ROWS_MIN:
            return super().write(values)
        rows = [run._asdict() for run in runs]
        for row in rows:
            for name, write in self._writes:
                row[name] = write(row[name])
        return {RUNS: rows}

    def read(self, tree: Any, kind: Any) -> Sequence[Any]:
        if not isinstance(tree, dict) or RUNS not in tree:
            return self._made(self._runs_of(super().read(tree, kind)))
        return self._made([self._read_run(run) for run in tree[RUNS]])

    def _read_run(self, tree: Any) -> Any:
        run = self._run(*[part.read(tree[part.name]) for part in self._parts])
        if not run.fits:
            raise ValueError(f"a run of {run.width} ranks of {self._kind.__name__} has not as many values")
        return run


class _Part:
    """One value of a run, or one for each of its ranks."""

    def __init__(self, name: str, hint: Any, converter: Converter) -> None:
        self.name = name
        self.column = get_origin(hint) is tuple
        self._hint = get_args(hint)[0] if self.column else hint
        self._read = converter.get_structure_hook(self._hint)
        unstructure = converter.get_unstructure_hook(self._hint)
        if self.column:
            self.write: Callable[[Any], Any] = _as_it_is
        else:
            self.write = unstructure if self._hint not in _SCALARS else _as_it_is

    def read(self, tree: Any) -> Any:
        if not self.column:
            return self._read(tree, self._hint)
        if self._hint is float or set(map(type, tree)) != {self._hint}:
            tree = [self._read(value, self._hint) for value in tree]
        return tuple(tree)


def _as_it_is(value: Any) -> Any:
    return value


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
