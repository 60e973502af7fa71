"""`holdfast audit`: who has changed what through the API."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from holdfast.cli.client import Client
from holdfast.cli.connection import default_url
from holdfast.cli.tables import Api, AsJson, show_list

app = typer.Typer(help="Requests that changed something: list.", no_args_is_help=True)

COLUMNS = ("at", "who", "role", "what", "subject", "asked", "result", "reason")


@app.command("list")
def list_audit(
    who: Annotated[str, typer.Option(help="Only requests with the token of this name.")] = "",
    subject: Annotated[str, typer.Option(help="Only of this 'job NAME' or 'node NAME'.")] = "",
    limit: Annotated[int, typer.Option(help="At most so many, the newest.", min=1)] = 100,
    api: Api = "",
    as_json: AsJson = False,
) -> None:
    """List the newest requests that the leader has answered, with who made them. Needs the role operator."""
    with Client(api or default_url()) as client:
        show_list(islice(client.audit(who, subject), limit), COLUMNS, as_json, "no requests yet")
