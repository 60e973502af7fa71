"""`holdfast breaker`: whether the fleet's circuit breaker holds faults back, why, and letting it go."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.client import Client, default_url
from holdfast.cli.tables import Api, AsJson, console, show_one

app = typer.Typer(
    help="The fleet's circuit breaker: show, reset.",
    no_args_is_help=True,
    epilog="Open, it keeps the supervisor from acting on faults: too much went wrong at once. Healthy runs go on.",
)

Reason = Annotated[str, typer.Option(help="Kept in the record of decisions.")]


@app.command()
def show(api: Api = "", as_json: AsJson = False) -> None:
    """Open or closed, and what counts towards it."""
    with Client(api or default_url()) as client:
        show_one(client.breaker(), as_json)


@app.command()
def reset(api: Api = "", reason: Reason = "reset by operator") -> None:
    """Act on faults again, with clean counts; incidents that waited are decided now."""
    with Client(api or default_url()) as client:
        client.reset_breaker(reason)
    console.print("breaker: closed")
