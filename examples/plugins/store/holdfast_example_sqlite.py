"""An object store in one SQLite file, for experiments: SQLite's locks need a local disk, and an object has at most 1 GB."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from holdfast.domain.errors import IntegrityError, NotFound, OutOfSpace, Unavailable
from holdfast.stores import ObjectInfo, ObjectStore, Pace, StoreKind, StoreUrl, unpaced
from holdfast.stores.checksum import of_parts
from holdfast.stores.protocol import check_key

TABLE = "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, content BLOB, crc32c INTEGER, updated_at REAL)"
BUSY_S = 30.0  # for another writer's transaction


class SqliteStore:
    """Every call has its own connection, so that any thread may make it. A put is one transaction, and therefore atomic."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def url(self) -> str:
        return f"sqlite://{self._path}"

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        *,
        crc32c: int,
        if_absent: bool = False,
        pace: Pace = unpaced,
    ) -> bool:
        check_key(key)
        if of_parts(parts) != crc32c:
            raise IntegrityError(f"{self.url}: {key}: the parts do not match their CRC-32C")
        content = b"".join(parts)
        pace(len(content))
        verb = "INSERT OR IGNORE" if if_absent else "INSERT OR REPLACE"
        with closing(self._connected()) as database:
            done = self._run(database, f"{verb} INTO objects VALUES (?, ?, ?, ?)", (key, content, crc32c, time.time()))
        return done.rowcount == 1

    def read_into(self, key: str, target: memoryview, offset: int = 0) -> None:
        content = self._content(key)[offset : offset + len(target)]
        if len(content) < len(target):
            raise IntegrityError(f"{self.url}: {key} ends before byte {offset + len(target)}")
        target[:] = content

    def read(self, key: str, size_max: int) -> bytes:
        content = self._content(key)
        if len(content) > size_max:
            raise IntegrityError(f"{self.url}: {key} has {len(content)} bytes, more than the limit of {size_max}")
        return content

    def stat(self, key: str) -> ObjectInfo | None:
        check_key(key)
        return next((info for info in self._infos("key = ?", (key,))), None)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._infos("substr(key, 1, ?) = ?", (len(prefix), prefix)))

    def delete(self, key: str) -> None:
        check_key(key)
        with closing(self._connected()) as database:
            self._run(database, "DELETE FROM objects WHERE key = ?", (key,))

    def close(self) -> None:
        pass

    def _content(self, key: str) -> bytes:
        check_key(key)
        with closing(self._connected()) as database:
            row = self._run(database, "SELECT content FROM objects WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise NotFound(f"{self.url}: no object {key}")
        return bytes(row[0])

    def _infos(self, where: str, values: tuple[object, ...]) -> list[ObjectInfo]:
        query = f"SELECT key, length(content), crc32c, updated_at FROM objects WHERE {where} ORDER BY key"
        with closing(self._connected()) as database:
            return [ObjectInfo(*row) for row in self._run(database, query, values)]

    def _connected(self) -> sqlite3.Connection:
        try:
            database = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        except sqlite3.Error as error:
            raise Unavailable(f"{self.url}: {error}") from error
        self._run(database, TABLE)
        return database

    def _run(self, database: sqlite3.Connection, query: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        try:
            return database.execute(query, values)
        except sqlite3.Error as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise OutOfSpace(f"{self.url}: {error}") from error
            raise Unavailable(f"{self.url}: {error}") from error


def _open(url: StoreUrl) -> ObjectStore:
    return SqliteStore(Path("/", url.prefix))


KIND = StoreKind("sqlite:///file.db", lambda url: not url.bucket and url.prefix != "", _open)
