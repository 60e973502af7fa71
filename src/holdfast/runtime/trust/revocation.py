"""Certificates that were revoked: the serial numbers in a CRL, a file in PEM that the CA has signed.

The file may have several lists, and certificates of CAs that the CA has signed, whose lists are valid as well: that of an
enrolment CA has both (`authority`).

The file is read again when it has changed. If it cannot be used then, the serial numbers of the one before stay. A CRL is valid
here until it is replaced, whatever date it names for its successor: an old list refuses more than none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.files import state_of
from holdfast.runtime.trust.tls import Tls, is_issued_by

if TYPE_CHECKING:  # imported on demand, as in `tls`
    from cryptography import x509

CRL = "HOLDFAST_TLS_CRL"
_LIST = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----\s*", re.DOTALL)

log = structlog.get_logger("holdfast.runtime.trust.revocation")


class Revocations:
    """Raises `InvalidSpec` if the file cannot be used at the start. `ca`: file with the certificates that may have signed."""

    def __init__(self, file: Path, ca: Path) -> None:
        self._file, self._ca = file, ca
        self._seen = state_of((file,))
        self._serials = _serials(file, ca)

    def refresh(self) -> None:
        """Read the file if it has changed."""
        if (seen := state_of((self._file,))) == self._seen:
            return
        self._seen = seen
        try:
            self._serials = _serials(self._file, self._ca)
        except InvalidSpec as error:
            log.warning("CRL not used, the one before is", reason=str(error), revoked=len(self._serials))
        else:
            log.info("CRL read", file=str(self._file), revoked=len(self._serials))

    def __contains__(self, serial: int) -> bool:
        return serial in self._serials


def revocations_of(tls: Tls) -> Revocations | None:
    """Return what the CRL says now; None if there is none. Raises `InvalidSpec` if it could never be read."""
    if tls.crl is None:
        return None
    known = _opened(tls.crl, tls.files[2])
    known.refresh()
    return known


@cache
def _opened(file: Path, ca: Path) -> Revocations:
    return Revocations(file, ca)  # kept, so that a file that cannot be read later leaves what was read before


def serial_of(pem: bytes) -> int:
    """Return the serial number of a certificate. Raises `ValueError` if `pem` has none."""
    from cryptography import x509

    return x509.load_pem_x509_certificate(pem).serial_number


def serials_of(pem: bytes) -> tuple[int, ...]:
    """Return the serial numbers of all certificates in `pem`. Raises `ValueError` without any."""
    from cryptography import x509

    return tuple(each.serial_number for each in x509.load_pem_x509_certificates(pem))


def shown(serial: int) -> str:
    return f"{serial:x}"


def _serials(file: Path, ca: Path) -> frozenset[int]:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        content = file.read_bytes()
        crls = [x509.load_pem_x509_crl(each) for each in _LIST.findall(content) or [content]]
        anchors = x509.load_pem_x509_certificates(ca.read_bytes())
        others = x509.load_pem_x509_certificates(content) if b"BEGIN CERTIFICATE" in content else []
    except OSError as error:
        raise InvalidSpec(CRL, str(file), f"a readable CRL in PEM ({error.strerror}: {error.filename})") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: of a key that cannot sign
        raise InvalidSpec(CRL, str(file), f"a CRL in PEM, and certificates of the CA in {ca} ({error})") from error
    signers = [*anchors, *(each for each in others if _is_ca_of(each, anchors))]
    for crl in crls:
        if not any(_has_signed(each, crl, file, ca) for each in signers):
            raise InvalidSpec(CRL, str(file), f"a CRL that the CA of {ca} has signed")
    return frozenset(each.serial_number for crl in crls for each in crl)


def _has_signed(signer: x509.Certificate, crl: x509.CertificateRevocationList, file: Path, ca: Path) -> bool:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return crl.issuer == signer.subject and crl.is_signature_valid(signer.public_key())  # type: ignore[arg-type]  # of any kind that signs
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: of a key that cannot sign
        raise InvalidSpec(CRL, str(file), f"a CRL in PEM, and certificates of the CA in {ca} ({error})") from error


def _is_ca_of(certificate: x509.Certificate, anchors: Sequence[x509.Certificate]) -> bool:
    """Whether this is the certificate of a CA that one of `anchors` has signed."""
    from cryptography import x509

    try:
        if not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            return False
    except x509.ExtensionNotFound:
        return False
    return any(is_issued_by(certificate, anchor) for anchor in anchors)
