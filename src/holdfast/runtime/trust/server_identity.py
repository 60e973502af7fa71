"""Which role a server has, found out before a channel to it is used.

gRPC for Python checks a server's certificate against the CA and the host name, and shows it to nobody. So a separate connection
reads the certificate first, and the channel then accepts exactly this certificate: to answer on it, a server must hold its key.
Between the two a server may have renewed its certificate, or a load balancer may have chosen another server; then the channel
fails, and the next attempt begins with another look."""

from __future__ import annotations

import ssl
from typing import Any

import anyio
import grpc
from anyio.streams.tls import TLSAttribute

from holdfast.domain.errors import OtherRole
from holdfast.runtime import freeze
from holdfast.runtime.trust.identities import Role
from holdfast.runtime.trust.peer_certificate import examined, names_in, with_files
from holdfast.runtime.trust.tls import Tls

LOOK_TIMEOUT_S = 3.0
_HOSTS = frozenset({"DNS", "IP Address"})


async def look(endpoint: str, tls: Tls, role: Role) -> bytes:
    """Return the certificate (PEM) of the server at `host:port`, which has the role; empty if it has no identity and need not
    have one, so that any certificate of the CA will do. Raises `OtherRole` with the reason if not,
    and `AioRpcError` if the server does not answer or its certificate is not of the CA."""
    certificate, fields = await _presented(endpoint, tls)
    pem = ssl.DER_cert_to_PEM_cert(certificate).encode()
    for_whom, whose = f"{endpoint} must be a server for", f"the certificate of {endpoint}"
    identities = examined(tls, fields, pem, frozenset({role}), for_whom=for_whom, whose=whose)
    if identities and not any(kind in _HOSTS for kind, _ in names_in(fields)):
        # gRPC would compare the common name, which name constraints of a CA do not cover.
        raise OtherRole(f"{whose} has no DNS name and no IP address")
    return pem if identities else b""


async def _presented(endpoint: str, tls: Tls) -> tuple[bytes, dict[str, Any]]:
    host, _, port = endpoint.rpartition(":")
    context = _context(tls)
    with freeze.patience(LOOK_TIMEOUT_S):
        try:
            async with await anyio.connect_tcp(
                host.strip("[]"), int(port), ssl_context=context, tls_standard_compatible=False
            ) as stream:
                fields: Any = stream.extra(TLSAttribute.peer_certificate)
                return stream.extra(TLSAttribute.peer_certificate_binary) or b"", fields
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            raise _unavailable(endpoint, str(error) or type(error).__name__) from error
    raise _unavailable(endpoint, f"no certificate within {LOOK_TIMEOUT_S:g} s")


def _context(tls: Tls) -> ssl.SSLContext:
    context = with_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls)
    context.set_alpn_protocols(["h2"])
    return context


def _unavailable(endpoint: str, reason: str) -> grpc.aio.AioRpcError:
    details = f"failed to connect to {endpoint}: {reason}"
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
