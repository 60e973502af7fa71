"""Names and addresses of machines, as they are written in URLs."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address or `localhost`. Names are not resolved."""
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
