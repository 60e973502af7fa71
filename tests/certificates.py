"""Certificates for tests of mutual TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

from holdfast.runtime.tls import Tls


def make(folder: Path) -> Path:
    """Two CAs, `ours` and `foreign`, each with one leaf for localhost and 127.0.0.1."""
    (folder / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for name in ("ours", "foreign"):
        ca, leaf = folder / f"{name}-ca", folder / name
        _openssl("req", "-x509", *curve, "-subj", f"/CN={name}-ca", "-keyout", f"{ca}.key", "-out", f"{ca}.pem")
        _openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", f"{leaf}.key", "-out", f"{leaf}.csr")
        signer = ["-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-extfile", f"{folder}/san"]
        _openssl("x509", "-req", "-in", f"{leaf}.csr", *signer, "-out", f"{leaf}.pem")
    return folder


def tls(folder: Path, leaf: str, ca: str) -> Tls:
    loaded = Tls.load(cert=folder / f"{leaf}.pem", key=folder / f"{leaf}.key", ca=folder / f"{ca}-ca.pem")
    assert loaded is not None
    return loaded


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
