"""Certificates for tests of mutual TLS."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from waiting import TIMEOUT_S

from holdfast.runtime.trust.tls import Tls

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def make(folder: Path) -> Path:
    """Two CAs, `ours` and `foreign`, each with one leaf for localhost and 127.0.0.1."""
    (folder / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("ours", "foreign"):
        ca, leaf = folder / f"{name}-ca", folder / name
        _openssl("req", "-x509", *CURVE, "-subj", f"/CN={name}-ca", "-keyout", f"{ca}.key", "-out", f"{ca}.pem")
        _sign(leaf, ca, folder / "san")
    return folder


def issue(folder: Path, leaf: str, *uris: str, days: int = 30) -> Path:
    """One more leaf of the CA `ours`, with these URIs. Returns its PEM file; the key is beside it."""
    return issue_for(folder, leaf, "DNS:localhost", "IP:127.0.0.1", *(f"URI:{uri}" for uri in uris), days=days)


def issue_for(folder: Path, leaf: str, *names: str, days: int = 30) -> Path:
    """One more leaf of the CA `ours`, with exactly these names, such as `DNS:localhost`. Returns its PEM file."""
    (folder / f"{leaf}.san").write_text(f"subjectAltName={','.join(names)}")
    return _sign(folder / leaf, folder / "ours-ca", folder / f"{leaf}.san", days)


def files(folder: Path, leaf: str) -> dict[str, Path]:
    """The settings of a service."""
    return {"tls_cert": folder / f"{leaf}.pem", "tls_key": folder / f"{leaf}.key", "tls_ca": folder / "ours-ca.pem"}


def tls(folder: Path, leaf: str, ca: str) -> Tls:
    loaded = Tls.load(cert=folder / f"{leaf}.pem", key=folder / f"{leaf}.key", ca=folder / f"{ca}-ca.pem")
    assert loaded is not None
    return loaded


def _sign(leaf: Path, ca: Path, san: Path, days: int = 30) -> Path:
    _openssl("req", *CURVE, "-subj", f"/CN={leaf.name}", "-keyout", f"{leaf}.key", "-out", f"{leaf}.csr")
    signer = ["-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-extfile", f"{san}"]
    _openssl("x509", "-req", "-in", f"{leaf}.csr", "-days", str(days), *signer, "-out", f"{leaf}.pem")
    return Path(f"{leaf}.pem")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=TIMEOUT_S)


def issue_at(folder: Path, leaf: str, *, names: Sequence[str], begins_in_days: float, days: float) -> Path:
    """One more leaf of the CA `ours`, which may have expired: `openssl x509` gives none of those."""
    ca = x509.load_pem_x509_certificate((folder / "ours-ca.pem").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ours-ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key, begins = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC) + timedelta(days=begins_in_days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, leaf)]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / f"{leaf}.key").write_bytes(key.private_bytes(*pem))
    (folder / f"{leaf}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return folder / f"{leaf}.pem"
