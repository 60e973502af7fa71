"""Certificates that are replaced while a process runs.

Files are looked at when a connection begins: by a server in each handshake, by a client for each channel. So a renewal needs no
restart, and connections that are open stay open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import grpc
import structlog

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.files import state_of
from holdfast.runtime.telling import metrics, telemetry
from holdfast.runtime.trust.tls import CERT, Tls, lifetime_of, own_identities, read_files, require_pair

log = structlog.get_logger("holdfast.runtime.trust.renewal")


def renewed(tls: Tls) -> Tls:
    """Return what the files contain now; `tls` if they have not changed, or if what they contain now is no whole set: files
    that are replaced one after the other, or a certificate that lacks an identity of the one before."""
    if (seen := state_of(tls.files)) == tls.seen or not all(seen):
        return tls
    cert = tls.files[0]
    try:
        pem, key_pem, ca_pem, seen = read_files(tls.files)
        require_pair(pem, key_pem, cert, key_path=tls.files[1])
        identities = own_identities(cert, pem, tls.accepts.fleet, tls.spiffe) if tls.checks_identities else ()
        if lost := set(tls.identities) - set(identities):
            raise InvalidSpec(CERT, str(cert), f"a certificate for {', '.join(sorted(each.uri for each in lost))}")
        now = replace(tls, cert=pem, key=key_pem, ca=ca_pem, seen=seen, identities=identities)
    except InvalidSpec as error:
        log.warning("renewed certificate not used, the one before is", reason=str(error))
        return tls
    report_expiry(now)
    return now


def report_expiry(tls: Tls) -> None:
    """Set the metric. Raises `InvalidSpec` if the certificate is none."""
    telemetry.show(metrics.CERTIFICATE_EXPIRY, [(lifetime_of(tls.cert, CERT, tls.files[0]).ends_at, {})])


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Of this set of files, and of those that replace it."""
    used = tls

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if (now := renewed(used)) is used:
            return None
        used = now
        log.info("certificate renewed", file=str(used.files[0]))
        return _configuration(used)

    # None: unchanged, which the stubs do not know
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed)
    return grpc.dynamic_ssl_server_credentials(_configuration(tls), fetch, require_client_authentication=True)


def _configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.cert)], root_certificates=tls.ca)
