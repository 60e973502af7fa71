"""A private CA in a directory, for installations that have none: certificates with identities, and a list of revoked ones.

ca.key        its key, mode 0600: who reads it can be every node and every service
ca.crt        its certificate, for HOLDFAST_TLS_CA
crl.pem       the revoked certificates, for HOLDFAST_TLS_CRL
fleet         the name of the fleet
issued.jsonl  one line for each certificate; keys of certificates are not kept

An *enrolment CA* is such a directory as well, for HOLDFAST_CA_DIR of a supervisor: its certificate is signed by the fleet's CA,
and what it signs is valid for no host, whatever the certificates say (name constraints). Who reads its ca.key can be every
node, but no service. Its crl.pem has its certificate behind the list, so that those who know the fleet's CA can check it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address, ip_network
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.runtime.files import write_private, write_whole
from holdfast.runtime.private import make_private
from holdfast.runtime.trust.fleet import fleet_name
from holdfast.runtime.trust.identities import Identity, Role
from holdfast.runtime.trust.tls import is_issued_by

KEY, CERTIFICATE, CRL, FLEET, ISSUED = "ca.key", "ca.crt", "crl.pem", "fleet", "issued.jsonl"
BACKDATED = timedelta(minutes=5)  # clocks of machines differ
CA_DIR = "HOLDFAST_CA_DIR"
ENROLMENT = "enrolment"  # in place of an identity, in the list of what was issued
SERIAL_CHARS_MIN = 6  # of a beginning that names a certificate

# Name constraints that exclude every DNS name and IP address.
_EVERY_HOST = (
    x509.DNSName(""),
    x509.IPAddress(ip_network("0.0.0.0/0")),
    x509.IPAddress(ip_network("::/0")),
)


@dataclass(frozen=True, slots=True)
class Record:
    """A certificate that was issued. `expires`: ISO 8601, UTC."""

    serial: str
    identities: tuple[str, ...]
    names: tuple[str, ...]
    issued: str
    expires: str


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM of a certificate and its key."""

    certificate: bytes
    key: bytes
    record: Record


class Authority:
    """The CA in `directory`. Raises `NotFound` if there is none, `InvalidSpec` for a file that cannot be used."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            key = serialization.load_pem_private_key((directory / KEY).read_bytes(), None)
            self._certificate = x509.load_pem_x509_certificate((directory / CERTIFICATE).read_bytes())
            self.fleet = fleet_name((directory / FLEET).read_text().strip())
        except FileNotFoundError as error:
            raise NotFound(
                f"{directory} has no CA ({Path(error.filename).name} is missing): holdfast ca init"
            ) from None
        except OSError as error:
            raise InvalidSpec(
                "--dir", str(directory), f"a directory with a CA ({error.strerror}: {error.filename})"
            ) from error
        except (ValueError, TypeError) as error:
            raise InvalidSpec("--dir", str(directory), f"a directory with a CA ({error})") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != self._certificate.public_key():
            raise InvalidSpec("--dir", str(directory), f"a directory whose {KEY} is the key of {CERTIFICATE}")
        self._key = key

    @property
    def is_for_enrolment(self) -> bool:
        """Whether no certificate that it signs is valid for a host."""
        try:
            limits = self._certificate.extensions.get_extension_for_class(x509.NameConstraints).value
        except x509.ExtensionNotFound:
            return False
        return set(_EVERY_HOST) <= set(limits.excluded_subtrees or ())

    def chain_below(self, trusted: bytes) -> bytes:
        """Return the certificates (PEM) that link a certificate of this authority to the CAs in `trusted` (PEM): none, or this
        authority's own. Raises `InvalidSpec` if none of those CAs has signed it."""
        anchors = x509.load_pem_x509_certificates(trusted)
        if self._certificate in anchors:
            return b""
        if any(is_issued_by(self._certificate, each) for each in anchors):
            return self.certificate
        raise InvalidSpec(CA_DIR, str(self.directory), "a CA that the CA of HOLDFAST_TLS_CA is, or has signed")

    @classmethod
    def create(cls, directory: Path, fleet: str, days: int) -> Authority:
        """Make a CA. Raises `Conflict` if the directory has one."""
        fleet_name(fleet)
        _require_no_ca(directory, "--dir")
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Holdfast CA of {fleet}, {now:%Y-%m-%d %H:%M:%S}")])
        certificate = (
            _builder(name, name, key.public_key(), now, now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls._written(directory, fleet, certificate, key)

    @classmethod
    def _written(
        cls, directory: Path, fleet: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> Authority:
        write_whole(directory / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), durable=True)
        write_whole(directory / FLEET, f"{fleet}\n".encode(), durable=True)
        (directory / ISSUED).touch()
        write_private(directory / KEY, _pem(key))
        made = cls(directory)
        made._publish([])
        return made

    def create_enrolment_ca(self, directory: Path, days: int) -> Authority:
        """Make a CA in `directory` whose certificates are for nodes and for no host: replicators serve each other and know
        each other by identities, and who connects to a service or the API looks for the name of a host. Raises `Conflict` if
        the directory has one."""
        _require_no_ca(directory, "--out")
        limits = self._certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        if limits.path_length == 0:
            raise Conflict(
                f"the CA in {self.directory} was made by an earlier version, and cannot sign other CAs: make another one "
                "(holdfast ca init --dir), or give a supervisor this one itself"
            )
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        expires = self._expiry(now, timedelta(days=days))
        name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, f"Holdfast enrolment CA of {self.fleet}, {now:%Y-%m-%d %H:%M:%S}")]
        )
        certificate = (
            _builder(name, self._certificate.subject, key.public_key(), now, expires)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.NameConstraints(None, _EVERY_HOST), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self._note(_record(certificate, (ENROLMENT,), ()))
        return self._written(directory, self.fleet, certificate, key)

    @property
    def expires(self) -> datetime:
        return self._certificate.not_valid_after_utc

    def issue(self, identities: Sequence[Identity], names: Sequence[str], days: int) -> Pair:
        """Make a certificate for client and server. `names`: DNS names and IP addresses of the server. Raises `InvalidSpec`."""
        if self.is_for_enrolment and (others := [each for each in identities if each.role is not Role.AGENT]):
            raise InvalidSpec(
                "identity", others[0].local, "agent/NODE: an enrolment CA signs no certificates of services"
            )
        if self.is_for_enrolment and names:
            raise InvalidSpec("--host", names[0], "none: an enrolment CA signs no certificates of hosts")
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, record = self._sign(key.public_key(), identities, names, timedelta(days=days))
        return Pair(self._with_chain(certificate), _pem(key), record)

    def sign_agent(self, key: ec.EllipticCurvePublicKey, identity: Identity, life: timedelta) -> tuple[bytes, Record]:
        """Make a certificate for a key that its node has made, and for no host. Returns its PEM. Raises `InvalidSpec`."""
        certificate, record = self._sign(key, (identity,), (), life)
        return certificate.public_bytes(serialization.Encoding.PEM), record

    def _sign(
        self, key: ec.EllipticCurvePublicKey, identities: Sequence[Identity], names: Sequence[str], life: timedelta
    ) -> tuple[x509.Certificate, Record]:
        now = datetime.now(UTC)
        expires = self._expiry(now, life)
        uris = [x509.UniformResourceIdentifier(each.uri) for each in identities]
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identities[0].local[:64])])
        certificate = (
            _builder(subject, self._certificate.subject, key, now, expires)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([*uris, *map(_general_name, names)]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        record = _record(certificate, tuple(each.local for each in identities), tuple(names))
        self._note(record)
        return certificate, record

    def _expiry(self, now: datetime, life: timedelta) -> datetime:
        if now + life > self.expires:
            raise InvalidSpec(
                "--days", life.days, f"no longer than the CA is valid, which is until {self.expires:%Y-%m-%d}"
            )
        return now + life

    def _note(self, record: Record) -> None:
        with self._locked(), (self.directory / ISSUED).open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    def _with_chain(self, certificate: x509.Certificate) -> bytes:
        own = certificate.public_bytes(serialization.Encoding.PEM)
        return own + self.certificate if self.is_for_enrolment else own

    @property
    def certificate(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def records(self) -> tuple[Record, ...]:
        """Every certificate that was issued, oldest first. Raises `InvalidSpec` for a malformed line."""
        lines = (self.directory / ISSUED).read_text().splitlines()
        return tuple(self._record(number, line) for number, line in enumerate(lines, 1))

    def _record(self, number: int, line: str) -> Record:
        try:
            fields = json.loads(line)
            identities, names = tuple(fields.pop("identities")), tuple(fields.pop("names"))
            return Record(identities=identities, names=names, **fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            place = f"{self.directory / ISSUED}:{number}"
            raise InvalidSpec("certificate", line, "a line that `holdfast ca issue` has written", place) from None

    def revoked(self) -> frozenset[str]:
        """Serial numbers of the revoked certificates. Raises `InvalidSpec` if the list cannot be read."""
        return frozenset(f"{each.serial_number:x}" for each in self._crl())

    def revoke_identity(self, identity: str) -> tuple[Record, ...]:
        """Revoke all valid certificates of `agent/node-1`, renewed ones included. Raises `NotFound` if there is none."""
        with self._locked():
            now, revoked = datetime.now(UTC), self.revoked()
            found = [
                each
                for each in self.records()
                if identity in each.identities
                and each.serial not in revoked
                and datetime.fromisoformat(each.expires) > now
            ]
            if not found:
                raise NotFound(f"no valid certificate of {identity}: holdfast ca list")
            self._publish([*self._crl(), *(_revoked(each.serial, now) for each in found)])
        return tuple(found)

    def revoke(self, serial: str) -> Record:
        """Revoke the certificate whose serial number begins so. Raises `NotFound`, or `Conflict` if that is not one."""
        with self._locked():
            begins = serial.lower().removeprefix("0x").replace(":", "")
            found = [each for each in self.records() if each.serial.startswith(begins)]
            if len(begins) < SERIAL_CHARS_MIN or not found:
                raise NotFound(
                    f"no certificate whose serial number begins with {serial!r} (at least {SERIAL_CHARS_MIN} characters): "
                    "holdfast ca list"
                )
            if len(found) > 1:
                raise Conflict(f"{len(found)} certificates begin with {serial!r}: give more of the serial number")
            if found[0].serial in self.revoked():
                raise Conflict(f"certificate {found[0].serial} is revoked already")
            self._publish([*self._crl(), _revoked(found[0].serial, datetime.now(UTC))])
        return found[0]

    def _crl(self) -> list[x509.RevokedCertificate]:
        path = self.directory / CRL
        try:
            return list(x509.load_pem_x509_crl(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise InvalidSpec("--dir", str(self.directory), f"a directory with the list {CRL} ({error})") from error

    def _publish(self, entries: Sequence[x509.RevokedCertificate]) -> None:
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._certificate.subject)
        builder = builder.last_update(datetime.now(UTC) - BACKDATED).next_update(self.expires)
        for entry in entries:
            builder = builder.add_revoked_certificate(entry)
        crl = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        signer = self.certificate if self.is_for_enrolment else b""
        write_whole(self.directory / CRL, crl + signer, durable=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.directory / FLEET).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _require_no_ca(directory: Path, option: str) -> None:
    """Make the directory private. Raises `Conflict` if it has a CA; `option` names the directory's option in the message."""
    make_private(directory)
    if (directory / KEY).exists():
        raise Conflict(f"{directory} has a CA, whose certificates would become invalid: choose another {option}")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, expires: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - BACKDATED).not_valid_after(expires)


def _record(certificate: x509.Certificate, identities: tuple[str, ...], names: tuple[str, ...]) -> Record:
    return Record(
        f"{certificate.serial_number:x}",
        identities,
        names,
        datetime.now(UTC).isoformat(timespec="seconds"),
        certificate.not_valid_after_utc.isoformat(),
    )


def _revoked(serial: str, at: datetime) -> x509.RevokedCertificate:
    return x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(at).build()


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise InvalidSpec("--host", name, "a DNS name or an IP address") from error


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
