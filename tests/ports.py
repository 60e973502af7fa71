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


def reserve_port(port: int = 0) -> socket.socket:
    """Bound but not listening: until it is closed nobody else is given the port, and a server that sets SO_REUSEADDR, as most
    do, can listen on it, also again and again. While none does, connections are refused."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", port))
    return reserved


def port_of(reserved: socket.socket) -> int:
    return int(reserved.getsockname()[1])
