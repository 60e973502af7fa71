"""The certificate of the REST API: which one the supervisor uses, its names, and its renewal.

The files are looked at in each handshake, so a renewed certificate needs no restart and open connections stay open. Files that
do not belong together are not used: a log record says why, and the next handshake looks again."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import structlog

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.hosts import is_loopback
from holdfast.runtime.files import state_of
from holdfast.runtime.trust.tls import CERT, KEY, lifetime_of, read_pem, require_pair

API_TLS, API_CERT, API_KEY = "HOLDFAST_API_TLS", "HOLDFAST_API_TLS_CERT", "HOLDFAST_API_TLS_KEY"
Use = Literal["auto", "on", "off"]
log = structlog.get_logger("holdfast.runtime.trust.api_certificate")


@dataclass(frozen=True, slots=True)
class ApiCertificate:
    """Files of a certificate, with the chain below its CA, and of its key. `variables`: the settings that name them."""

    cert: Path
    key: Path
    variables: tuple[str, str] = (API_CERT, API_KEY)

    def names(self) -> tuple[str, ...]:
        """Return the DNS names and IP addresses of the certificate. Raises `InvalidSpec`."""
        from cryptography import x509

        try:
            found = x509.load_pem_x509_certificate(read_pem(self.variables[0], self.cert))
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return ()
        except ValueError as error:
            raise InvalidSpec(self.variables[0], str(self.cert), f"a PEM file with a certificate ({error})") from None
        return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))

    def context(self) -> ssl.SSLContext:
        """Return the context of a server, which uses renewed files. Raises `InvalidSpec` for files that cannot be used."""
        return _Renewing(self).first

    def warn_of_time(self, now: float) -> None:
        """Log a certificate that clients refuse because of its time. Raises `InvalidSpec` if the file has none."""
        lifetime = lifetime_of(read_pem(self.variables[0], self.cert), self.variables[0], self.cert)
        if not lifetime.begins_at <= now < lifetime.ends_at:
            state = "has expired" if now >= lifetime.ends_at else "is not valid yet"
            log.warning(
                f"the certificate of the API {state}", file=str(self.cert), advice="clients refuse it: renew it"
            )


def choose(
    use: Use, own: tuple[Path | None, Path | None], of_service: tuple[Path | None, Path | None], *, loopback: bool
) -> ApiCertificate | None:
    """Decide on the certificate of the API; None = plain HTTP. `own`: of the API alone; `of_service`: what agents see.

    Without an own one, `auto` uses that of the service where other machines reach the API. Raises `InvalidSpec`."""
    if (own[0] is None) != (own[1] is None):
        missing = API_CERT if own[0] is None else API_KEY
        raise InvalidSpec(missing, None, f"a PEM file: {API_CERT} and {API_KEY} are given together")
    if use == "off":
        return None
    if own[0] is not None and own[1] is not None:
        return ApiCertificate(own[0], own[1])
    if of_service[0] is not None and of_service[1] is not None:
        return ApiCertificate(of_service[0], of_service[1], (CERT, KEY)) if use == "on" or not loopback else None
    if use == "on":
        raise InvalidSpec(API_TLS, use, f"{API_CERT} and {API_KEY}, or {CERT} and {KEY}, with it")
    return None


def host_for_clients(host: str, names: Sequence[str], hostname: str) -> str:
    """Return the host of the API's URL: one for which the certificate is valid, if there is one."""
    usable = [name for name in names if not name.startswith("*")]
    of_others = [name for name in usable if not is_loopback(name)]
    for candidate in (host, hostname, *of_others, *usable):
        if covers(names, candidate):
            return candidate
    return host


def covers(names: Sequence[str], host: str) -> bool:
    """Whether a certificate with these names is valid for the host."""
    return any(_matches(name, host) for name in names)


def _matches(name: str, host: str) -> bool:
    try:
        return ip_address(host) == ip_address(name)
    except ValueError:
        pass
    name, host = name.lower(), host.lower()
    return host == name or (name.startswith("*.") and host.partition(".")[2] == name[2:] and not host.startswith("*"))


class _Renewing:
    """Chooses the context of each handshake: `first` until the files change, then a new one."""

    def __init__(self, certificate: ApiCertificate) -> None:
        self._certificate = certificate
        self._files = (certificate.cert, certificate.key)
        self._seen = state_of(self._files)
        self.first = self._used = self._load()
        # called in every handshake, also without a name
        self.first.sni_callback = self._choose

    def _choose(self, handshake: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
        if (seen := state_of(self._files)) != self._seen and all(seen):
            self._seen = seen  # also of files that are not used: they are reported once
            try:
                self._used = self._load()
                log.info("certificate of the API renewed", file=str(self._certificate.cert))
            except InvalidSpec as error:
                log.warning("renewed certificate of the API not used, the one before is", reason=str(error))
        if self._used is not self.first:
            handshake.context = self._used

    def _load(self) -> ssl.SSLContext:
        cert, key = self._files
        variable, of_key = self._certificate.variables
        require_pair(read_pem(variable, cert), read_pem(of_key, key), cert, variable, of_key, key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(cert, key)
        except OSError as error:  # replaced since it was read; SSLError is one
            raise InvalidSpec(variable, str(cert), f"a certificate and its key ({error})") from error
        return context


def of_listener(
    use: Use,
    own: tuple[Path | None, Path | None],
    of_service: tuple[Path | None, Path | None],
    listener: socket.socket,
) -> tuple[ApiCertificate | None, str]:
    """Return the certificate with which `listener` is served, and the host of the API's URL. Raises `InvalidSpec`."""
    host = str(listener.getsockname()[0])
    certificate = choose(use, own, of_service, loopback=is_loopback(host))
    if certificate is not None:
        names = certificate.names()
        certificate.warn_of_time(time.time())
        host = host_for_clients(host, names, socket.gethostname())
        if not covers(names, host):
            log.warning(
                "the certificate of the API has no name by which clients reach it",
                file=str(certificate.cert),
                address=host,
                advice="issue it with --host NAME, and set HOLDFAST_API_URL to https://NAME:PORT",
            )
    return certificate, host
