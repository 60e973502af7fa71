"""A little OpenID Connect issuer on loopback, with keys of its own, which can be made to misbehave."""

from __future__ import annotations

import json
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey, Key, RSAKey
from joserfc.jws import JWSRegistry

from holdfast.runtime.trust.oidc import OidcRules, OidcTokens, parse_roles
from holdfast.runtime.trust.oidc_keys import DISCOVERY, IssuerKeys

AUDIENCE = "holdfast"
ROLES = "groups:ml-platform=operator, groups:researchers=submitter, *=viewer"
Answer = Callable[[BaseHTTPRequestHandler], None]


@cache  # a tenth of a second each
def rsa(kid: str, bits: int = 2048) -> RSAKey:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a weak one
        return RSAKey.generate_key(bits, {"kid": kid})


def ec(kid: str, curve: str = "P-256") -> ECKey:
    return ECKey.generate_key(curve, {"kid": kid})


class Issuer:
    """`keys`: what it publishes. `answers`: what is answered instead, by path. `asked`: the paths that were asked for."""

    def __init__(self, url: str, *keys: Key) -> None:
        self.url, self.keys = url, list(keys)
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []

    @property
    def documents(self) -> dict[str, Any]:
        entries = [key.as_dict(private=False) for key in self.keys]
        discovered = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        return {DISCOVERY: discovered, "/keys": {"keys": entries}}

    def claims(self, **changes: Any) -> dict[str, Any]:
        """The claims of a valid token; None removes one."""
        now = int(time.time())
        claims = {"iss": self.url, "aud": AUDIENCE, "sub": "ada", "iat": now, "nbf": now, "exp": now + 600, **changes}
        return {name: value for name, value in claims.items() if value is not None}

    def token(
        self, *, key: Key | None = None, alg: str = "RS256", header: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """`header`: more fields of the header, or others."""
        signer = key or self.keys[0]
        fields = {"alg": alg, "kid": signer.kid, **(header or {})}
        fields = {name: value for name, value in fields.items() if value is not None}
        registry = JWSRegistry(algorithms=[alg], strict_check_header=False)
        registry.max_header_length = registry.max_payload_length = 1 << 20
        return jwt.encode(fields, self.claims(**claims), signer, algorithms=[alg], registry=registry)

    def rules(self, **changes: Any) -> OidcRules:
        return OidcRules(**{"issuer": self.url, "audiences": (AUDIENCE,), "roles": parse_roles(ROLES), **changes})

    def tokens(self, *, clock: Callable[[], float] = time.monotonic, **changes: Any) -> OidcTokens:
        rules = self.rules(**changes)
        return OidcTokens(rules, IssuerKeys(rules.issuer, rules.ca, clock))


def answering(status: int, body: bytes = b"", **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@contextmanager
def issuing(*keys: Key, port: int = 0, certificate: tuple[Path, Path] | None = None) -> Iterator[Issuer]:
    """Serve an issuer on a port of this machine. `certificate`: PEM files of it and of its key, for https."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.asked.append(self.path)
            try:
                if (instead := issuer.answers.get(self.path)) is not None:
                    instead(self)
                elif (document := issuer.documents.get(self.path)) is not None:
                    answering(200, json.dumps(document).encode())(self)
                else:
                    answering(404)(self)
            except ConnectionError:
                pass  # the other end has read enough

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "http" if certificate is None else "https"
    issuer = Issuer(f"{scheme}://127.0.0.1:{server.server_address[1]}", *keys)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
