"""Mutual TLS: both ends present a certificate of one private CA, and what the certificates say of themselves decides who may do
what (`identities`, `authorization`). Configured by three files. Renewed files: `renewal`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.files import state_of
from holdfast.runtime.trust.authorization import Accepts
from holdfast.runtime.trust.identities import Identity, Role, SpiffeRule, identities_in

if TYPE_CHECKING:  # imported on demand: a health check imports this module every few seconds, usually without TLS
    import grpc
    from cryptography import x509

CERT, KEY, CA = "HOLDFAST_TLS_CERT", "HOLDFAST_TLS_KEY", "HOLDFAST_TLS_CA"
IDENTITIES = "HOLDFAST_TLS_IDENTITIES"
READ_TRIES_MAX = 5
CHAIN_MAX = 100  # certificates of a file that are looked at
ERROR_CHARS_MAX = 120  # of what a library says of a file
Demand = Literal["auto", "required", "optional"]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes of this side's certificate and key, and of the CA that signs the other side's. `identities`: of this side's
    certificate. `accepts`: what is demanded of the other side's. `files`: of certificate, key and CA; `seen`:
    which state of them was read. `checks_identities`: whether a client reads the server's. `crl`: file of revoked
    certificates."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    files: tuple[Path, Path, Path]
    seen: tuple[tuple[int, ...], ...] = ()
    identities: tuple[Identity, ...] = ()
    accepts: Accepts = field(default_factory=Accepts)
    spiffe: tuple[SpiffeRule, ...] = ()
    checks_identities: bool = False
    crl: Path | None = None

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
        crl: Path | None = None,
    ) -> Tls | None:
        """Read the files; None if none is named. Raises `InvalidSpec` that names a file that is missing or cannot be read.

        `fleet`: of this process, empty = not configured: that of the certificate applies. `demand`: whether the other side's
        certificate must have an identity; `auto` = if this side's has one; None = identities are not looked at."""
        require_whole(cert=cert, key=key, ca=ca)
        if cert is None or key is None or ca is None:
            return None
        files = (cert, key, ca)
        pem, key_pem, ca_pem, seen = read_files(files)
        identities = () if demand is None else own_identities(cert, pem, fleet, spiffe)
        required = demand == "required" or (demand == "auto" and bool(identities))
        fleets = {each.fleet for each in identities}
        accepts = Accepts(fleet or (fleets.pop() if len(fleets) == 1 else ""), required)
        checks = demand is not None
        return cls(pem, key_pem, ca_pem, files, seen, identities, accepts, spiffe, checks, crl)

    def require(self, *roles: Role, name: str = "") -> None:
        """Raises `InvalidSpec` if this side's certificate has identities, or must have one, and none of them is of this fleet,
        in one of `roles` and for `name`. The error names the first role."""
        mine = self.accepts.of_this_fleet(self.identities)
        if any(each.stands_for(role, name) for each in mine for role in roles):
            return
        if not (self.identities or self.accepts.required):
            return
        needed = Identity(self.accepts.fleet or "FLEET", roles[0], name).uri
        shown = ", ".join(each.uri for each in self.identities) or "no identity"
        raise InvalidSpec(CERT, str(self.files[0]), f"a certificate for {needed}; this one is for {shown}")

    def require_pair(self) -> None:
        """Raises `InvalidSpec` if the key is not that of the certificate."""
        cert, key, _ = self.files
        require_pair(self.cert, self.key, cert, key_path=key)

    def require_usable(self) -> None:
        """Raises `InvalidSpec` that names the file if nobody could connect: the key is another one's, or a file has no PEM."""
        self.require_pair()
        _certificates(self.ca, CA, self.files[2])

    @property
    def signed_by_its_ca(self) -> bool:
        """Whether a CA of the CA file has signed this side's certificate. The other ends may have another CA file."""
        cert, _, ca = self.files
        return is_signed(_certificates(self.cert, CERT, cert), _certificates(self.ca, CA, ca))

    @property
    def proves_nothing(self) -> bool:
        """Whether any certificate of the CA is accepted as anybody."""
        return not self.identities and not self.accepts.required

    def channel_credentials(self, pinned: bytes = b"") -> grpc.ChannelCredentials:
        """`pinned`: PEM of the only certificate that the server may present; empty = any of the CA for the server's name."""
        import grpc

        return grpc.ssl_channel_credentials(
            root_certificates=pinned or self.ca, private_key=self.key, certificate_chain=self.cert
        )


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a certificate is valid, in seconds since 1970."""

    begins_at: float
    ends_at: float


def lifetime_of(pem: bytes, variable: str, path: Path) -> Lifetime:
    """Return the lifetime of the first certificate in `pem`. Raises `InvalidSpec`, which names the file, if there is none."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise InvalidSpec(variable, str(path), f"a PEM file with a certificate ({_short(error)})") from None
    return Lifetime(found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp())


def require_whole(*, cert: Path | None, key: Path | None, ca: Path | None) -> None:
    """Raises `InvalidSpec` that names the first missing file if only some of the three are given."""
    files = {CERT: cert, KEY: key, CA: ca}
    missing = [variable for variable, path in files.items() if path is None]
    if 0 < len(missing) < len(files):
        raise InvalidSpec(missing[0], None, "a PEM file: mutual TLS needs certificate, key and CA together")


def uris_of(pem: bytes) -> tuple[str, ...]:
    """Return the URIs in the subjectAltName of a certificate (the first in `pem`). Raises `ValueError` if `pem` has none."""
    from cryptography import x509

    try:
        names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.value.get_values_for_type(x509.UniformResourceIdentifier))


def own_identities(path: Path, pem: bytes, fleet: str, spiffe: tuple[SpiffeRule, ...]) -> tuple[Identity, ...]:
    try:
        return identities_in(uris_of(pem), fleet, spiffe)
    except InvalidSpec as error:
        raise InvalidSpec(error.field, error.value, error.expected, f"{CERT} ({path})") from None
    except ValueError as error:
        raise InvalidSpec(CERT, str(path), f"a PEM file with a certificate ({_short(error)})") from None


def require_pair(
    cert: bytes, key: bytes, path: Path, variable: str = CERT, of_key: str = KEY, key_path: Path | None = None
) -> None:
    """Raises `InvalidSpec` if the key is not that of the certificate. `variable`, `of_key`: the settings that name them;
    `key_path`: None = in the file of the certificate."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    leaf, key_file = _certificates(cert, variable, path)[0], str(key_path or path)
    try:
        of_file = load_pem_private_key(key, None).public_key()
    except TypeError:  # it needs a password
        raise InvalidSpec(of_key, key_file, "a PEM file with a private key that is not encrypted") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidSpec(of_key, key_file, f"a PEM file with a private key ({_short(error)})") from None
    try:
        same = leaf.public_key() == of_file
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidSpec(variable, str(path), f"a PEM file with a certificate ({_short(error)})") from None
    if not same:
        raise InvalidSpec(variable, str(path), f"the certificate of the key in {of_key} ({key_file})")


def is_signed(chain: Sequence[x509.Certificate], anchors: Sequence[x509.Certificate]) -> bool:
    """Whether one of `anchors` has signed the first certificate, directly or by the others of the chain."""
    leaf, *between = chain
    reached, waiting = [leaf], [leaf]
    while waiting:
        each = waiting.pop()
        if each in anchors or any(is_issued_by(each, anchor) for anchor in anchors):
            return True
        found = [other for other in between if other not in reached and is_issued_by(each, other)]
        reached += found
        waiting += found
    return False


def _certificates(pem: bytes, variable: str, path: Path) -> list[x509.Certificate]:
    """Return those of a file, at most `CHAIN_MAX`. Raises `InvalidSpec` without any."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)[:CHAIN_MAX]
    except ValueError as error:
        raise InvalidSpec(variable, str(path), f"a PEM file with a certificate ({_short(error)})") from None


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")[:ERROR_CHARS_MAX]


def is_issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    """Whether the key of `ca` has signed the certificate, under its name."""
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def read_files(files: tuple[Path, Path, Path]) -> tuple[bytes, bytes, bytes, tuple[tuple[int, ...], ...]]:
    """Return certificate, key, CA, and the state of the files that they were read from. Raises `InvalidSpec`.

    Files that are replaced while they are read are read again: the kubelet replaces all files of a mounted Secret at once, and
    parts of two sets do not belong together. Files that change at each reading are used as they are read last."""
    cert, key, ca = files
    for last in (False,) * (READ_TRIES_MAX - 1) + (True,):
        seen = state_of(files)
        try:
            read = read_pem(CERT, cert), read_pem(KEY, key), read_pem(CA, ca)
        except InvalidSpec:
            if last or state_of(files) == seen:
                raise
            continue
        if last or state_of(files) == seen:
            break
    return *read, seen


def read_pem(variable: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidSpec(variable, str(path), f"a readable PEM file ({error.strerror})") from error
