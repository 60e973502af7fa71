"""Runs: the shards, or the workers, of consecutive ranks as one value.

12,500 nodes report 300,000 shards with each save. Shards are reported, stored, compared and selected for a restore in runs,
three per node. Little code needs a single shard; its record is created on access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, overload

from holdfast.domain.construct import constructor_of
from holdfast.domain.generations import ShardKey, ShardPlace, ShardRecord
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import RunningWorker

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


def short(column: Sequence[T]) -> Sequence[T]:
    """Shorten a column of equal entries to a single entry."""
    return column[:1] if column and column.count(column[0]) == len(column) else column


def full(column: tuple[T, ...], width: int) -> tuple[T, ...]:
    """The inverse of `short`: one entry for each of `width` rows."""
    return column * width if len(column) == 1 else column


def _together(items: Iterable[T], follows: Callable[[T, T], bool]) -> list[list[T]]:
    """Split the items into groups, as long as possible and in the same order, in which each item follows the previous one."""
    groups: list[list[T]] = []
    for each in items:
        if groups and follows(groups[-1][-1], each):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


class _Run(Protocol[R_co]):
    """A tuple that stands for `width` records. Its first two values are equal in all of these records."""

    @property
    def width(self) -> int: ...
    def __getitem__(self, place: slice, /) -> tuple[Any, ...]: ...
    def records(self) -> Iterator[R_co]: ...


class _InRuns(Sequence[R_co], Generic[R_co]):
    """A sequence of records, stored as runs. Equal to any sequence of the same records."""

    __slots__ = ("_records", "runs")

    def __init__(self, runs: Iterable[_Run[R_co]]) -> None:
        self.runs = tuple(runs)
        self._records: tuple[R_co, ...] | None = None

    @property
    def records(self) -> tuple[R_co, ...]:
        if self._records is None:
            self._records = tuple(chain.from_iterable(run.records() for run in self.runs))
        return self._records

    def __len__(self) -> int:
        return sum([run.width for run in self.runs])

    def __bool__(self) -> bool:
        return bool(self.runs)

    @overload
    def __getitem__(self, place: int) -> R_co: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[R_co, ...]: ...
    def __getitem__(self, place: int | slice) -> R_co | tuple[R_co, ...]:
        return self.records[place]

    def __iter__(self) -> Iterator[R_co]:
        return iter(self.records)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _InRuns):
            if self.runs == other.runs or not (self.runs and other.runs):
                return self.runs == other.runs
            if self.runs[0][:2] != other.runs[0][:2]:
                return False  # another step or generation: nearly always the case
        elif not isinstance(other, tuple):
            return False
        return len(self) == len(other) and self.records == tuple(other)

    def __hash__(self) -> int:
        return hash(self.records)

    def __repr__(self) -> str:
        return repr(self.records)


# ---------------------------------------------------------------- shards


class ShardRun(NamedTuple):
    """Shards of consecutive ranks in one tier of a node, of one step and one owner."""

    attempt: int
    step: int
    mesh: Mesh
    tier: str
    owner: str
    rank: int  # the first
    width: int
    sizes: tuple[int, ...]  # by rank; a single entry applies to all ranks
    digests: str  # by rank, separated by commas, because most digests are only stored and compared
    roots: str = ""  # in the same way; empty = none is known

    @property
    def end(self) -> int:
        """The first rank after the run."""
        return self.rank + self.width

    @property
    def fits(self) -> bool:
        """Whether the numbers of values and of ranks match."""
        commas, width = self.width - 1, self.width
        if self.digests.count(",") != commas or len(self.sizes) not in (1, width):
            return False
        return not self.roots or self.roots.count(",") == commas

    def part(self, begin: int, end: int) -> ShardRun:
        """The shards of ranks `begin … end - 1`."""
        ranks = slice(begin - self.rank, end - self.rank)
        sizes = self.sizes if len(self.sizes) == 1 else self.sizes[ranks]
        digests, roots = ",".join(self.digests.split(",")[ranks]), ",".join(self.roots.split(",")[ranks])
        attempt, step, mesh, tier, owner, *_ = self
        return ShardRun(attempt, step, mesh, tier, owner, begin, end - begin, sizes, digests, roots)

    def records(self) -> Iterator[ShardRecord]:
        sizes = full(self.sizes, self.width)
        roots = self.roots.split(",") if self.roots else [""] * self.width
        for rank, (size, digest, root) in enumerate(zip(sizes, self.digests.split(","), roots, strict=True), self.rank):
            key = ShardKey(self.attempt, self.step, rank)
            yield ShardRecord(key, self.mesh, self.tier, size, digest, self.owner, root)


class Shards(_InRuns[ShardRecord]):
    """The shards of an inventory."""

    __slots__ = ()
    runs: tuple[ShardRun, ...]


def shard_runs(shards: Iterable[ShardRecord]) -> tuple[ShardRun, ...]:
    """Return the shards as runs, as long as possible and in the same order. Raises ValueError for a digest with a comma."""
    if isinstance(shards, Shards):
        return shards.runs
    return tuple(map(_shard_run, _together(shards, _shard_follows)))


def _shard_follows(last: ShardRecord, each: ShardRecord) -> bool:
    before, after = last.key, each.key
    return (
        (before.attempt, before.step, before.rank + 1) == (after.attempt, after.step, after.rank)
        and (last.tier, last.owner) == (each.tier, each.owner)
        and last.mesh == each.mesh
    )


def _shard_run(shards: Sequence[ShardRecord]) -> ShardRun:
    first, key = shards[0], shards[0].key
    if len(shards) == 1 and "," not in first.digest and "," not in first.root:
        of_one = (first.mesh, first.tier, first.owner, key.rank, 1, (first.size,), first.digest, first.root)
        return ShardRun(key.attempt, key.step, *of_one)
    sizes, digests = tuple(short([each.size for each in shards])), ",".join([each.digest for each in shards])
    roots = ",".join([each.root for each in shards]) if any(each.root for each in shards) else ""
    of_all = (key.attempt, key.step, first.mesh, first.tier, first.owner)
    run = ShardRun(*of_all, key.rank, len(shards), sizes, digests, roots)
    if not run.fits:
        raise ValueError(f"the digests {digests!r}, {roots!r} cannot be separated: a digest must not contain a comma")
    return run


class PlaceRun(NamedTuple):
    """Places of shards of consecutive ranks in one tier of a node, of one step."""

    attempt: int
    step: int
    tier: str
    rank: int  # the first
    width: int

    @property
    def end(self) -> int:
        """The first rank after the run."""
        return self.rank + self.width

    @property
    def fits(self) -> bool:
        return self.width > 0

    def records(self) -> Iterator[ShardPlace]:
        for rank in range(self.rank, self.end):
            yield ShardPlace(ShardKey(self.attempt, self.step, rank), self.tier)


class Places(_InRuns[ShardPlace]):
    """The places of shards that a node no longer has."""

    __slots__ = ()
    runs: tuple[PlaceRun, ...]


def place_runs(places: Iterable[ShardPlace]) -> tuple[PlaceRun, ...]:
    """Return the places as runs, as long as possible and in the same order."""
    if isinstance(places, Places):
        return places.runs
    groups = _together(places, _place_follows)
    return tuple([PlaceRun(*_age_of(each[0]), each[0].key.rank, len(each)) for each in groups])


def _place_follows(last: ShardPlace, each: ShardPlace) -> bool:
    return _age_of(last) == _age_of(each) and last.key.rank + 1 == each.key.rank


def _age_of(place: ShardPlace) -> tuple[int, int, str]:
    return place.key.attempt, place.key.step, place.tier


# ---------------------------------------------------------------- workers


class WorkerRun(NamedTuple):
    """Workers of consecutive ranks of one generation."""

    job: str
    generation: int
    rank: int  # the first
    width: int
    pids: tuple[int, ...]  # by rank
    since: tuple[float, ...]  # by rank; a single entry applies to all ranks

    @property
    def end(self) -> int:
        """The first rank after the run."""
        return self.rank + self.width

    @property
    def fits(self) -> bool:
        """Whether the numbers of values and of ranks match."""
        return len(self.pids) == self.width and len(self.since) in (1, self.width)

    def records(self) -> Iterator[RunningWorker]:
        times = full(self.since, self.width)
        for rank, (pid, since) in enumerate(zip(self.pids, times, strict=True), self.rank):
            yield _worker(self.job, self.generation, rank, pid, since)


_worker: Callable[..., RunningWorker] = constructor_of(RunningWorker)


class Workers(_InRuns[RunningWorker]):
    """The workers of a node."""

    __slots__ = ()
    runs: tuple[WorkerRun, ...]


def worker_runs(workers: Iterable[RunningWorker]) -> tuple[WorkerRun, ...]:
    """Return the workers as runs, as long as possible and in the same order."""
    if isinstance(workers, Workers):
        return workers.runs
    return tuple(map(_worker_run, _together(workers, _worker_follows)))


def _worker_follows(last: RunningWorker, each: RunningWorker) -> bool:
    return (last.job, last.generation, last.rank + 1) == (each.job, each.generation, each.rank)


def _worker_run(workers: Sequence[RunningWorker]) -> WorkerRun:
    first, since = workers[0], tuple(short([each.since for each in workers]))
    pids = tuple([each.pid for each in workers])
    return WorkerRun(first.job, first.generation, first.rank, len(workers), pids, since)
