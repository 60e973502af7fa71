"""`holdfast incidents` and `holdfast actions`: what broke, what was decided, why, and how long it took."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from holdfast.cli.client import Client, default_url
from holdfast.cli.tables import Api, AsJson, console, show_list, show_one, watch
from holdfast.cli.trace import tree

app = typer.Typer(help="Incidents: list, show, watch.", no_args_is_help=True)
actions_app = typer.Typer(help="Actions: what was done, by which policy, and why.", no_args_is_help=True)

COLUMNS = ("id", "job", "kind", "state", "node", "rank", "action.kind", "generation", "cause")
ACTION_COLUMNS = ("incident", "job", "kind", "decided_by", "at", "reason")
OfJob = Annotated[str, typer.Option("--job", help="Only this job's.")]


@app.command("list")
def list_incidents(job: OfJob = "", api: Api = "", as_json: AsJson = False) -> None:
    """Newest first."""
    with Client(api or default_url()) as client:
        show_list(client.incidents(job or None), COLUMNS, as_json, "no incidents")


@app.command()
def show(
    incident: Annotated[str, typer.Argument(help="Incident id.")],
    trace: Annotated[bool, typer.Option("--trace", help="As a tree: which part took how long, on which node.")] = False,
    api: Api = "",
    as_json: AsJson = False,
) -> None:
    """One incident, from signal to first new step."""
    with Client(api or default_url()) as client:
        if not trace:
            show_one(client.incident(incident), as_json)
        elif as_json:
            print(json.dumps(client.trace(incident), indent=2))
        else:
            console.print(tree(client.trace(incident)))


@app.command("watch")
def watch_incidents(job: OfJob = "", api: Api = "") -> None:
    """The list, live, until Ctrl-C."""
    with Client(api or default_url()) as client:
        watch(lambda: client.incidents(job or None), COLUMNS)


@actions_app.command("list")
def list_actions(job: OfJob = "", api: Api = "", as_json: AsJson = False) -> None:
    """Newest first."""
    with Client(api or default_url()) as client:
        show_list(client.actions(job or None), ACTION_COLUMNS, as_json, "no actions")


@actions_app.command("watch")
def watch_actions(job: OfJob = "", api: Api = "") -> None:
    """The list, live, until Ctrl-C."""
    with Client(api or default_url()) as client:
        watch(lambda: client.actions(job or None), ACTION_COLUMNS)
