"""Datagrams of the workers: a save was made or missed. A lost datagram of a save costs one rescan interval. A missed save also
shows that its rank has finished its restore.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
from anyio.abc import UNIXDatagramSocket

from holdfast.domain.notes import MissedNote, SavedNote, parse


async def open_notes(path: Path) -> UNIXDatagramSocket:
    """Bind the socket to which workers send their messages."""
    return await anyio.create_unix_datagram_socket(local_path=path, local_mode=0o600)


async def listen_to_notes(
    notes: UNIXDatagramSocket, saved: Callable[[str], None], missed: Callable[[str, int, int], None]
) -> None:
    """Receive messages. Never returns. Malformed messages and other types are ignored."""
    async for raw, _ in notes:
        match parse(raw):
            case SavedNote(sender=sender):
                saved(sender.job)
            case MissedNote(sender=sender):
                missed(sender.job, sender.generation, sender.rank)
            case _:
                pass
