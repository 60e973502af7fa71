"""`holdfast incidents` and `holdfast actions`: failures, the actions on them with reasons, and durations."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from holdfast.cli.client import Client
from holdfast.cli.local_runs import api_url
from holdfast.cli.tables import Api, AsJson, console, show_list, show_one, watch
from holdfast.cli.trace import tree

app = typer.Typer(help="Incidents: list, show, watch.", no_args_is_help=True)
actions_app = typer.Typer(
    help="Actions: list, watch. Each with the policy that decided it, and its reason.", no_args_is_help=True
)

COLUMNS = ("id", "job", "kind", "state", "node", "rank", "action.kind", "generation", "cause")
ACTION_COLUMNS = ("incident", "job", "kind", "decided_by", "at", "reason")
OfJob = Annotated[str, typer.Option("--job", help="Only entries of this job.")]


@app.command("list")
def list_incidents(job: OfJob = "", api: Api = "", as_json: AsJson = False) -> None:
    """List incidents, newest first."""
    with Client(api or api_url()) as client:
        show_list(client.incidents(job or None), COLUMNS, as_json, "no incidents")
        _say_if_behind(client)


@app.command()
def show(
    incident: Annotated[str, typer.Argument(help="Incident id.")],
    trace: Annotated[
        bool, typer.Option("--trace", help="Show the trace: the duration of each phase on each node.")
    ] = False,
    api: Api = "",
    as_json: AsJson = False,
) -> None:
    """Show one incident, from the fault to the first new step."""
    with Client(api or api_url()) as client:
        if not trace:
            found = client.incident(incident)
            show_one(found if as_json else _brief(found), as_json)
        elif as_json:
            print(json.dumps(client.trace(incident), indent=2))
        else:
            console.print(tree(client.trace(incident)))


def _say_if_behind(client: Client) -> None:
    if client.history_behind:
        typer.echo(f"what has happened since is missing: {client.history_behind}", err=True)


def _brief(incident: dict[str, Any]) -> dict[str, Any]:
    """Reduce the action to one cell, with the kinds of the remaining rungs. The walk, if any, is shown in a separate table."""
    shown = dict(incident)
    if (action := incident["action"]) is not None:
        left = [rung["kind"] for rung in action.get("fallbacks", ())]
        before = [step["kind"] for step in action.get("before", ())]
        cell = {key: value for key, value in action.items() if key not in ("before", "fallbacks", "within_s")}
        if before:
            cell["after"] = before
        if action.get("within_s"):
            cell["within"] = f"{action['within_s']:g} s"
        if left:
            cell["otherwise"] = left
        shown["action"] = cell
    if not shown.get("walk"):
        shown.pop("walk", None)
    return shown


@app.command("watch")
def watch_incidents(job: OfJob = "", api: Api = "") -> None:
    """List the incidents, and update the list until Ctrl-C."""
    with Client(api or api_url()) as client:
        watch(lambda: client.incidents(job or None), COLUMNS)


@actions_app.command("list")
def list_actions(job: OfJob = "", api: Api = "", as_json: AsJson = False) -> None:
    """List actions, newest first."""
    with Client(api or api_url()) as client:
        show_list(client.actions(job or None), ACTION_COLUMNS, as_json, "no actions")
        _say_if_behind(client)


@actions_app.command("watch")
def watch_actions(job: OfJob = "", api: Api = "") -> None:
    """List the actions, and update the list until Ctrl-C."""
    with Client(api or api_url()) as client:
        watch(lambda: client.actions(job or None), ACTION_COLUMNS)
