"""Mutual TLS: both ends present a certificate of one private CA. Configured by three files, read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.domain.errors import InvalidSpec

if TYPE_CHECKING:  # imported on demand: a health check imports this module every few seconds, usually without TLS
    import grpc

CERT, KEY, CA = "HOLDFAST_TLS_CERT", "HOLDFAST_TLS_KEY", "HOLDFAST_TLS_CA"


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes of this side's certificate and key, and of the CA that signs the other side's."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes

    @classmethod
    def load(cls, *, cert: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
        """Read the files; None if none is named. Raises `InvalidSpec` that names a file that is missing or cannot be read."""
        require_whole(cert=cert, key=key, ca=ca)
        if cert is None or key is None or ca is None:
            return None
        return cls(cert=_read(CERT, cert), key=_read(KEY, key), ca=_read(CA, ca))

    def server_credentials(self) -> grpc.ServerCredentials:
        import grpc

        return grpc.ssl_server_credentials([(self.key, self.cert)], root_certificates=self.ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        import grpc

        return grpc.ssl_channel_credentials(
            root_certificates=self.ca, private_key=self.key, certificate_chain=self.cert
        )


def require_whole(*, cert: Path | None, key: Path | None, ca: Path | None) -> None:
    """Raises `InvalidSpec` that names the first missing file if only some of the three are given."""
    files = {CERT: cert, KEY: key, CA: ca}
    missing = [variable for variable, path in files.items() if path is None]
    if 0 < len(missing) < len(files):
        raise InvalidSpec(missing[0], None, "a PEM file: mutual TLS needs certificate, key and CA together")


def _read(variable: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidSpec(variable, str(path), f"a readable PEM file ({error.strerror})") from error
