"""`holdfast jobs`: what runs, and the few things that one asks of it."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.client import Client, default_url
from holdfast.cli.durations import seconds
from holdfast.cli.tables import Api, AsJson, Name, console, look_at, show_one

app = typer.Typer(help="Jobs: list, show, watch, stop, resume, checkpoint, resize.", no_args_is_help=True)

COLUMNS = ("name", "phase", "mesh", "generation", "step", "loss", "tokens_per_s", "reason")

look_at(app, rows=Client.jobs, row=Client.job, columns=COLUMNS, empty="no jobs; start one with `holdfast run`")


@app.command()
def stop(
    name: Name,
    api: Api = "",
    reason: Annotated[str, typer.Option(help="Kept in the job's record.")] = "stopped by operator",
) -> None:
    """Stop a job: it saves a checkpoint first when it can."""
    with Client(api or default_url()) as client:
        client.stop(name, reason)
    console.print(f"{name}: stopping")


@app.command(epilog="Example: holdfast jobs resume llm --step 1200")
def resume(
    name: Name,
    step: Annotated[
        int | None,
        typer.Option(help="Go on from this step. Default: the newest complete one.", min=1, show_default=False),
    ] = None,
    api: Api = "",
) -> None:
    """Start a job that is over again, from the newest complete checkpoint that its nodes or its object store have."""
    with Client(api or default_url()) as client:
        client.resume(name, step)
        from_step = client.job(name)["goes_on_from"]
    console.print(f"{name}: goes on from step {from_step}")


@app.command()
def checkpoint(
    name: Name,
    api: Api = "",
    grace: Annotated[
        float | None,
        typer.Option(
            parser=seconds, metavar="DURATION", help="Answer after this long, such as 30s, however far it came."
        ),
    ] = None,
) -> None:
    """Save a checkpoint within the next few steps, to the farthest tier there is, and say how far it came: memory, disk, a
    peer, the object store. Copies that are not there yet are made all the same."""
    with Client(api or default_url()) as client:
        operation = client.checkpoint(name, grace)
    console.print(str(operation.get("reason") or f"{name}: checkpoint asked for"))


@app.command()
def resize(
    name: Name,
    dp: Annotated[int, typer.Argument(help="Replicas to run with.", min=1)],
    api: Api = "",
    reason: Annotated[str, typer.Option(help="Kept in the job's record.")] = "resized by operator",
) -> None:
    """Change the number of data-parallel replicas within the job's range."""
    with Client(api or default_url()) as client:
        client.resize(name, dp, reason)
    console.print(f"{name}: resizing to dp {dp}")


@app.command()
def goodput(name: Name, api: Api = "", as_json: AsJson = False) -> None:
    """Where the job's wall time went: every second in exactly one class."""
    with Client(api or default_url()) as client:
        ledger = client.goodput(name)
    if as_json:
        show_one(ledger, as_json=True)
        return
    show_one({key: value for key, value in ledger.items() if not isinstance(value, list)}, as_json=False)
