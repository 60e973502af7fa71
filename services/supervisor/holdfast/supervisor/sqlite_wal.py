"""Opens a sqlite3 file with a write-ahead log, also on a full disk."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger("holdfast.supervisor.sqlite_wal")


def connect(path: Path, **options: Any) -> sqlite3.Connection:
    """Return a connection for one thread at a time. Without room for the file of shared memory that sqlite keeps beside the
    database, the connection locks the database and keeps the content of that file in its own memory. What is stored can be
    read, and more is stored as soon as there is room. Raises `sqlite3.Error`, also if a new database lacks room."""
    try:
        return _in_wal(path, "NORMAL", options)
    except sqlite3.OperationalError as error:
        database = _in_wal(path, "EXCLUSIVE", options)
        advice = f"free space in {path.parent}"
        log.warning("no room beside a database", path=str(path), reason=str(error), advice=advice)
        return database


def _in_wal(path: Path, locking: str, options: dict[str, Any]) -> sqlite3.Connection:
    database: sqlite3.Connection = sqlite3.connect(path, check_same_thread=False, **options)
    try:
        database.execute(f"PRAGMA locking_mode = {locking}")
        database.execute("PRAGMA journal_mode = WAL")
        # What a power failure loses is read from the streams again, or is in the log.
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA user_version").fetchone()  # opens the file
    except BaseException:
        database.close()
        raise
    return database
