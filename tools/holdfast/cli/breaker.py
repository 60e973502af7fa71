"""`holdfast breaker`: show and close the fleet's circuit breaker."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.client import Client
from holdfast.cli.local_runs import api_url
from holdfast.cli.tables import Api, AsJson, console, show_one

app = typer.Typer(
    help="The fleet's circuit breaker: show, reset.",
    no_args_is_help=True,
    epilog="The breaker opens when too many nodes fail at once. While it is open, automatic actions on faults are suspended. "
    "Healthy jobs continue.",
)

Reason = Annotated[str, typer.Option(help="Kept in the record of decisions.")]


@app.command()
def show(api: Api = "", as_json: AsJson = False) -> None:
    """Show whether the breaker is open, and which events count towards it."""
    with Client(api or api_url()) as client:
        show_one(client.breaker(), as_json)


@app.command()
def reset(api: Api = "", reason: Reason = "reset by operator") -> None:
    """Close the breaker, clear its counts and resume automatic actions. Deferred incidents are decided now."""
    with Client(api or api_url()) as client:
        client.reset_breaker(reason)
    console.print("breaker: closed")
