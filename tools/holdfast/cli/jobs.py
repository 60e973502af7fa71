"""`holdfast jobs`: the jobs of a fleet and the requests to them."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli import ranks
from holdfast.cli.client import Client
from holdfast.cli.durations import seconds
from holdfast.cli.local_runs import api_url
from holdfast.cli.tables import Api, AsJson, Name, console, look_at, show_one

app = typer.Typer(
    help="Jobs: list, show, watch, ranks, stop, resume, checkpoint, resize, goodput.", no_args_is_help=True
)

COLUMNS = (
    "name",
    "phase",
    "priority",
    "mesh",
    "generation",
    "step",
    "observed_steps?",
    "loss",
    "tokens_per_s",
    "reason",
)

ranks.register(app)
look_at(
    app, rows=Client.jobs, row=Client.job, columns=COLUMNS, thing="job", empty="no jobs; start one with `holdfast run`"
)


@app.command()
def stop(
    name: Name,
    api: Api = "",
    reason: Annotated[str, typer.Option(help="Kept in the job's record.")] = "stopped by operator",
    now: Annotated[
        bool,
        typer.Option("--now", help="Stop without a last checkpoint: the steps since the newest checkpoint are lost."),
    ] = False,
) -> None:
    """Stop a job. It saves a checkpoint first, if it can."""
    with Client(api or api_url(name)) as client:
        client.stop(name, reason, save=not now)
    console.print(f"{name}: stopping")


@app.command(epilog="Example: holdfast jobs resume llm --step 1200")
def resume(
    name: Name,
    step: Annotated[
        int | None,
        typer.Option(help="Step of the checkpoint. Default: the newest complete one.", min=1, show_default=False),
    ] = None,
    api: Api = "",
) -> None:
    """Start a finished job again, from the newest complete checkpoint on its nodes or in its object store."""
    with Client(api or api_url(name)) as client:
        client.resume(name, step)
        from_step = client.job(name)["goes_on_from"]
    console.print(f"{name}: resuming from step {from_step}")


@app.command()
def checkpoint(
    name: Name,
    api: Api = "",
    grace: Annotated[
        float | None,
        typer.Option(parser=seconds, metavar="DURATION", help="Maximum time to wait, for example 30s."),
    ] = None,
) -> None:
    """Save a checkpoint within the next few steps and wait until it reaches the job's last tier (memory, disk, peer, object
    store). With --grace, return earlier; unfinished copies continue in the background."""
    with Client(api or api_url(name)) as client:
        operation = client.checkpoint(name, grace)
    console.print(str(operation.get("reason") or f"{name}: checkpoint requested"))


@app.command()
def resize(
    name: Name,
    dp: Annotated[int, typer.Argument(help="Number of data-parallel replicas.", min=1)],
    api: Api = "",
    reason: Annotated[str, typer.Option(help="Kept in the job's record.")] = "resized by operator",
) -> None:
    """Change the number of data-parallel replicas, within the job's min_dp and max_dp."""
    with Client(api or api_url(name)) as client:
        client.resize(name, dp, reason)
    console.print(f"{name}: resizing to dp {dp}")


@app.command()
def goodput(name: Name, api: Api = "", as_json: AsJson = False) -> None:
    """Show the job's wall time by class. Every second is in exactly one class."""
    with Client(api or api_url(name)) as client:
        ledger = client.goodput(name)
    if as_json:
        show_one(ledger, as_json=True)
        return
    ledger["fault_free_flops_per_s"] = (
        ledger.get("fault_free_flops_per_s") or None
    )  # 0: the script does not report them
    show_one({key: value for key, value in ledger.items() if not isinstance(value, list)}, as_json=False)
