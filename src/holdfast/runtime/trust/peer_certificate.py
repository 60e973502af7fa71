"""What is looked at in the certificate of the other end, where this side speaks TLS by `ssl` and not by gRPC."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from holdfast.domain.errors import InvalidSpec, OtherRole
from holdfast.runtime.trust.authorization import refusal_of_roles
from holdfast.runtime.trust.identities import Identity, Role, identities_in
from holdfast.runtime.trust.revocation import revocations_of, serial_of, shown
from holdfast.runtime.trust.tls import Tls


def names_in(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The subjectAltName of a certificate as `ssl` shows it: pairs (kind, name)."""
    return list(fields.get("subjectAltName", ()))


def examined(
    tls: Tls, fields: Mapping[str, Any], pem: bytes, roles: frozenset[Role], *, for_whom: str, whose: str
) -> tuple[Identity, ...]:
    """Return the identities of a certificate, which has one of the roles or need not have any, and was not revoked.

    `fields`: as `ssl` shows them. `for_whom`: the begin of a sentence that ends with the roles; `whose`: the certificate, as in
    "the certificate of X". Raises `OtherRole` with the reason."""
    uris = [name for kind, name in names_in(fields) if kind == "URI"]
    try:
        identities = identities_in(uris, tls.accepts.fleet, tls.spiffe)
    except InvalidSpec as error:
        raise OtherRole(f"{whose}: {error}") from None
    if reason := refusal_of_roles(identities, tls.accepts, roles, for_whom):
        raise OtherRole(reason)
    if (revoked := revocations_of(tls)) is not None and (serial := serial_of(pem)) in revoked:
        raise OtherRole(f"{whose} (serial number {shown(serial)}) was revoked")
    return identities


def with_files(context: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    """Return the context, which presents the certificate and trusts the CA of the files. The other end is known by what
    `examined` finds, or by the channel that follows. Raises OSError for files that cannot be used."""
    context.check_hostname = False
    context.load_verify_locations(cadata=tls.ca.decode(errors="replace"))
    context.load_cert_chain(*tls.files[:2])
    return context
