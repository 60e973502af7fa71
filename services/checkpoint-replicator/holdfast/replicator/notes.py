"""Datagrams of the workers: a save was made or missed. A lost datagram of a save costs one rescan interval. A missed save also
shows that its rank has finished its restore.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
from anyio.abc import UNIXDatagramSocket

from holdfast.domain.worker import decode


async def open_notes(path: Path) -> UNIXDatagramSocket:
    """Bind the socket to which workers send their messages."""
    return await anyio.create_unix_datagram_socket(local_path=path, local_mode=0o600)


async def listen_to_notes(
    notes: UNIXDatagramSocket, saved: Callable[[str], None], missed: Callable[[str, int, int], None]
) -> None:
    """Receive messages. Never returns. Malformed messages and other types are ignored."""
    async for raw, _ in notes:
        note = decode(raw)
        job = note.get("job")
        if not isinstance(job, str):
            continue
        if note.get("type") == "saved":
            saved(job)
        elif note.get("type") == "missed":
            generation, rank = note.get("generation"), note.get("rank")
            if type(generation) is int and type(rank) is int:
                missed(job, generation, rank)
