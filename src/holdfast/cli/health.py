"""`holdfast health`: ask one service whether it serves. For people and start-up scripts; containers run the probe itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.probe import SCHEMES, TIMEOUT_S, known, probe
from holdfast.runtime.tls import CA, CERT, KEY, Tls


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Exit code 1 when it does not serve. Example: [bold]holdfast health grpc://127.0.0.1:8472[/]",
        rich_help_panel="Look",
    )(health)


def health(
    target: Annotated[str, typer.Argument(help=f"Where to ask: {SCHEMES}.")],
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the answer.", min=0.1)] = TIMEOUT_S,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Own certificate, PEM: grpc:// by mutual TLS.", envvar=CERT, show_default=False)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.", envvar=KEY, show_default=False)] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="CA of the service's certificate, PEM.", envvar=CA, show_default=False)
    ] = None,
) -> None:
    """Say whether the service at TARGET serves: diagnostics and replicators by gRPC health, the supervisor by /healthz."""
    if not known(target):
        raise InvalidSpec("TARGET", target, SCHEMES)
    problem = probe(target, timeout_s, Tls.load(cert=tls_cert, key=tls_key, ca=tls_ca))
    console = Console(highlight=False, emoji=False, markup=False)
    if problem:
        console.print(f"{target} does not serve: {problem}")
        raise typer.Exit(1)
    console.print(f"{target} serves")
