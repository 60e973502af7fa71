"""`holdfast notify`: test the alerts that a supervisor sends."""

from __future__ import annotations

import typer

from holdfast.cli.client import Client
from holdfast.cli.local_runs import api_url
from holdfast.cli.tables import Api, AsJson, show_list

COLUMNS = ("address", "sent", "problem")

app = typer.Typer(
    help="Alerts: test.",
    no_args_is_help=True,
    epilog="Addresses are a setting of the supervisor, HOLDFAST_ALERT_URLS: docs/alerts.md.",
)


@app.callback()
def _notify() -> None:
    """Keep `test` a subcommand, though it is the only one."""


@app.command("test")
def send_test(api: Api = "", as_json: AsJson = False) -> None:
    """Send a test alert to every address of the supervisor, and show what became of it.

    Exit code 1 if one was not sent, or if there is no address.
    """
    with Client(api or api_url()) as client:
        addresses = client.test_alerts()
    show_list(addresses, COLUMNS, as_json, "the supervisor has no addresses for alerts: set HOLDFAST_ALERT_URLS")
    if not addresses or not all(each["sent"] for each in addresses):
        raise typer.Exit(1)
