"""`holdfast nodes`: the fleet, and taking nodes out of it and back."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.client import Client, default_url
from holdfast.cli.tables import Api, AsJson, console, show_list, show_one, watch

app = typer.Typer(help="Nodes: list, show, watch, cordon, uncordon, repair.", no_args_is_help=True)

COLUMNS = ("node", "state", "job", "zone", "capacity", "hostname", "reason")
Name = Annotated[str, typer.Argument(help="Node name.")]
Reason = Annotated[str, typer.Option(help="Kept in the node's record.")]


@app.command("list")
def list_nodes(api: Api = "", as_json: AsJson = False) -> None:
    """Every node that the supervisor knows, with its state."""
    with Client(api or default_url()) as client:
        show_list(
            client.nodes(), COLUMNS, as_json, "no nodes; add one with `holdfast agent` or `holdfast up --nodes N`"
        )


@app.command()
def show(name: Name, api: Api = "", as_json: AsJson = False) -> None:
    """One node."""
    with Client(api or default_url()) as client:
        show_one(client.node(name), as_json)


@app.command("watch")
def watch_nodes(api: Api = "") -> None:
    """The list, live, until Ctrl-C."""
    with Client(api or default_url()) as client:
        watch(client.nodes, COLUMNS)


@app.command()
def cordon(name: Name, api: Api = "", reason: Reason = "cordoned by operator") -> None:
    """Take a node out of service; a job that runs on it moves to a spare."""
    with Client(api or default_url()) as client:
        client.cordon(name, reason)
    console.print(f"{name}: cordoned")


@app.command()
def uncordon(name: Name, api: Api = "", reason: Reason = "uncordoned by operator") -> None:
    """Let a cordoned node be used again."""
    with Client(api or default_url()) as client:
        client.uncordon(name, reason)
    console.print(f"{name}: uncordoned")


@app.command()
def repair(name: Name, api: Api = "") -> None:
    """Say that a node's hardware is good again: the findings against it are forgotten."""
    with Client(api or default_url()) as client:
        client.repaired(name)
    console.print(f"{name}: marked as repaired")
