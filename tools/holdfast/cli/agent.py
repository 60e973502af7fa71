"""`holdfast agent`: add this machine to a fleet as one node."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.preflight import PORT_MAX
from holdfast.domain.errors import InvalidSpec


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Example: [bold]holdfast agent --supervisor 10.0.0.5:8471 --capacity 8 --zone rack-12[/]",
        rich_help_panel="Run",
    )(agent)


def agent(
    supervisor: Annotated[
        str,
        typer.Option(
            help="The supervisor's control endpoints, host:port, comma-separated.", envvar="HOLDFAST_SUPERVISOR"
        ),
    ],
    node: Annotated[str, typer.Option(help="This node's name, unique in the fleet. Default: the host name.")] = "",
    capacity: Annotated[
        int, typer.Option(help="Number of workers that this node can run; 0 = one per GPU, or 1 without GPUs.", min=0)
    ] = 0,
    zone: Annotated[
        str,
        typer.Option(
            help="Failure domain, such as a rack. Copies of shards go to another failure domain. Default: the node."
        ),
    ] = "",
    address: Annotated[
        str, typer.Option(help="Address at which other nodes reach this one. Default: the host name.")
    ] = "",
    directory: Annotated[
        Path, typer.Option("--dir", help="The agent's directory: logs, executed orders, disk tier.")
    ] = Path("/var/lib/holdfast"),
    memory: Annotated[Path, typer.Option(help="Directory of the memory tier, on a tmpfs.")] = Path("/dev/shm/holdfast"),
    kernel_log: Annotated[Path, typer.Option(help="Kernel log to read for Xid and other messages.")] = Path(
        "/dev/kmsg"
    ),
    preflight: Annotated[
        bool,
        typer.Option(help="Run pre-flight tests of devices, memory, disks and network while the node has no ranks."),
    ] = True,
) -> None:
    """Add this machine to the fleet as a node: monitor its GPUs and host, run workers, execute the supervisor's orders."""
    for endpoint in supervisor.split(","):
        host, _, port = endpoint.strip().rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) <= PORT_MAX:
            raise InvalidSpec("--supervisor", endpoint, "host:port, for example 10.0.0.5:8471")
    name = node or socket.gethostname()
    environment = {
        "HOLDFAST_SUPERVISOR": supervisor,
        "HOLDFAST_NODE": name,
        "HOLDFAST_AGENT_DIR": str(directory / name),
        "HOLDFAST_DISK_DIR": str(directory / name / "disk"),
        "HOLDFAST_MEMORY_DIR": str(memory / name),
        "HOLDFAST_CAPACITY": str(capacity or _gpus() or 1),
        "HOLDFAST_ZONE": zone or name,
        "HOLDFAST_ADDRESS": address or socket.gethostname(),
        "HOLDFAST_KERNEL_LOG": str(kernel_log),
    }
    if not preflight:
        environment["HOLDFAST_PREFLIGHT_EVERY_S"] = "0"
    # replaces this process, so that signals, exit codes and PR_SET_PDEATHSIG apply to the agent
    os.execve(sys.executable, [sys.executable, "-m", "holdfast.agent"], {**os.environ, **environment})


def _gpus() -> int:
    """Return the number of GPUs of this machine according to the kernel; needs no driver library."""
    return sum(1 for path in Path("/proc/driver/nvidia/gpus").glob("*") if path.is_dir())
