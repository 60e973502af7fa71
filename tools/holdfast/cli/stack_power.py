"""Simulated power control of a local stack's nodes, for other processes, over one Unix socket.

`holdfast inject` and `holdfast demo` use it to power a node off (SIGKILL to all its processes, memory tier deleted) or on
again. Each request and each reply is one line of JSON.
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
REQUEST_TIMEOUT_S = 2.0  # requests are served one at a time: a silent client must not block the others

Switch = Callable[..., None]  # called with the names of one or more nodes


def socket_of(node_directory: str) -> Path:
    """Return the socket of the stack that a node's directory `<stack>/nodes/<node>` belongs to."""
    return Path(node_directory).parent.parent / SOCKET_NAME


def ask(path: Path, operation: str, *nodes: str) -> None:
    """Send a request. Raises `Unavailable` if no local stack answers, `HoldfastError` if it rejects the request."""
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
    except (OSError, ValueError, RecursionError) as error:
        raise Unavailable(
            f"no local stack answers at {path} ({error}); only nodes that `holdfast up` started can be powered off and on"
        ) from error
    if error_text := reply.get("error", "" if reply.get("ok") else "the stack closed the connection"):
        raise HoldfastError(str(error_text))


class StackPower:
    """Serves the requests of one stack in a daemon thread. `operations`: name → function of the nodes."""

    def __init__(self, directory: Path, operations: dict[str, Switch]) -> None:
        self._path = directory / SOCKET_NAME
        self._operations = operations
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path.unlink(missing_ok=True)
        self._listener.bind(os.fspath(self._path))
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._serve, name="stack-power", daemon=True)
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
                    continue  # the client has disconnected; its request has been executed

    def _answer(self, connection: socket.socket) -> dict[str, object]:
        try:
            with connection.makefile("rb") as lines:
                request = json.loads(lines.readline(LINE_BYTES_MAX))
            operation, node = str(request["operation"]), request["node"]
            nodes = [str(each) for each in node] if isinstance(node, list) else [str(node)]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return {"error": f"not a request: {error!r}; expected a JSON line with operation and node"}
        if operation not in self._operations:
            return {"error": f"operation {operation!r} is not known; expected one of {sorted(self._operations)}"}
        try:
            self._operations[operation](*nodes)
        except HoldfastError as error:
            return {"error": str(error)}
        except (OSError, subprocess.SubprocessError) as error:  # reported to the client; the thread continues
            return {"error": f"{operation} of {', '.join(nodes)} failed: {error}"}
        return {"ok": True}
