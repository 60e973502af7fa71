"""The history in one sqlite3 file. It is used in worker threads, one at a time, so the event loop never waits for a disk.

It is a projection: the streams can be read again, so a crash can lose only the last moments. A file that is damaged or has an
newer layout is renamed, and a new one is built from the entries that the streams still contain. A version that knows the layout
uses the renamed file again.
"""

from __future__ import annotations

import math
import sqlite3
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, assert_never

import anyio
import anyio.to_thread
import structlog

from holdfast.domain.errors import OutOfSpace, Unavailable
from holdfast.domain.findings import StepRecord
from holdfast.domain.incidents import Incident
from holdfast.supervisor.history.booked import Booked
from holdfast.supervisor.history.protocol import ActionEntry, EventEntry, Run, Series
from holdfast.supervisor.history.sqlite_file import open_file
from holdfast.supervisor.protocol import (
    FindingJudged,
    GenerationChanged,
    IncidentChanged,
    JobAccepted,
    JobChanged,
    NodeChanged,
    Noted,
    PolicyChanged,
)
from holdfast.supervisor.published import LeaderChanged, OperationDone, PolicyAsked, Published
from holdfast.wire import records

STEPS_MAX = 100_000  # kept per job; older ones are added to its sums
EVENTS_MAX = 1_000_000  # kept in total
ASKED_MAX = 10_000  # questions to policies, kept in total: one of a large job has 30 KB
TRIM_EVERY = 10_000  # rows written between two checks of the limits
STEPS_PER_POINT = 5  # so that a curve shows rates and not the beat of single steps
_STEP = "job, generation, step, world_size, started_at, ended_at, tokens, loss, stall_s, flops"
_row_of_step = attrgetter(*_STEP.split(", "))
T = TypeVar("T")
log = structlog.get_logger("holdfast.supervisor.history.protocol")


class SqliteHistory:
    """A `History`. Open with `await SqliteHistory.open(path)`."""

    def __init__(self, path: Path, database: sqlite3.Connection, *, steps_max: int, events_max: int) -> None:
        self._path = path
        self._database = database
        self._steps_max = steps_max
        self._events_max = events_max
        self._untrimmed = 0
        self._one_at_a_time = anyio.CapacityLimiter(1)

    @classmethod
    async def open(cls, path: Path, *, steps_max: int = STEPS_MAX, events_max: int = EVENTS_MAX) -> SqliteHistory:
        """Raises `Unavailable` if the file cannot be written."""
        database = await anyio.to_thread.run_sync(open_file, path)
        return cls(path, database, steps_max=steps_max, events_max=events_max)

    async def aclose(self) -> None:
        await anyio.to_thread.run_sync(self._database.close, limiter=self._one_at_a_time)

    # ------------------------------------------------------------------ writing

    async def add_events(self, events: Sequence[EventEntry], cursor: str) -> None:
        await self._run(lambda: self._add_events(events, cursor))

    async def add_steps(self, steps: Sequence[StepRecord], cursor: str) -> None:
        await self._run(lambda: self._add_steps(steps, cursor))

    def _add_events(self, events: Sequence[EventEntry], cursor: str) -> None:
        with self._database as database:
            for entry in events:
                self._add_event(database, entry)
            _set_cursor(database, "events", cursor)
            self._count(len(events))

    def _add_event(self, database: sqlite3.Connection, entry: EventEntry) -> None:
        record = entry.record
        subject, job = _about(record)
        if isinstance(record, PolicyAsked):
            database.execute(
                "INSERT OR IGNORE INTO asked (position, job, at, data) VALUES (?, ?, ?, ?)",
                (entry.position, job, record.at, zlib.compress(records.dumps(record, PolicyAsked))),
            )
            return
        added = database.execute(
            "INSERT OR IGNORE INTO events (position, type, subject, job, at, data) VALUES (?, ?, ?, ?, ?, ?)",
            (entry.position, type(record).__name__, subject, job, record.at, records.dumps(record, Published)),
        )
        match record:
            case IncidentChanged() if added.rowcount:
                _put_incident(database, record.incident)
            case FindingJudged() if added.rowcount:
                _put_finding(database, record)
            case _:
                pass

    def _add_steps(self, steps: Sequence[StepRecord], cursor: str) -> None:
        with self._database as database:
            database.executemany(
                f"INSERT OR IGNORE INTO steps ({_STEP}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                map(_row_of_step, steps),
            )
            _set_cursor(database, "steps", cursor)
            self._count(len(steps))

    def _count(self, rows: int) -> None:
        self._untrimmed += rows
        if self._untrimmed < min(TRIM_EVERY, self._steps_max, self._events_max):
            return
        self._untrimmed = 0
        for (job,) in self._database.execute("SELECT DISTINCT job FROM steps").fetchall():
            row = self._database.execute(
                "SELECT ended_at FROM steps WHERE job = ? ORDER BY ended_at DESC LIMIT 1 OFFSET ?",
                (job, self._steps_max),
            ).fetchone()
            if row is not None:
                self._book(job, row[0])
                self._database.execute("DELETE FROM steps WHERE job = ? AND ended_at <= ?", (job, row[0]))
        kept = dict.fromkeys(("events", "incidents", "actions", "findings"), self._events_max)
        for table, most in {**kept, "asked": min(ASKED_MAX, self._events_max)}.items():
            self._database.execute(
                f"DELETE FROM {table} WHERE number <= (SELECT max(number) FROM {table}) - ?", (most,)
            )

    def _book(self, job: str, until: float) -> None:
        """Add up the steps of the newest run that are about to be deleted. Those of earlier runs are never read."""
        accepted = self._database.execute(
            "SELECT data FROM events WHERE type = 'JobAccepted' AND subject = ? ORDER BY number DESC LIMIT 1", (job,)
        ).fetchone()
        if accepted is None:
            return
        run = records.loads(accepted[0], Published)
        booked = self._booked(job, run.at) or Booked.empty(run.at, run.spec.mesh.world_size)
        rows = self._database.execute(
            f"SELECT {_STEP} FROM steps WHERE job = ? AND ended_at >= ? AND ended_at <= ? ORDER BY generation, step",
            (job, run.at, until),
        )
        booked.add(StepRecord(*row) for row in rows)
        self._database.execute(
            "INSERT INTO booked VALUES (?, ?, ?) "
            "ON CONFLICT (job) DO UPDATE SET accepted_at = excluded.accepted_at, data = excluded.data",
            (job, run.at, records.dumps(booked, Booked)),
        )

    def _booked(self, job: str, accepted_at: float) -> Booked | None:
        row = self._database.execute(
            "SELECT data FROM booked WHERE job = ? AND accepted_at = ?", (job, accepted_at)
        ).fetchone()
        return records.loads(row[0], Booked) if row is not None else None

    # ------------------------------------------------------------------ reading

    async def cursors(self) -> tuple[str, str]:
        rows = dict(await self._rows("SELECT stream, position FROM cursors"))
        return rows.get("events", "0"), rows.get("steps", "0")

    async def incident(self, incident_id: str) -> Incident | None:
        rows = await self._rows("SELECT data FROM incidents WHERE id = ?", incident_id)
        return records.loads(rows[0][0], Incident) if rows else None

    async def incidents(
        self, *, job: str | None = None, node: str | None = None, before: int | None = None, limit: int
    ) -> list[tuple[int, Incident]]:
        rows = await self._page("incidents", "number, data", {"job": job, "node": node}, before, limit)
        return [(number, records.loads(data, Incident)) for number, data in rows]

    async def finding(self, finding_id: str) -> FindingJudged | None:
        rows = await self._rows("SELECT data FROM findings WHERE id = ?", finding_id)
        return records.loads(rows[0][0], FindingJudged) if rows else None

    async def findings(
        self, *, job: str | None = None, node: str | None = None, before: int | None = None, limit: int
    ) -> list[tuple[int, FindingJudged]]:
        rows = await self._page("findings", "number, data", {"job": job, "node": node}, before, limit)
        return [(number, records.loads(data, FindingJudged)) for number, data in rows]

    async def actions(self, *, job: str | None, before: int | None, limit: int) -> list[ActionEntry]:
        rows = await self._page("actions", "number, at, data", {"job": job}, before, limit)
        done = []
        for number, at, data in rows:
            incident = records.loads(data, Incident)
            assert incident.action is not None, "an action row is written with its incident's action"
            done.append(ActionEntry(number, incident, incident.action, at))
        return done

    async def policies(self, job: str) -> list[PolicyChanged]:
        accepted = await self._events_of("JobAccepted", job)
        if not accepted:
            return []
        first = PolicyChanged(accepted[-1].at, job, accepted[-1].spec.policy_spec)
        changed: list[PolicyChanged] = await self._events_of("PolicyChanged", job)
        return [first, *(each for each in changed if each.at >= first.at)]

    async def asked(self, job: str, *, since: float, before: int | None, limit: int) -> list[tuple[int, PolicyAsked]]:
        rows = await self._rows(
            "SELECT number, data FROM asked WHERE job = ? AND at >= ? AND number < ? ORDER BY number DESC LIMIT ?",
            job,
            since,
            sys.maxsize if before is None else before,
            limit,
        )
        return [(number, records.loads(zlib.decompress(data), PolicyAsked)) for number, data in rows]

    async def operation(self, operation: str) -> OperationDone | None:
        rows = await self._events_of("OperationDone", operation)
        return rows[0] if rows else None

    async def leader(self) -> LeaderChanged | None:
        rows = await self._rows("SELECT data FROM events WHERE type = 'LeaderChanged' ORDER BY number DESC LIMIT 1")
        return records.loads(rows[0][0], Published) if rows else None

    async def series(self, job: str, *, since: float, until: float, points_max: int) -> Series:
        return await self._run(lambda: self._read_series(job, since, until, points_max))

    def _read_series(self, job: str, since: float, until: float, points_max: int) -> Series:
        """Added up by the database: a hundred thousand steps take it less than a tenth of a second."""
        within = (job, since, until)
        count, first, last = self._database.execute(
            "SELECT count(*), min(ended_at), max(ended_at) FROM steps WHERE job = ? AND ended_at > ? AND ended_at <= ?",
            within,
        ).fetchone()
        if not count:
            return Series(since, max(until - since, 0.0))
        typical_s = (last - first) / max(count - 1, 1)
        bucket_s = max((until - since) / points_max, STEPS_PER_POINT * typical_s, 1e-3)
        rows = self._database.execute(
            "SELECT CAST((ended_at - ?) / ? AS INTEGER) AS bucket, max(step), avg(loss), sum(tokens), min(started_at), "
            "max(ended_at) FROM steps "
            "WHERE job = ? AND ended_at > ? AND ended_at <= ? GROUP BY bucket ORDER BY bucket",
            (since, bucket_s, *within),
        ).fetchall()
        # From the last step of the bucket before to the last one of this: no step counts by halves.
        ends = [-math.inf, *(row[5] for row in rows)]
        lengths_s = [
            max(end - max(before, row[4]), 1e-3) for before, end, row in zip(ends, ends[1:], rows, strict=False)
        ]
        return Series(
            since=since,
            bucket_s=bucket_s,
            index=[row[0] for row in rows],
            step=[row[1] for row in rows],
            loss=[row[2] for row in rows],
            tokens_per_s=[row[3] / seconds for row, seconds in zip(rows, lengths_s, strict=True)],
        )

    async def jobs(self, *, before: float) -> list[str]:
        rows = await self._rows(
            "SELECT job, max(at) AS newest FROM events WHERE type = 'JobAccepted' GROUP BY job HAVING newest < ? "
            "ORDER BY newest DESC, job",
            before,
        )
        return [job for job, _ in rows]

    async def run(self, job: str) -> Run | None:
        accepted = await self._events_of("JobAccepted", job)
        return await self._run(lambda: self._read_run(accepted[-1])) if accepted else None

    def _read_run(self, accepted: JobAccepted) -> Run:
        def since(kind: str) -> list[Any]:
            rows = self._database.execute(
                "SELECT data FROM events WHERE job = ? AND type = ? AND at >= ? ORDER BY number",
                (accepted.job, kind, accepted.at),
            )
            return [records.loads(data, Published) for (data,) in rows]

        incidents = [
            records.loads(data, Incident)
            for (data,) in self._database.execute(
                "SELECT data FROM incidents WHERE job = ? ORDER BY number", (accepted.job,)
            )
        ]
        nodes = self._database.execute("SELECT data FROM events WHERE type = 'NodeChanged' ORDER BY number")
        steps = self._database.execute(
            f"SELECT {_STEP} FROM steps WHERE job = ? AND ended_at >= ?",
            (accepted.job, accepted.at),
        )
        return Run(
            accepted=accepted,
            changes=since("JobChanged"),
            generations=since("GenerationChanged"),
            incidents=[incident for incident in incidents if incident.detected_at >= accepted.at],
            nodes=[records.loads(data, Published) for (data,) in nodes],
            steps=[StepRecord(*row) for row in steps],
            booked=self._booked(accepted.job, accepted.at),
        )

    async def _events_of(self, kind: str, subject: str) -> list[Any]:
        """Oldest first."""
        rows = await self._rows("SELECT data FROM events WHERE type = ? AND subject = ? ORDER BY number", kind, subject)
        return [records.loads(data, Published) for (data,) in rows]

    async def _page(
        self, table: str, columns: str, wanted: Mapping[str, str | None], before: int | None, limit: int
    ) -> list[Any]:
        """Newest first. `wanted`: the required value of each column; None = any value."""
        given = {column: value for column, value in wanted.items() if value is not None}
        clauses = [f"{column} = ?" for column in given] + (["number < ?"] if before is not None else [])
        where = f"WHERE {' AND '.join(clauses)} " if clauses else ""
        return await self._rows(
            f"SELECT {columns} FROM {table} {where}ORDER BY number DESC LIMIT ?",
            *given.values(),
            *([before] if before is not None else []),
            limit,
        )

    async def _rows(self, query: str, *parameters: object) -> list[Any]:
        return await self._run(lambda: self._database.execute(query, parameters).fetchall())

    async def _run(self, work: Callable[[], T]) -> T:
        """Raises `OutOfSpace` or `Unavailable` for errors of the file system."""
        try:
            return await anyio.to_thread.run_sync(work, limiter=self._one_at_a_time)
        except sqlite3.OperationalError as error:
            if "full" in str(error):
                raise OutOfSpace(
                    f"the history {self._path} cannot be written: {error}; free space in {self._path.parent}"
                ) from error
            raise Unavailable(
                f"the history {self._path} cannot be used: {error}; is {self._path.parent} writable?"
            ) from error


def _about(record: Published) -> tuple[str, str]:
    """(subject, job) of a record: the keys that it is found by."""
    match record:
        case JobAccepted() | JobChanged() | GenerationChanged() | PolicyChanged():
            return record.job, record.job
        case IncidentChanged():
            return record.incident.id, record.incident.job
        case NodeChanged():
            return record.node, record.job
        case FindingJudged():
            return record.finding.id, record.finding.job
        case PolicyAsked():
            return record.incident.id, record.incident.job
        case Noted():
            return record.subject, ""
        case OperationDone():
            return record.operation, ""
        case LeaderChanged():
            return record.supervisor, ""
    assert_never(record)


def _set_cursor(database: sqlite3.Connection, stream: str, position: str) -> None:
    database.execute(
        "INSERT INTO cursors VALUES (?, ?) ON CONFLICT (stream) DO UPDATE SET position = excluded.position",
        (stream, position),
    )


def _put_incident(database: sqlite3.Connection, incident: Incident) -> None:
    data = records.dumps(incident, Incident)
    database.execute(
        "INSERT INTO incidents (id, job, node, data) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET node = excluded.node, data = excluded.data",
        (incident.id, incident.job, incident.node, data),
    )
    if incident.action is not None and incident.decided_at is not None:
        database.execute(
            "INSERT INTO actions (incident, at, job, data) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (incident, at) DO UPDATE SET data = excluded.data",
            (incident.id, incident.decided_at, incident.job, data),
        )


def _put_finding(database: sqlite3.Connection, judged: FindingJudged) -> None:
    finding = judged.finding
    database.execute(
        "INSERT INTO findings (id, job, node, data) VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET data = excluded.data",
        (finding.id, finding.job, finding.node, records.dumps(judged, FindingJudged)),
    )
