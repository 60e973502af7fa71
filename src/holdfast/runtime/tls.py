"""Mutual TLS: both ends present a certificate of one private CA, and what the certificates say of themselves decides who may do
what (`identities`, `authorization`). Configured by three files, read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.authorization import Accepts
from holdfast.runtime.identities import Identity, Role, SpiffeRule, identities_in

if TYPE_CHECKING:  # imported on demand: a health check imports this module every few seconds, usually without TLS
    import grpc

CERT, KEY, CA = "HOLDFAST_TLS_CERT", "HOLDFAST_TLS_KEY", "HOLDFAST_TLS_CA"
IDENTITIES = "HOLDFAST_TLS_IDENTITIES"
Demand = Literal["auto", "required", "optional"]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes of this side's certificate and key, and of the CA that signs the other side's. `identities`: of this side's
    certificate. `accepts`: what is demanded of the other side's. `files`: of certificate and key.
    `checks_identities`: whether a client reads the server's."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    files: tuple[Path, Path]
    identities: tuple[Identity, ...] = ()
    accepts: Accepts = field(default_factory=Accepts)
    spiffe: tuple[SpiffeRule, ...] = ()
    checks_identities: bool = False

    @classmethod
    def load(
        cls,
        *,
        cert: Path | None,
        key: Path | None,
        ca: Path | None,
        fleet: str = "",
        demand: Demand | None = None,
        spiffe: tuple[SpiffeRule, ...] = (),
    ) -> Tls | None:
        """Read the files; None if none is named. Raises `InvalidSpec` that names a file that is missing or cannot be read.

        `fleet`: of this process, empty = not told; then it is that of the certificate. `demand`: whether the other side's
        certificate must have an identity; `auto` = if this side's has one; None = identities are not looked at."""
        require_whole(cert=cert, key=key, ca=ca)
        if cert is None or key is None or ca is None:
            return None
        pem = _read(CERT, cert)
        identities = () if demand is None else _own(cert, pem, fleet, spiffe)
        required = demand == "required" or (demand == "auto" and bool(identities))
        fleets = {each.fleet for each in identities}
        accepts = Accepts(fleet or (fleets.pop() if len(fleets) == 1 else ""), required)
        return cls(pem, _read(KEY, key), _read(CA, ca), (cert, key), identities, accepts, spiffe, demand is not None)

    def require(self, role: Role, name: str = "") -> None:
        """Raises `InvalidSpec` if this side's certificate has identities, or must have one, and none of them is this one."""
        mine = self.accepts.of_this_fleet(self.identities)
        if any(each.stands_for(role, name) for each in mine) or not (self.identities or self.accepts.required):
            return
        needed = Identity(self.accepts.fleet or "FLEET", role, name).uri
        shown = ", ".join(each.uri for each in self.identities) or "no identity"
        raise InvalidSpec(CERT, str(self.files[0]), f"a certificate for {needed}; this one is for {shown}")

    @property
    def proves_nothing(self) -> bool:
        """Whether any certificate of the CA is accepted as anybody."""
        return not self.identities and not self.accepts.required

    def server_credentials(self) -> grpc.ServerCredentials:
        import grpc

        return grpc.ssl_server_credentials([(self.key, self.cert)], root_certificates=self.ca, require_client_auth=True)

    def channel_credentials(self, pinned: bytes = b"") -> grpc.ChannelCredentials:
        """`pinned`: PEM of the only certificate that the server may present; empty = any of the CA for the server's name."""
        import grpc

        return grpc.ssl_channel_credentials(
            root_certificates=pinned or self.ca, private_key=self.key, certificate_chain=self.cert
        )


def require_whole(*, cert: Path | None, key: Path | None, ca: Path | None) -> None:
    """Raises `InvalidSpec` that names the first missing file if only some of the three are given."""
    files = {CERT: cert, KEY: key, CA: ca}
    missing = [variable for variable, path in files.items() if path is None]
    if 0 < len(missing) < len(files):
        raise InvalidSpec(missing[0], None, "a PEM file: mutual TLS needs certificate, key and CA together")


def uris_of(pem: bytes) -> tuple[str, ...]:
    """Return the URIs in the subjectAltName of a certificate (the first in `pem`). Raises `ValueError` if it is none."""
    from cryptography import x509

    try:
        names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.value.get_values_for_type(x509.UniformResourceIdentifier))


def _own(path: Path, pem: bytes, fleet: str, spiffe: tuple[SpiffeRule, ...]) -> tuple[Identity, ...]:
    try:
        return identities_in(uris_of(pem), fleet, spiffe)
    except InvalidSpec as error:
        raise InvalidSpec(error.field, error.value, error.expected, f"{CERT} ({path})") from None
    except ValueError as error:
        raise InvalidSpec(CERT, str(path), f"a PEM file with a certificate ({error})") from None


def _read(variable: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidSpec(variable, str(path), f"a readable PEM file ({error.strerror})") from error
