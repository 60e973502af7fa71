"""The newest lines of the audit log in one sqlite3 file, for `GET /v1/audit`. Used in worker threads, one at a time.

Each supervisor has the requests that it has answered. What cannot be written is in the supervisor's log all the same."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import structlog

from holdfast.domain.errors import Unavailable
from holdfast.supervisor import sqlite_wal

KEPT_MAX = 100_000
TRIM_EVERY = 1000  # rows written between two looks at the limit

T = TypeVar("T")
log = structlog.get_logger("holdfast.supervisor.audit")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
  number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, who TEXT NOT NULL, subject TEXT NOT NULL, data TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS requests_by_who ON requests (who, number);
CREATE INDEX IF NOT EXISTS requests_by_subject ON requests (subject, number);
"""


@dataclass(frozen=True, slots=True)
class Line:
    """`number` grows with time; `fields` is what the log has."""

    number: int
    at: float
    fields: Mapping[str, object]


class AuditStore:
    """Open with `await AuditStore.open(path)`."""

    def __init__(self, database: sqlite3.Connection, kept_max: int = KEPT_MAX, trim_every: int = TRIM_EVERY) -> None:
        self._database, self._kept_max, self._trim_every = database, kept_max, trim_every
        self._written = 0
        self._one_at_a_time = anyio.CapacityLimiter(1)

    @classmethod
    async def open(cls, path: Path, **limits: int) -> AuditStore:
        """Raises `Unavailable` if the file cannot be used."""

        def connect() -> sqlite3.Connection:
            database = sqlite_wal.connect(path, isolation_level=None)
            try:
                database.executescript(_SCHEMA)
            except sqlite3.Error:
                database.close()
                raise
            return database

        try:
            return cls(await anyio.to_thread.run_sync(connect), **limits)
        except sqlite3.Error as error:
            raise Unavailable(
                f"the audit log {path} cannot be used ({error}): free space in {path.parent}, or move a damaged file away"
            ) from error

    async def add(self, at: float, fields: Mapping[str, object]) -> None:
        """Keep a line. A file that cannot be written is logged: the request that was audited is answered all the same."""
        row = (at, str(fields["who"]), str(fields["subject"]), json.dumps(dict(fields)))
        try:
            await self._run(lambda: self._insert(row))
        except sqlite3.Error as error:
            log.error("audit line not kept", reason=str(error), advice="it is in this log, above")

    def _insert(self, row: tuple[float, str, str, str]) -> None:
        self._database.execute("INSERT INTO requests (at, who, subject, data) VALUES (?, ?, ?, ?)", row)
        self._written += 1
        if self._written % self._trim_every == 0:
            self._database.execute(
                "DELETE FROM requests WHERE number <= (SELECT max(number) FROM requests) - ?", (self._kept_max,)
            )

    async def lines(
        self, *, who: str | None = None, subject: str | None = None, before: int | None = None, limit: int
    ) -> list[Line]:
        """Newest first; `before` is a number from an earlier page. Raises `Unavailable` if the file cannot be read."""
        wanted = {"who = ?": who, "subject = ?": subject, "number < ?": before}
        given = {condition: value for condition, value in wanted.items() if value is not None}
        where = f"WHERE {' AND '.join(given)}" if given else ""
        query = f"SELECT number, at, data FROM requests {where} ORDER BY number DESC LIMIT ?"
        try:
            rows = await self._run(lambda: self._database.execute(query, (*given.values(), limit)).fetchall())
        except sqlite3.Error as error:
            raise Unavailable(f"the audit log cannot be read: {error}") from error
        return [Line(number, at, json.loads(data)) for number, at, data in rows]

    async def aclose(self) -> None:
        await self._run(self._database.close)

    async def _run(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._one_at_a_time)
