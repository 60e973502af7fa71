"""Checks of ports and Redis before a stack is started, with errors that name the command-line options.

The services check the same when they start, because a port can be taken in between, but their errors come late and name
settings instead of options.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from typing import Any

from holdfast.domain.errors import HoldfastError, InvalidSpec
from holdfast.log import durability
from holdfast.log.durability import Risk, without_password
from holdfast.log.protocol import Usage

REDIS_TIMEOUT_S = 3.0
REDIS_VERSION_MIN = (6, 2)  # XAUTOCLAIM


def require_ports(host: str, ports: Mapping[str, int]) -> None:
    """Check that the ports can be listened on at `host`, and otherwise raise `InvalidSpec`. `ports`: flag → port, 0 = any."""
    taken: dict[int, str] = {}
    for flag, port in ports.items():
        if port and port in taken:
            raise InvalidSpec(flag, port, f"a port that differs from {taken[port]} (0 = any free port)")
        taken[port] = flag
        _require_port(host, flag, port)


def _require_port(host: str, flag: str, port: int) -> None:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except socket.gaierror as error:
        raise InvalidSpec("--host", host, f"an address of this machine ({error.strerror})") from error
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                expected = f"a free port ({host}:{port} is in use; 0 = any free port)"
            case errno.EACCES:
                expected = f"a port that you may listen on ({error.strerror}; 0 = any free port)"
            case errno.EADDRNOTAVAIL:
                raise InvalidSpec("--host", host, f"an address of this machine ({error.strerror})") from error
            case _:
                expected = f"a port that can be listened on ({error.strerror})"
        raise InvalidSpec(flag, port, expected) from error


def redis_version(url: str) -> str:
    """Return the version of the server at `url`.

    Raises `InvalidSpec` if `url` is not a Redis URL, `Unavailable` if no server answers, `HoldfastError` if it is too old.
    """
    shown = without_password(url)
    server = _redis_info(url)
    durability.require_data(server, f"--redis-url: {shown}")
    version = str(server["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < REDIS_VERSION_MIN:
        wanted = ".".join(map(str, REDIS_VERSION_MIN))
        raise HoldfastError(f"--redis-url: {shown} runs Redis {version}; Holdfast needs {wanted} or later")
    return version


def redis_risks(url: str) -> list[Risk]:
    """Describe why the server at `url` refuses writes, how it can lose data, and whether its memory is nearly full. Raises as
    `redis_version` does."""
    info = _redis_info(url)
    found = [*durability.risks(info)]
    usage = Usage(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0)))
    if crowded := durability.crowded(usage):
        found.append(Risk(crowded, durability.ROOM_ADVICE))
    return found


def _redis_info(url: str) -> dict[str, Any]:
    import redis  # takes 0.1 s, and most commands do not need it

    from holdfast.log import redis_url, refusals

    timeouts = {"socket_connect_timeout": REDIS_TIMEOUT_S, "socket_timeout": REDIS_TIMEOUT_S}
    with redis_url.opened(redis.Redis, "--redis-url", url, **timeouts) as client:
        try:
            info: dict[str, Any] = client.info()
        except (redis.RedisError, OSError) as error:
            found = refusals.failure(
                without_password(url),
                error,
                password_file=redis_url.password_file_of(client),
                encrypted=redis_url.is_encrypted(client),
            )
            raise type(found)(f"--redis-url: {found}") from error
    return info
