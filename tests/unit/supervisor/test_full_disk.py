"""A supervisor that is started on a full disk reads its files, and writes them as soon as there is room."""

from __future__ import annotations

from pathlib import Path

import pytest
from replicator_node import fill_up, small_tmpfs

from holdfast.domain.errors import HoldfastError, OutOfSpace, Unavailable
from holdfast.supervisor.api.audit_store import AuditStore
from holdfast.supervisor.history.sqlite import SqliteHistory

pytestmark = pytest.mark.anyio

SIZE_BYTES = 1 << 20


async def test_the_history_and_the_audit_log_are_read_and_written_later(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with small_tmpfs(directory, str(SIZE_BYTES)):
        history = await SqliteHistory.open(directory / "history.sqlite3")
        await history.add_events([], "7-0")
        await history.aclose()
        audit = await AuditStore.open(directory / "audit.sqlite3")
        await audit.add(1.0, {"who": "a", "subject": "b"})
        await audit.aclose()

        filler = fill_up(directory)
        history = await SqliteHistory.open(directory / "history.sqlite3")
        audit = await AuditStore.open(directory / "audit.sqlite3")
        assert await history.cursors() == ("7-0", "0")
        assert [line.at for line in await audit.lines(limit=9)] == [1.0]

        async def write_until_it_is_full() -> None:
            for number in range(8, 8 + SIZE_BYTES // 4096):  # a page that is left is used first
                await history.add_events([], f"{number}-0")

        with pytest.raises(OutOfSpace, match=f"history.sqlite3 cannot be written: .*; free space in {directory}$"):
            await write_until_it_is_full()

        filler.unlink()
        await history.add_events([], "9000-0")
        await audit.add(3.0, {"who": "a", "subject": "b"})
        assert await history.cursors() == ("9000-0", "0")
        assert [line.at for line in await audit.lines(limit=1)] == [3.0]
        await history.aclose()
        await audit.aclose()


async def test_new_files_need_room_and_the_error_says_where(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with small_tmpfs(directory, str(SIZE_BYTES)):
        fill_up(directory)
        for opened in (SqliteHistory.open(directory / "history.sqlite3"), AuditStore.open(directory / "audit.sqlite3")):
            with pytest.raises(HoldfastError, match="free space") as raised:
                await opened
            assert isinstance(raised.value, Unavailable)
            assert str(directory) in str(raised.value)
