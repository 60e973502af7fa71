"""Which certificates a client of the REST API accepts, and what it says of one that it does not.

HOLDFAST_API_CA   the only CA that is accepted
HOLDFAST_TLS_CA   without HOLDFAST_API_CA: accepted besides the CAs of the system, because a private CA usually signs the
                  certificates of the API as well
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust.tls import CA

API_CA = "HOLDFAST_API_CA"
LOOK_TIMEOUT_S = 2.0
HTTPS_PORT, HTTP_PORT = 443, 80

# X509_V_ERR_* of OpenSSL
NOT_YET_VALID, EXPIRED = 9, 10
UNKNOWN_CA = frozenset({2, 18, 19, 20, 21})
OTHER_NAME = frozenset({62, 64})
NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})


@dataclass(frozen=True, slots=True)
class Trust:
    """Files of CAs (PEM). `only`: no other CA is accepted; `besides`: accepted in addition to those of the system."""

    only: Path | None = None
    besides: Path | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Trust:
        only, besides = (Path(path) if (path := environ.get(name)) else None for name in (API_CA, CA))
        return cls(only, besides)

    @property
    def is_set(self) -> bool:
        return self.only is not None or self.besides is not None

    @property
    def files(self) -> tuple[Path, ...]:
        """The file that counts; none: the CAs of the system."""
        file = self.only or self.besides
        return (file,) if file is not None else ()

    def context(self, of_system: Callable[[], ssl.SSLContext] = ssl.create_default_context) -> ssl.SSLContext:
        """Return the context of a client. `of_system`: makes one with the CAs of the system. Raises `InvalidSpec` for a file
        that cannot be used."""
        if self.only is not None:
            return _with(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), API_CA, self.only)
        return of_system() if self.besides is None else _with(of_system(), CA, self.besides)

    def refusal(self, error: BaseException) -> str:
        """Return why TLS failed, and what to do: `reason; advice`. Empty if `error` has another cause."""
        for each in _causes(error):
            if isinstance(each, ssl.SSLCertVerificationError):
                return self._of_certificate(each)
            if isinstance(each, ssl.SSLError):
                if each.reason in NO_TLS:
                    return "it answers without TLS; use a URL that begins with http://, or give it a certificate"
                return f"TLS failed: {each.reason or each}; its log may say more"
        return ""

    def _of_certificate(self, error: ssl.SSLCertVerificationError) -> str:
        code = error.verify_code
        if code == EXPIRED:
            return "its certificate has expired; renew it (holdfast ca issue), which needs no restart"
        if code == NOT_YET_VALID:
            return "its certificate is not valid yet; the clock of one of the two machines is wrong"
        if code in OTHER_NAME:
            return (
                f"its certificate is for other names ({error.verify_message}); use one of its names in the URL, or issue it "
                "for this one (holdfast ca issue --host)"
            )
        if code in UNKNOWN_CA:
            files = ", ".join(map(str, self.files)) or "the CAs of the system"
            return f"its certificate is not signed by a CA that is trusted here ({files}); set {API_CA} to the file with its CA"
        return f"its certificate is not accepted ({error.verify_message}); issue another one (holdfast ca issue)"


def answers_with_tls(url: str, timeout_s: float = LOOK_TIMEOUT_S) -> bool:
    """Whether what listens at the host and port of `url` speaks TLS. Its certificate is not checked, and nothing is sent to
    it."""
    parts = urlsplit(url)
    port = parts.port or (HTTPS_PORT if parts.scheme == "https" else HTTP_PORT)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((parts.hostname or "", port), timeout_s) as raw,
            context.wrap_socket(raw, server_hostname=parts.hostname),
        ):
            return True
    except (OSError, ValueError):
        return False


def _with(context: ssl.SSLContext, variable: str, file: Path) -> ssl.SSLContext:
    try:
        context.load_verify_locations(cafile=file)
    except OSError as error:  # SSLError is one
        raise InvalidSpec(variable, str(file), f"a PEM file with a CA ({error.strerror or error})") from error
    return context


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__
