"""The event loop of services: asyncio's, with a reader that handles many gRPC completions at a time.

For each completion gRPC's thread writes a byte to a socket that the loop watches. The loop's reader then empties the queue of
completions and reads one byte (grpcio 1.85, `PollerCompletionQueue._handle_events`). So a burst costs one iteration of the
loop per byte, most of them without work. When 278 bytes are unread, the socket's buffer is full, gRPC's thread blocks in its
write, and every completion waits. With the telemetry of 5,000 nodes a server accepted one new stream per second, and a report
waited for as many iterations as there were messages before it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVarTuple, Unpack

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

Ts = TypeVarTuple("Ts")

_BYTES_MAX = 4096  # more single bytes than a socket's buffer holds


class ServiceLoop(asyncio.SelectorEventLoop):
    """For `anyio.run(…, backend_options={"loop_factory": ServiceLoop})`."""

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[Unpack[Ts]], Any], *args: *Ts) -> None:
        if isinstance(fd, socket.socket) and _is_of_completions(callback):
            super().add_reader(fd, partial(_once_per_burst, fd, callback, *args))
        else:
            super().add_reader(fd, callback, *args)


def _is_of_completions(callback: Callable[..., Any]) -> bool:
    """Whether `callback` is gRPC's reader, by its name. A reader with another name is left unchanged."""
    owner = getattr(getattr(callback, "func", callback), "__self__", None)
    return type(owner).__name__ == "PollerCompletionQueue"


def _once_per_burst(wakeups: socket.socket, handle: Callable[..., Any], *args: Any) -> None:
    """Read all bytes but one, which `handle` reads. A byte is written after its completion has been queued, so `handle` finds
    the completions of all bytes read here."""
    unread = len(wakeups.recv(_BYTES_MAX, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    if unread > 1:
        wakeups.recv(unread - 1)
    handle(*args)
