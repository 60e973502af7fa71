"""The agent's durable record of executed orders: its answers, and the highest leader epoch that it has seen.

SQLite, one file, every write on disk before it returns: an answer that has been sent can be repeated. The oldest answers are
dropped beyond `answers_max`; the supervisor stops repeating an order when it has an answer.

An order that cannot be recorded is not executed. The file therefore has room in advance, so that a disk that is full later, for
instance of logs, keeps no job from recovering: free pages in the database, and a log of writes that is as long as it gets.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Self

import structlog

from holdfast.domain.errors import HoldfastError
from holdfast.domain.orders import OrderDone
from holdfast.wire import records

ANSWERS_MAX = 1000
RESERVE_PAGES = 512  # 2 MiB: more than `ANSWERS_MAX` answers; pages of dropped ones are used again
PAGE_ROOM_BYTES = 4092  # of a page of a large value
CHECKPOINT_PAGES = 128  # the log of writes is copied into the database, and written from its beginning again

log = structlog.get_logger("holdfast.agent.connection.ledger")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answer (number INTEGER PRIMARY KEY, command_id TEXT UNIQUE NOT NULL, answer TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS epoch (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL);
INSERT OR IGNORE INTO epoch VALUES (1, 0);
"""


class Ledger:
    """Use it as a context manager. Every method raises `HoldfastError` that names the file if the disk rejects the write."""

    def __init__(
        self, path: Path, database: sqlite3.Connection | None = None, *, answers_max: int = ANSWERS_MAX
    ) -> None:
        """`database`: an open connection in autocommit mode, in place of the file at `path`."""
        self._path, self._answers_max = path, answers_max
        try:
            self._database = database or sqlite3.connect(path, isolation_level=None)
            # No file of shared memory, for which a full disk has no room.
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            self._database.executescript(_SCHEMA)
            self._reserve()
            (self._epoch,) = self._database.execute("SELECT epoch FROM epoch").fetchone()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    @property
    def epoch(self) -> int:
        """The highest epoch seen."""
        return int(self._epoch)

    def raise_epoch(self, epoch: int) -> None:
        """Store a higher epoch; a lower one is ignored."""
        if epoch > self._epoch:
            self._write("UPDATE epoch SET epoch = ?", (epoch,))
            self._epoch = epoch

    def answer(self, command_id: str) -> OrderDone | None:
        """Return the answer to this order, if it has been executed."""
        try:
            row = self._database.execute("SELECT answer FROM answer WHERE command_id = ?", (command_id,)).fetchone()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return None if row is None else records.loads(row[0].encode(), OrderDone)

    def remember(self, answer: OrderDone) -> None:
        """Store an answer. It is on disk when this returns."""
        newest = self._write(
            "INSERT OR REPLACE INTO answer (command_id, answer) VALUES (?, ?)",
            (answer.command_id, records.dumps(answer, OrderDone).decode()),
        )
        if newest > self._answers_max:
            self._write("DELETE FROM answer WHERE number <= ?", (newest - self._answers_max,))

    def _reserve(self) -> None:
        """Write and delete the reserve, which leaves its pages in the database and in the log of writes."""
        try:
            (pages,) = self._database.execute("PRAGMA page_count").fetchone()
            (free,) = self._database.execute("PRAGMA freelist_count").fetchone()
            room = PAGE_ROOM_BYTES * (max(free, RESERVE_PAGES - pages) - 2)
            self._database.executescript(
                "BEGIN; CREATE TABLE reserve (room BLOB);"
                f"INSERT INTO reserve VALUES (zeroblob({max(room, 0)})); DROP TABLE reserve; COMMIT;"
            )
        except sqlite3.OperationalError as error:
            self._database.rollback()
            advice = f"free space in {self._path.parent}"
            log.warning("no room is reserved for orders", path=str(self._path), reason=str(error), advice=advice)

    def _write(self, statement: str, values: tuple[object, ...]) -> int:
        """Return the number of the row that was inserted last."""
        try:
            return self._database.execute(statement, values).lastrowid or 0
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: sqlite3.Error) -> HoldfastError:
        advice = f"free space in {self._path.parent}, or make it writable"
        return HoldfastError(f"the agent's record {self._path} cannot be used: {error}; {advice}")
