"""The agent's durable record of executed orders: its answers, and the highest leader epoch that it has seen.

SQLite, one file, every write on disk before it returns: an answer that has been sent can be repeated. The oldest answers are
dropped beyond `answers_max`; the supervisor stops repeating an order when it has an answer.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Self

from holdfast.domain.errors import HoldfastError
from holdfast.domain.orders import OrderDone
from holdfast.wire import records

ANSWERS_MAX = 1000

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
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_SCHEMA)
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

    def _write(self, statement: str, values: tuple[object, ...]) -> int:
        """Return the number of the row that was inserted last."""
        try:
            return self._database.execute(statement, values).lastrowid or 0
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: sqlite3.Error) -> HoldfastError:
        return HoldfastError(f"the agent's record {self._path} cannot be used: {error}; is the disk full or read-only?")
