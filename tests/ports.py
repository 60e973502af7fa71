"""Ports of loopback for programs that cannot choose one themselves."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from holdfast.cli.connection import ENV_LOCAL_API_PORT

# Commands under test look for this machine's API where nobody serves one: a Holdfast that runs on the machine is not theirs.
NO_LOCAL_API = {ENV_LOCAL_API_PORT: "1"}


def free_ports(count: int) -> tuple[int, ...]:
    """Free ones, all different."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return tuple(one.getsockname()[1] for one in sockets)
