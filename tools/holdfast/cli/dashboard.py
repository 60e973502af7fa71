"""`holdfast dashboard`: the address of the dashboard, with which a browser is signed in."""

from __future__ import annotations

import typer

from holdfast.cli import api_token
from holdfast.cli.client import Client
from holdfast.cli.connection import is_local
from holdfast.cli.local_runs import api_url
from holdfast.cli.tables import Api


def register(app: typer.Typer) -> None:
    app.command(
        epilog="The address of a stack that you have started on this machine signs the browser in, for 12 hours. Elsewhere the "
        "page asks for a token.",
        rich_help_panel="Look",
    )(dashboard)


def dashboard(api: Api = "") -> None:
    """Print the address of the dashboard. It contains a secret if it signs the browser in."""
    url = api or api_url()
    with Client(url) as client:
        client.version()
    typer.echo(api_token.sign_in_link(url, api_token.find(url) if is_local(url) else ""))
