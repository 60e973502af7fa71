"""What protects a stack that other machines reach: the API's token, and mutual TLS between agents and services.

The settings are those of the services (docs/security.md), read from the environment of the command that starts the stack, and
passed on to what it starts.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from holdfast.cli.client import ENV_TOKEN
from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.api_tokens import TOKENS_FILE
from holdfast.runtime.identities import SPIFFE
from holdfast.runtime.revocation import CRL
from holdfast.runtime.tls import CA, CERT, IDENTITIES, KEY, Tls

TLS_FILES = (CERT, KEY, CA)
FILES = (*TLS_FILES, CRL, TOKENS_FILE)
PEERS = (IDENTITIES, SPIFFE)  # what is demanded of the other ends' certificates
LOGGING = ("HOLDFAST_LOG_LEVEL", "HOLDFAST_LOG_FORMAT")
UNSET, SET = "unset", "set"


def settings_for_parts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that are passed on: the token, TLS (files by absolute path), logging. Raises `InvalidSpec` for TLS
    that is not complete or cannot be read."""
    given = {name: value for name in (ENV_TOKEN, *FILES, *PEERS, *LOGGING) if (value := environment.get(name, ""))}
    files = {name: Path(given[name]).absolute() for name in FILES if name in given}
    Tls.load(cert=files.get(CERT), key=files.get(KEY), ca=files.get(CA))
    return given | {name: str(path) for name, path in files.items()}


def shown(settings: Mapping[str, str]) -> dict[str, str]:
    """Return what may be recorded of the settings: the token only as set or not."""
    return {ENV_TOKEN: SET if settings.get(ENV_TOKEN) else UNSET} | {
        name: settings.get(name) or UNSET for name in (*FILES, *PEERS)
    }


def require_protection(host: str, settings: Mapping[str, str]) -> None:
    """Raises `InvalidSpec` for an address that other machines reach, without a token or TLS."""
    needed = (*(() if settings.get(TOKENS_FILE) else (ENV_TOKEN,)), *TLS_FILES)
    missing = [name for name in needed if not settings.get(name)]
    if missing and not is_loopback(host):
        raise InvalidSpec(
            "--host",
            host,
            "a loopback address, because who reaches the API runs code on every node; or, in the environment, an API token and "
            f"the files of mutual TLS ({', '.join(missing)}: not set; docs/security.md says how to make them); or --insecure, "
            "on a network that only trusted machines reach",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. A name that is none counts as not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ip_address(str(place[0]).partition("%")[0]).is_loopback for *_, place in found)
