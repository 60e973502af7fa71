"""Checks whether one service is serving: `python -m holdfast.runtime.probe TARGET`, exit code 1 if it is not.

Health checks of containers run it repeatedly, so it imports only a tenth of what the `holdfast` command imports. `holdfast
health` is the same check for operators.

With the services' own `HOLDFAST_TLS_CERT`, `_KEY` and `_CA` in the environment, `grpc://` uses mutual TLS. `https://` accepts
the certificates that the `holdfast` command accepts (`api_trust`). The name in TARGET must be in the certificate. Unix sockets
have no TLS."""

from __future__ import annotations

import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust.api_trust import API_CA, Trust, answers_with_tls
from holdfast.runtime.trust.tls import CA, CERT, KEY, Tls

SCHEMES = "grpc://host:port, unix:/path of a gRPC socket, or http(s)://host:port/healthz"
TIMEOUT_S = 3.0


def known(target: str) -> bool:
    """Whether `target` begins like one of `SCHEMES`."""
    return target.startswith(("http://", "https://", "grpc://", "unix:"))


def probe(target: str, timeout_s: float = TIMEOUT_S, tls: Tls | None = None, trust: Trust | None = None) -> str:
    """Return the problem of the service at `target`, one of `SCHEMES`; empty if it serves. `tls`: for `grpc://`; `trust`: for
    `https://`. Raises `InvalidSpec` for a file of a CA that cannot be used."""
    if target.startswith(("http://", "https://")):
        return _http(target, timeout_s, trust or Trust())
    if target.startswith("unix:"):
        return _grpc(target, timeout_s, None)
    return _grpc(target.removeprefix("grpc://"), timeout_s, tls)


def _http(url: str, timeout_s: float, trust: Trust) -> str:
    # Never through a proxy, because the check is for this service.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https://"):
        handlers.append(urllib.request.HTTPSHandler(context=trust.context()))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(url, timeout=timeout_s):
            return ""
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            return f"HTTP {error.code} {error.read(200).decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        if refusal := trust.refusal(error):
            return refusal
        is_plain = url.startswith("http://") and not isinstance(error, urllib.error.URLError)
        if is_plain and answers_with_tls(url, timeout_s):
            return f"it answers with TLS only; use https://, and set {API_CA} to the file with its CA"
        return str(error) or type(error).__name__


def _grpc(endpoint: str, timeout_s: float, tls: Tls | None) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options = (("grpc.enable_http_proxy", 0),)
    opened = (
        grpc.insecure_channel(endpoint, options)
        if tls is None
        else grpc.secure_channel(endpoint, tls.channel_credentials(), options)
    )
    with opened as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}"
    serving = health_pb2.HealthCheckResponse.SERVING
    return "" if answer.status == serving else health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Return the exit code: 0 if the target serves, 1 if not, 2 without a target."""
    match arguments:
        case [target] if known(target):
            pass
        case _:
            sys.stderr.write(f"usage: python -m holdfast.runtime.probe TARGET; TARGET is {SCHEMES}\n")
            return 2
    try:
        problem = probe(target, tls=None if target.startswith("http") else _tls(environ), trust=Trust.of(environ))
    except InvalidSpec as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{target} is not serving: {problem}\n" if problem else f"{target} is serving\n")
    return 1 if problem else 0


def _tls(environ: Mapping[str, str]) -> Tls | None:
    cert, key, ca = (Path(path) if (path := environ.get(name)) else None for name in (CERT, KEY, CA))
    return Tls.load(cert=cert, key=key, ca=ca)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
