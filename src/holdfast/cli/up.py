"""`holdfast up`: the control plane, and as many local nodes as asked for, on this machine until Ctrl-C."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.client import DEFAULT_API_PORT
from holdfast.cli.preflight import PORT_MAX, require_ports
from holdfast.cli.stack import NODES_MAX, LocalStack, StackOptions

CONTROL_PORT = 8471
DIAGNOSTICS_PORT = 8472
CHECK_S = 1.0


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Example: [bold]holdfast up --nodes 4[/], then in another terminal [bold]holdfast run job.yaml[/]",
        rich_help_panel="Run",
    )(up)


def up(
    nodes: Annotated[
        int, typer.Option(help="Nodes to start on this machine; 0 = only the control plane.", min=0, max=NODES_MAX)
    ] = 0,
    workers_per_node: Annotated[int, typer.Option(help="Workers that fit on each local node.", min=1)] = 1,
    redis_url: Annotated[
        str,
        typer.Option(help="Redis to use, redis://host:port/db; default: an embedded one.", envvar="HOLDFAST_REDIS_URL"),
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines join.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP API port; 0 = any free one.", min=0, max=PORT_MAX)] = DEFAULT_API_PORT,
    control_port: Annotated[
        int, typer.Option(help="Port for agents; 0 = any free one.", min=0, max=PORT_MAX)
    ] = CONTROL_PORT,
    diagnostics_port: Annotated[
        int, typer.Option(help="Port for agents' telemetry; 0 = any free one.", min=0, max=PORT_MAX)
    ] = DIAGNOSTICS_PORT,
    directory: Annotated[Path, typer.Option("--dir", help="Where state and logs go.")] = Path(
        "~/.local/state/holdfast"
    ),
    fleet: Annotated[str, typer.Option(help="Name of the fleet: separates several in one Redis.")] = "main",
) -> None:
    """Start Redis (embedded), diagnostics and the supervisor here, and optionally local nodes. Ctrl-C stops everything."""
    console = Console(highlight=False, emoji=False)
    options = StackOptions(
        directory=directory.expanduser(),
        nodes=nodes,
        workers_per_node=workers_per_node,
        redis_url=redis_url,
        fleet=fleet,
        host=host,
        api_port=port,
        control_port=control_port,
        diagnostics_port=diagnostics_port,
    )
    require_ports(host, {"--port": port, "--control-port": control_port, "--diagnostics-port": diagnostics_port})
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with LocalStack(options, say=lambda text: console.print(f"[dim]{text} …[/]")) as stack:
        console.print(f"[green]up[/]   API       {stack.api_url}")
        console.print(f"     agents    holdfast agent --supervisor {stack.control_endpoint}")
        console.print(f"     state     {stack.directory}")
        console.print("     Ctrl-C stops everything")
        while not stopped.wait(CHECK_S):
            stack.check()
