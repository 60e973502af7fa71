"""The power switches of a local stack's nodes, reachable from other processes over one Unix socket.

In a data centre a node that died comes back because somebody repairs it; on one machine the stack plays that part.
`holdfast inject` and `holdfast demo` ask it here to cut a node's power (every process gets SIGKILL, its memory is gone)
or to switch it on again. One JSON line in, one JSON line out.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from holdfast.domain.errors import HoldfastError, Unavailable

SOCKET_NAME = "stack.sock"
LINE_BYTES_MAX = 4096
REPLY_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 2.0  # one asker is served at a time: a silent one must not hold up the rest

Switch = Callable[..., None]  # of one node or, at the same moment, of several


def socket_of(node_directory: str) -> Path:
    """The switchboard of the stack that a node's directory belongs to: `<stack>/nodes/<node>`."""
    return Path(node_directory).parent.parent / SOCKET_NAME


def ask(path: Path, operation: str, *nodes: str) -> None:
    """Throw a switch. Raises `Unavailable` when there is no local stack there, `HoldfastError` when it refuses."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(REPLY_TIMEOUT_S)
            connection.connect(os.fspath(path))
            connection.sendall(
                json.dumps({"operation": operation, "node": nodes[0] if len(nodes) == 1 else nodes}).encode() + b"\n"
            )
            with connection.makefile("rb") as replies:
                reply = json.loads(replies.readline(LINE_BYTES_MAX) or b"{}")
        if not isinstance(reply, dict):
            raise ValueError(f"its reply is {reply!r}")
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"no local stack answers at {path} ({error}); power can only be switched for nodes that `holdfast up` started"
        ) from error
    if error_text := reply.get("error", "" if reply.get("ok") else "the stack closed the connection"):
        raise HoldfastError(str(error_text))


class MachineRoom:
    """Serves the switches of one stack from a daemon thread; `operations` maps a name to what it does to a node."""

    def __init__(self, directory: Path, operations: dict[str, Switch]) -> None:
        self._path = directory / SOCKET_NAME
        self._operations = operations
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path.unlink(missing_ok=True)
        self._listener.bind(os.fspath(self._path))
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._serve, name="machine-room", daemon=True)
        self._thread.start()

    def close(self) -> None:
        # shutdown() wakes the accept(); close() alone would leave the thread blocked on a dead descriptor
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            self._listener.close()
        self._thread.join(timeout=REPLY_TIMEOUT_S)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection:
                connection.settimeout(REQUEST_TIMEOUT_S)
                try:
                    connection.sendall(json.dumps(self._answer(connection)).encode() + b"\n")
                except OSError:
                    continue  # the asker has gone; its request is done all the same

    def _answer(self, connection: socket.socket) -> dict[str, object]:
        try:
            with connection.makefile("rb") as lines:
                request = json.loads(lines.readline(LINE_BYTES_MAX))
            operation, node = str(request["operation"]), request["node"]
            nodes = [str(each) for each in node] if isinstance(node, list) else [str(node)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return {"error": f"not a request: {error!r}; expected a JSON line with operation and node"}
        if operation not in self._operations:
            return {"error": f"operation {operation!r} is not known; expected one of {sorted(self._operations)}"}
        try:
            self._operations[operation](*nodes)
        except HoldfastError as error:
            return {"error": str(error)}
        except (OSError, subprocess.SubprocessError) as error:  # the asker hears it, and the switches go on working
            return {"error": f"{operation} of {', '.join(nodes)} failed: {error}"}
        return {"ok": True}
