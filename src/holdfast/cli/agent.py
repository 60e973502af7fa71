"""`holdfast agent`: join this machine to a fleet as one node."""

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
    node: Annotated[str, typer.Option(help="This node's name, unique in the fleet.")] = "",
    capacity: Annotated[int, typer.Option(help="Workers that fit; 0 = one per GPU, or 1 without GPUs.", min=0)] = 0,
    zone: Annotated[str, typer.Option(help="Failure domain (rack, power feed): copies go to another one.")] = "",
    address: Annotated[str, typer.Option(help="Where other nodes reach this one; default: the host's own name.")] = "",
    directory: Annotated[
        Path, typer.Option("--dir", help="The agent's directory: logs, remembered commands, disk tier.")
    ] = Path("/var/lib/holdfast"),
    memory: Annotated[Path, typer.Option(help="Directory of the memory tier, on a tmpfs.")] = Path("/dev/shm/holdfast"),
    kernel_log: Annotated[Path, typer.Option(help="Kernel log to watch for Xid and other lines.")] = Path("/dev/kmsg"),
    preflight: Annotated[
        bool,
        typer.Option(help="Test devices, memory, disks and network before the node gets ranks, and while it is idle."),
    ] = True,
) -> None:
    """Join this machine to the fleet: watches its GPUs and host, runs workers, carries out the supervisor's orders."""
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
    # replaces this process, so that signals, exit codes and PR_SET_PDEATHSIG are the agent's own
    os.execve(sys.executable, [sys.executable, "-m", "holdfast.agent"], {**os.environ, **environment})


def _gpus() -> int:
    """GPUs of this machine as the kernel lists them; needs no driver library."""
    return sum(1 for path in Path("/proc/driver/nvidia/gpus").glob("*") if path.is_dir())
