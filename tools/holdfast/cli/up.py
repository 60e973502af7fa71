"""`holdfast up`: runs the control plane and optional local nodes on this machine until Ctrl-C.

A part that exits is restarted. If `up` itself is killed, its parts continue; the same command takes them over.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from holdfast.cli.connection import DEFAULT_API_PORT, ENV_API, ENV_LOCAL_API_PORT
from holdfast.cli.last_save import save_running
from holdfast.cli.preflight import require_ports
from holdfast.cli.protection import require_protection, settings_for_parts
from holdfast.cli.stack import LocalStack
from holdfast.cli.stack_options import NODES_MAX, StackOptions, not_passed_on
from holdfast.cli.stack_record import survivors
from holdfast.cli.stopping import StopRequest
from holdfast.cli.terminal import Terminal, output_may_be_lost
from holdfast.domain.hosts import PORT_MAX
from holdfast.runtime.processes.training_user import training_user
from holdfast.runtime.trust.api_trust import API_CA
from holdfast.runtime.trust.tls import CA

CONTROL_PORT = 8471
DIAGNOSTICS_PORT = 8472
CHECK_S = 0.2


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Example: [bold]holdfast up --nodes 4[/], then in another terminal [bold]holdfast run job.yaml[/]",
        rich_help_panel="Run",
    )(up)


@output_may_be_lost()
def up(
    nodes: Annotated[
        int, typer.Option(help="Nodes to start on this machine; 0 = control plane only.", min=0, max=NODES_MAX)
    ] = 0,
    workers_per_node: Annotated[int, typer.Option(help="Number of workers that each local node can run.", min=1)] = 1,
    redis_url: Annotated[
        str,
        typer.Option(help="Redis to use, redis://host:port/db. Default: an embedded one.", envvar="HOLDFAST_REDIS_URL"),
    ] = "",
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Other machines need 0.0.0.0, with HOLDFAST_API_TOKEN and HOLDFAST_TLS_CERT, _KEY and "
            "_CA in the environment."
        ),
    ] = "127.0.0.1",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="No API token and no TLS: whoever reaches the address can run code on the nodes. All users of this machine "
            "reach each of its addresses.",
        ),
    ] = False,
    port: Annotated[
        int,
        typer.Option(help="Port of the REST API; 0 = any free port.", min=0, max=PORT_MAX, envvar=ENV_LOCAL_API_PORT),
    ] = DEFAULT_API_PORT,
    control_port: Annotated[
        int, typer.Option(help="Port for agents; 0 = any free port.", min=0, max=PORT_MAX)
    ] = CONTROL_PORT,
    diagnostics_port: Annotated[
        int, typer.Option(help="Port for agents' telemetry; 0 = any free port.", min=0, max=PORT_MAX)
    ] = DIAGNOSTICS_PORT,
    directory: Annotated[Path, typer.Option("--dir", help="Directory for state and logs.")] = Path(
        "~/.local/state/holdfast"
    ),
    user: Annotated[
        str,
        typer.Option(
            help="User that training on the local nodes runs as, if this command runs as root: NAME or UID, with :GROUP if its "
            "group is another one. Default: root.",
            envvar="HOLDFAST_AGENT_USER",
        ),
    ] = "",
    fleet: Annotated[str, typer.Option(help="Name of the fleet, if several fleets share one Redis.")] = "main",
) -> None:
    """Start Redis (embedded), diagnostics, the supervisor and optional local nodes on this machine. Ctrl-C stops everything.

    A part that exits is restarted. If this command is killed, its parts continue; the same command takes them over.
    """
    console = Terminal(highlight=False, emoji=False)
    settings = settings_for_parts(os.environ)
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
        environment=settings,
        stays=True,
        open_api=insecure,
        user=user,
    )
    training_user(user)  # now, not in each agent
    left = survivors(options.directory)  # the parts of a killed stack already use these ports
    ports = {"--port": port, "--control-port": control_port} if "supervisor" not in left else {}
    require_ports(host, ports | ({"--diagnostics-port": diagnostics_port} if "diagnostics" not in left else {}))
    if not insecure:
        require_protection(host, settings)
    if ignored := not_passed_on(os.environ):
        console.print(
            f"[yellow]not used[/]: {', '.join(ignored)}. `holdfast up` passes on token, TLS, alerts and logging only",
            soft_wrap=True,
        )
    stop = StopRequest()
    stop.on(signal.SIGTERM)
    begun = False

    def say(text: str) -> None:
        console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {text}" if begun else text, soft_wrap=True)

    with LocalStack(options, say=say) as stack:
        console.print(f"[green]up[/]   API       {stack.api_url}")
        if stack.api_url.startswith("https:"):
            ca = settings.get(API_CA) or settings.get(CA, "")
            console.print(f"     commands  export {ENV_API}={stack.api_url} {API_CA}={ca}", soft_wrap=True)
        console.print(f"     dashboard {stack.dashboard(for_terminal=console.is_terminal)}", soft_wrap=True)
        console.print(f"     agents    {escape(stack.agent_command)}", soft_wrap=True)
        console.print(f"     state     {escape(str(stack.directory))}", soft_wrap=True)
        console.print("     Ctrl-C stops everything")
        begun = True
        try:
            while not stop.wait(CHECK_S):
                stack.tend()
        except KeyboardInterrupt:
            save_running(stack.connect, stack.node_names, say)
            raise
        save_running(stack.connect, stack.node_names, say)
