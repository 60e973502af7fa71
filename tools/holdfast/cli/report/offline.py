"""Reports from a history file, when no supervisor answers: the file is copied and never changed."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import anyio

from holdfast.domain.errors import InvalidSpec, NotFound
from holdfast.supervisor.history.ledger import to_history
from holdfast.supervisor.history.protocol import History, Run
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.history.sqlite_file import LAYOUT
from holdfast.supervisor.report.json_values import fleet_values
from holdfast.supervisor.report.making import make_fleet_report
from holdfast.supervisor.report.numbers import Json, Report, Terms
from holdfast.supervisor.report.sources import Range, incidents_of, newest_moment, report_of_run, timeline_of

T = TypeVar("T")

POINTS_MAX = 800  # of the curve


def of_job(path: Path, name: str, given: Terms) -> tuple[Report, list[Json], Json]:
    """Return the report, the incidents and the time line of the newest run of a job."""
    return _from_copy(path, lambda history: _of_job(history, path, name, given))


def of_fleet(path: Path, given: Terms, part: Range) -> dict[str, Any]:
    """Return the report of all jobs, in the form of the API."""

    async def make(history: History) -> dict[str, Any]:
        return fleet_values(await make_fleet_report(history, given, part, time.time()))

    return _from_copy(path, make)


async def _of_job(history: History, path: Path, name: str, given: Terms) -> tuple[Report, list[Json], Json]:
    run = await history.run(name)
    if run is None:
        raise NotFound(
            f"{path} has no job {name}; it has {', '.join(await history.jobs(before=float('inf'))) or 'none'}"
        )
    now = newest_moment(run)  # the file ends here if the run had not ended
    made = report_of_run(run, given, now)
    return made, list(incidents_of(run.incidents)), await _timeline(history, name, run, now)


async def _timeline(history: History, name: str, run: Run, now: float) -> Json:
    past = to_history(run, now)
    series = await history.series(name, since=past.started_at, until=past.ended_at, points_max=POINTS_MAX)
    return timeline_of(past, series)


def _from_copy(path: Path, make: Callable[[History], Awaitable[T]]) -> T:
    async def run() -> T:
        with tempfile.TemporaryDirectory(prefix="holdfast-report-") as directory:
            copy = Path(directory) / "history.sqlite3"
            await anyio.to_thread.run_sync(_copy, path, copy)
            history = await SqliteHistory.open(copy)
            try:
                return await make(history)
            finally:
                await history.aclose()

    return anyio.run(run)


def _copy(path: Path, copy: Path) -> None:
    """Copy the file, also while a supervisor writes it. Raises `InvalidSpec` unless it is a history that this version reads."""
    expected = "a history.sqlite3 of HOLDFAST_DATA_DIR"
    if not path.is_file():
        raise InvalidSpec("--history", str(path), expected)
    try:
        with (
            closing(sqlite3.connect(_as_uri(path, copy), uri=True)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            (layout,) = source.execute("PRAGMA user_version").fetchone()
            source.backup(target)
    except (sqlite3.Error, OSError) as error:
        raise InvalidSpec("--history", str(path), f"{expected}: {error}") from error
    if not 1 <= layout <= LAYOUT:
        raise InvalidSpec("--history", str(path), f"{expected}, of this version or an earlier one (layout {layout})")


def _as_uri(path: Path, copy: Path) -> str:
    """Return the URI with which SQLite creates no files next to the database, which its supervisor might not be able to write.

    SQLite creates such files (-wal, -shm) when it reads a database without them, unless the URI has `immutable`. While a
    supervisor writes, both exist. After a crash of the machine only -wal may exist; then database and -wal are copied first."""
    log, index = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    if not log.exists():
        return f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    if index.exists():
        return f"{path.resolve().as_uri()}?mode=ro"
    beside = copy.with_name("crashed.sqlite3")
    shutil.copyfile(path, beside)
    shutil.copyfile(log, beside.with_name(beside.name + "-wal"))
    return beside.as_uri()
