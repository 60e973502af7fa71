"""`holdfast agent`: add this machine to a fleet as one node."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli import joining
from holdfast.domain.errors import InvalidSpec
from holdfast.domain.hosts import host_and_port
from holdfast.domain.nodes import AGENT_DIRECTORY_BYTES_MAX, pool_name
from holdfast.runtime.trust.enrolled import DIRECTORY, Enrolled, Joined
from holdfast.runtime.trust.invitation import Invitation
from holdfast.runtime.trust.tls import CA, CERT, KEY

AGENT_DIRECTORY = Path("/var/lib/holdfast")
MEMORY_DIRECTORY = Path("/dev/shm/holdfast")
INVITE = "HOLDFAST_INVITE"
DIGEST_CHARS = 8  # instead of a name that is too long for a path


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Example: [bold]holdfast agent --supervisor 10.0.0.5:8471 --capacity 8 --zone rack-12[/]",
        rich_help_panel="Run",
    )(agent)


def agent(
    supervisor: Annotated[
        str,
        typer.Option(
            help="The supervisor's control endpoints, host:port, comma-separated. Not needed with --invite, nor after it.",
            envvar="HOLDFAST_SUPERVISOR",
        ),
    ] = "",
    invite: Annotated[
        str,
        typer.Option(
            help="Invitation of `holdfast nodes invite`: brings this machine a certificate, which its agent renews. It is used "
            "once; a machine that has joined starts with or without it.",
            envvar=INVITE,
            show_default=False,
            show_envvar=True,
        ),
    ] = "",
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
    pool: Annotated[
        str,
        typer.Option(
            help="Only jobs of this pool (`pool:` in the job file) get the node. Default: jobs without a pool.",
            envvar="HOLDFAST_POOL",
        ),
    ] = "",
    address: Annotated[
        str, typer.Option(help="Address at which other nodes reach this one. Default: the host name.")
    ] = "",
    directory: Annotated[
        Path, typer.Option("--dir", help="The agent's directory: logs, executed orders, disk tier.")
    ] = AGENT_DIRECTORY,
    memory: Annotated[Path, typer.Option(help="Directory of the memory tier, on a tmpfs.")] = MEMORY_DIRECTORY,
    kernel_log: Annotated[Path, typer.Option(help="Kernel log to read for Xid and other messages.")] = Path(
        "/dev/kmsg"
    ),
    fleet: Annotated[
        str,
        typer.Option(help="Name of the fleet to join. Default: that of the supervisor.", envvar="HOLDFAST_FLEET"),
    ] = "",
    join_token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the fleet's join token, as `holdfast up` prints it.", envvar="HOLDFAST_JOIN_TOKEN_FILE"
        ),
    ] = None,
    user: Annotated[
        str,
        typer.Option(
            help="User that training runs as, NAME or UID, with :GROUP if its group is another one. The agent must be root. "
            "Default: the agent's user. `root` accepts this without a warning.",
            envvar="HOLDFAST_AGENT_USER",
        ),
    ] = "",
    preflight: Annotated[
        bool,
        typer.Option(help="Run pre-flight tests of devices, memory, disks and network while the node has no ranks."),
    ] = True,
) -> None:
    """Add this machine to the fleet as a node: monitor its GPUs and host, run workers, execute the supervisor's orders."""
    invitation = Invitation.read(invite) if invite else None
    name = node or (invitation.node if invitation else "") or socket.gethostname()
    own = own_directory(directory, name, AGENT_DIRECTORY_BYTES_MAX)
    known = _join(invitation, name, own)
    supervisor = supervisor or (",".join(known.control) if known else "")
    for endpoint in supervisor.split(","):
        if (at := host_and_port(endpoint.strip())) is None or at[1] == 0:
            raise InvalidSpec("--supervisor", endpoint, "host:port, for example 10.0.0.5:8471")
    try:
        pool_name(pool)
    except ValueError as error:
        raise InvalidSpec("--pool", pool, str(error)) from error
    environment = {
        "HOLDFAST_SUPERVISOR": supervisor,
        "HOLDFAST_NODE": name,
        "HOLDFAST_AGENT_DIR": str(own),
        "HOLDFAST_DISK_DIR": str(own / "disk"),
        "HOLDFAST_MEMORY_DIR": str(memory / name),
        "HOLDFAST_CAPACITY": str(capacity or _gpus() or 1),
        "HOLDFAST_ZONE": zone or name,
        "HOLDFAST_ADDRESS": address or socket.gethostname(),
        "HOLDFAST_KERNEL_LOG": str(kernel_log),
    }
    if pool:
        environment["HOLDFAST_POOL"] = pool
    if fleet:
        environment["HOLDFAST_FLEET"] = fleet
    if join_token_file is not None:
        environment["HOLDFAST_JOIN_TOKEN_FILE"] = str(join_token_file.absolute())
    if user:
        environment["HOLDFAST_AGENT_USER"] = user
    if known is not None:
        environment = _as_joined(known, own, os.environ) | environment
    if not preflight:
        environment["HOLDFAST_PREFLIGHT_EVERY_S"] = "0"
    # replaces this process, so that signals, exit codes and PR_SET_PDEATHSIG apply to the agent
    inherited = {variable: value for variable, value in os.environ.items() if variable != INVITE}
    os.execve(sys.executable, [sys.executable, "-m", "holdfast.agent"], {**inherited, **environment})


def _join(invitation: Invitation | None, name: str, own: Path) -> Joined | None:
    """Join with the invitation, if one is given; otherwise return the files of an earlier join. None: certificates are
    configured, or the node has never joined."""
    if os.environ.get(CERT):
        if invitation is not None:
            raise InvalidSpec(CERT, os.environ[CERT], "no value, because the invitation brings a certificate")
        return None
    if invitation is None:
        return joining.joined(own)
    return joining.join(invitation, name, own, lambda text: typer.echo(text, err=True))


def _as_joined(known: Joined, own: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of an agent that has joined by an invitation."""
    directory = own / DIRECTORY
    files = Enrolled(directory).files
    settings = {
        CERT: str(files.cert),
        KEY: str(files.key),
        CA: str(files.ca),
        "HOLDFAST_IDENTITY_DIR": str(directory),
        "HOLDFAST_FLEET": known.fleet,
    }
    has_token = environ.get("HOLDFAST_JOIN_TOKEN") or environ.get("HOLDFAST_JOIN_TOKEN_FILE")
    if files.join_token is not None and not has_token:
        settings["HOLDFAST_JOIN_TOKEN_FILE"] = str(files.join_token)
    return settings


def own_directory(parent: Path, name: str, bytes_max: int) -> Path:
    """Return `parent`/`name`. If that path is longer than `bytes_max`, a digest replaces the name, because Unix sockets are
    created in the directory. Equal names give equal paths, so an agent finds the files of the previous agent."""
    whole = parent.absolute() / name
    if len(os.fsencode(whole)) <= bytes_max or len(os.fsencode(name)) <= DIGEST_CHARS:
        return whole
    return whole.with_name(hashlib.sha256(name.encode()).hexdigest()[:DIGEST_CHARS])


def _gpus() -> int:
    """Return the number of GPUs of this machine according to the kernel; needs no driver library."""
    return sum(1 for path in Path("/proc/driver/nvidia/gpus").glob("*") if path.is_dir())
