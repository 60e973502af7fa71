"""Checks the protection of a stack that other machines reach: the API's token, and mutual TLS between agents and services.

The services have the same settings (docs/security.md). They are read from the environment of the command that starts the
stack, and passed on to the processes of the stack.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from holdfast.cli.connection import ENV_TOKEN
from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust import oidc, oidc_keys
from holdfast.runtime.trust.api_certificate import API_CERT, API_KEY, API_TLS
from holdfast.runtime.trust.api_tokens import TOKENS_FILE
from holdfast.runtime.trust.api_trust import API_CA
from holdfast.runtime.trust.authority import CA_DIR
from holdfast.runtime.trust.identities import SPIFFE
from holdfast.runtime.trust.revocation import CRL
from holdfast.runtime.trust.tls import CA, CERT, IDENTITIES, KEY, Tls

NODE_CERTIFICATE_S = "HOLDFAST_NODE_CERTIFICATE_S"
TLS_FILES = (CERT, KEY, CA)
ALERT_URLS_FILE = "HOLDFAST_ALERT_URLS_FILE"
# Of the supervisor alone: addresses of alerts are secrets.
ALERTS = (
    "HOLDFAST_ALERT_URLS",
    ALERT_URLS_FILE,
    "HOLDFAST_ALERT_TOPICS",
    "HOLDFAST_ALERT_SECRET",
    "HOLDFAST_ALERT_LINK",
)
# TLS of the API, and what other supervisors are trusted by
API_TLS_SETTINGS = (API_TLS, API_CERT, API_KEY, API_CA)
ENROLMENT = (CA_DIR, NODE_CERTIFICATE_S)  # the CA that signs certificates of invited nodes
FILES = (*TLS_FILES, CRL, TOKENS_FILE, API_CERT, API_KEY, API_CA, CA_DIR, oidc_keys.CA)
OIDC = tuple(name for name in oidc.SETTINGS if name != oidc_keys.CA)
PEERS = (IDENTITIES, SPIFFE, API_TLS)  # what is demanded of the other ends' certificates, and whether the API has TLS
LOGGING = ("HOLDFAST_LOG_LEVEL", "HOLDFAST_LOG_FORMAT")
UNSET, SET = "unset", "set"


def settings_for_parts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that are passed on: tokens, TLS and alerts (files by absolute path), logging. Raises `InvalidSpec`
    for TLS that is not complete or cannot be read, and for incomplete settings of an OIDC issuer."""
    names = (ENV_TOKEN, NODE_CERTIFICATE_S, *FILES, *OIDC, *PEERS, *ALERTS, *LOGGING)
    given = {name: value for name in names if (value := environment.get(name, ""))}
    files = {name: Path(given[name]).absolute() for name in FILES if name in given}
    oidc.OidcRules.of_environment(given)
    Tls.load(cert=files.get(CERT), key=files.get(KEY), ca=files.get(CA))
    if ALERT_URLS_FILE in given:
        files[ALERT_URLS_FILE] = Path(given[ALERT_URLS_FILE]).absolute()
    if CA_DIR in files and CRL not in files:
        files[CRL] = files[CA_DIR] / "crl.pem"  # of the nodes that it has signed for
    return given | {name: str(path) for name, path in files.items()}


def shown(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in a form that may be stored: instead of the token, whether it is set."""
    return {ENV_TOKEN: SET if settings.get(ENV_TOKEN) else UNSET} | {
        name: settings.get(name) or UNSET for name in (*FILES, *OIDC, *PEERS)
    }


def require_protection(host: str, settings: Mapping[str, str]) -> None:
    """Raises `InvalidSpec` if other machines reach the address, and a token or TLS is missing."""
    needed = (*(() if settings.get(TOKENS_FILE) or settings.get(oidc.ISSUER) else (ENV_TOKEN,)), *TLS_FILES)
    missing = [name for name in needed if not settings.get(name)]
    if missing and not is_loopback(host):
        raise InvalidSpec(
            "--host",
            host,
            "a loopback address, because everyone who reaches the API can run code on every node; or, in the environment, an "
            f"API token and the files of mutual TLS ({', '.join(missing)}: not set; docs/security.md says how to make them); "
            "or --insecure, on a network that only trusted machines reach",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. False for an invalid address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ip_address(str(place[0]).partition("%")[0]).is_loopback for *_, place in found)
