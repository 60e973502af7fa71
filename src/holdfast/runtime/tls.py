"""Mutual TLS: both ends present a certificate of one private CA. Configured by three files, read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import grpc

from holdfast.domain.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes of this side's certificate and key, and of the CA that signs the other side's."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes

    @classmethod
    def load(cls, *, cert: Path, key: Path, ca: Path) -> Tls:
        """Raises `InvalidSpec` naming the file that cannot be read."""
        return cls(
            cert=_read("HOLDFAST_TLS_CERT", cert), key=_read("HOLDFAST_TLS_KEY", key), ca=_read("HOLDFAST_TLS_CA", ca)
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.key, self.cert)], root_certificates=self.ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca, private_key=self.key, certificate_chain=self.cert
        )


def _read(variable: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidSpec(variable, str(path), f"a readable PEM file ({error.strerror})") from error
