"""`holdfast health`: checks one service. For operators and start-up scripts; containers run `holdfast.runtime.probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.terminal import Terminal
from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.probe import SCHEMES, TIMEOUT_S, known, probe
from holdfast.runtime.trust.api_trust import API_CA, Trust
from holdfast.runtime.trust.tls import CA, CERT, KEY, Tls


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Exit code 1 if the service is not serving. Example: [bold]holdfast health grpc://127.0.0.1:8472[/]",
        rich_help_panel="Operate",
    )(health)


def health(
    target: Annotated[str, typer.Argument(help=f"Address: {SCHEMES}.")],
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Maximum time to wait, in seconds.", min=0.1)
    ] = TIMEOUT_S,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="Client certificate (PEM), for grpc:// with mutual TLS.", envvar=CERT, show_default=False),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Private key of the client certificate (PEM).", envvar=KEY, show_default=False)
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="CA of the service's certificate (PEM).", envvar=CA, show_default=False)
    ] = None,
    api_ca: Annotated[
        Path | None,
        typer.Option(
            help="CA of the API's certificate (PEM), for https://. Default: those of the system, and --tls-ca.",
            envvar=API_CA,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check whether a service is serving: diagnostics and replicators by gRPC health, the supervisor by HTTP."""
    if not known(target):
        raise InvalidSpec("TARGET", target, SCHEMES)
    is_http = target.startswith(("http://", "https://"))  # needs no certificate of its own
    tls = None if is_http else Tls.load(cert=tls_cert, key=tls_key, ca=tls_ca)
    problem = probe(target, timeout_s, tls, Trust(api_ca, tls_ca))
    console = Terminal(highlight=False, emoji=False, markup=False)
    if problem:
        console.print(f"{target} is not serving: {problem}")
        raise typer.Exit(1)
    console.print(f"{target} is serving")
