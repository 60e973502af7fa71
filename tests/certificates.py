"""Certificates for tests of mutual TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

from holdfast.runtime.tls import Tls

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
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
