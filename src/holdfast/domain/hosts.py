"""Names and addresses of machines, as they are written in URLs."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

PORT_MAX = 65_535


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address or `localhost`. Names are not resolved."""
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def is_protected_url(url: str) -> bool:
    """Whether nobody on the network can read or change what is fetched from `url`: https to any host, or http to a loopback
    address. False for a text that is not a URL, has no host, or has a character that does not belong into a URL."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError:
        return False
    protected = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))
    return protected and bool(host) and url.isascii() and url.isprintable() and " " not in url


def host_and_port(text: str) -> tuple[str, int] | None:
    """Parse `host:port`, as in `10.0.0.5:8471` or `[::1]:8471`. Returns None for a text that no socket call accepts: an address
    may come from another machine, and a call would raise OverflowError for its port or UnicodeError for its host."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if (
        not host
        or "\0" in host
        or not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= PORT_MAX)
    ):
        return None
    try:
        host.encode("idna")
    except UnicodeError:  # an empty label, or one of more than 63 characters
        return None
    return host, int(port)
