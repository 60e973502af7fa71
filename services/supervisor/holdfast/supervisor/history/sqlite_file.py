"""The file of the history: its tables, its layouts and their upgrades, and files that are damaged or newer."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import structlog

from holdfast.domain.errors import Unavailable
from holdfast.supervisor import sqlite_wal

log = structlog.get_logger("holdfast.supervisor.history.protocol")
SCHEMA = """
CREATE TABLE cursors (stream TEXT PRIMARY KEY, position TEXT NOT NULL);
CREATE TABLE events (
  number INTEGER PRIMARY KEY AUTOINCREMENT, position TEXT NOT NULL UNIQUE, type TEXT NOT NULL, subject TEXT NOT NULL,
  job TEXT NOT NULL, at REAL NOT NULL, data BLOB NOT NULL
);
CREATE INDEX events_by_subject ON events (type, subject);
CREATE INDEX events_by_job ON events (job, type);
CREATE TABLE incidents (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, job TEXT NOT NULL, data BLOB NOT NULL
);
CREATE INDEX incidents_by_job ON incidents (job);
CREATE TABLE actions (
  number INTEGER PRIMARY KEY AUTOINCREMENT, incident TEXT NOT NULL, at REAL NOT NULL, job TEXT NOT NULL, data BLOB NOT NULL,
  UNIQUE (incident, at)
);
CREATE INDEX actions_by_job ON actions (job);
CREATE TABLE steps (
  job TEXT NOT NULL, generation INTEGER NOT NULL, step INTEGER NOT NULL, world_size INTEGER NOT NULL, started_at REAL NOT NULL,
  ended_at REAL NOT NULL, tokens INTEGER NOT NULL, loss REAL, stall_s REAL NOT NULL,
  PRIMARY KEY (job, ended_at, generation, step)
) WITHOUT ROWID;
"""
# Added in layout 2. A file of layout 1 is upgraded in place, because its history is worth keeping.
_SINCE_1 = """
ALTER TABLE incidents ADD COLUMN node TEXT NOT NULL DEFAULT '';
UPDATE incidents SET node = coalesce(json_extract(CAST(data AS TEXT), '$.node'), '') WHERE json_valid(CAST(data AS TEXT));
CREATE INDEX incidents_by_node ON incidents (node);
CREATE TABLE findings (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, job TEXT NOT NULL, node TEXT NOT NULL, data BLOB NOT NULL
);
CREATE INDEX findings_by_job ON findings (job);
CREATE INDEX findings_by_node ON findings (node);
"""
# Added in layout 3.
_SINCE_2 = """
CREATE TABLE booked (job TEXT PRIMARY KEY, accepted_at REAL NOT NULL, data BLOB NOT NULL);
"""
# Added in layout 4. `data` is compressed: it names every node of the job.
_SINCE_3 = """
CREATE TABLE asked (
  number INTEGER PRIMARY KEY AUTOINCREMENT, position TEXT NOT NULL UNIQUE, job TEXT NOT NULL, at REAL NOT NULL,
  data BLOB NOT NULL
);
CREATE INDEX asked_by_job ON asked (job, at);
"""
# Added in layout 5.
_SINCE_4 = """
ALTER TABLE steps ADD COLUMN flops REAL NOT NULL DEFAULT 0;
"""
_UPGRADES = (SCHEMA, _SINCE_1, _SINCE_2, _SINCE_3, _SINCE_4)  # index: the layout that each upgrades to the next one
LAYOUT = len(_UPGRADES)
SET_ASIDE = ".old"  # suffix of a file that is damaged or has a newer layout
OF_EARLIER = ".earlier"  # suffix of a file that an earlier version has built meanwhile


def open_file(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _take_up_again(path)
            return _connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            log.warning("the history is damaged; a new one is built", path=str(path), reason=str(error))
    except (OSError, sqlite3.OperationalError) as error:
        raise Unavailable(
            f"cannot open the history {path}: {error}; HOLDFAST_DATA_DIR must be a writable directory with free space"
        ) from error
    return _recreate(path)


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite_wal.connect(path)
    try:
        (layout,) = database.execute("PRAGMA user_version").fetchone()
        if layout == LAYOUT:
            return database
        if 0 <= layout < LAYOUT:
            with database:
                database.executescript(f"BEGIN; {''.join(_UPGRADES[layout:])} PRAGMA user_version = {LAYOUT};")
            return database
    except BaseException:
        database.close()
        raise
    database.close()
    log.warning("the history has another layout; a new one is built", path=str(path), found=layout, wanted=LAYOUT)
    return _recreate(path)


def _take_up_again(path: Path) -> None:
    """If an operator went back to an earlier version, which set aside a file of a newer layout, use that file again. What it
    lacks is read from the streams."""
    aside = path.with_name(path.name + SET_ASIDE)
    if aside.exists() and _layout(path) < _layout(aside) <= LAYOUT:
        _rename(path, OF_EARLIER)
        _rename(aside, "", path)
        log.info("the history from before the return to an earlier version is used again", path=str(path))


def _layout(path: Path) -> int:
    """The layout of the file: 0 if there is none, a newer one than `LAYOUT` if the file cannot be read."""
    if not path.exists():
        return 0
    try:
        with closing(sqlite3.connect(path)) as database:
            (layout,) = database.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError:
        return LAYOUT + 1
    return int(layout)


def _recreate(path: Path) -> sqlite3.Connection:
    """Set the file aside and create a new one."""
    _rename(path, SET_ASIDE)
    return _connect(path)


def _rename(path: Path, suffix: str, to: Path | None = None) -> None:
    """Rename the file and those that sqlite keeps beside it to the name of `to`, or its own, with a suffix."""
    for part in ("", "-wal", "-shm"):
        old = path.with_name(path.name + part)
        if old.exists():
            old.replace(path.with_name((to or path).name + suffix + part))
