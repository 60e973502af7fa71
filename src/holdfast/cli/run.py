"""`holdfast run`: a job file, or a script with torchrun's own flags."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from holdfast.cli.client import ENV_API, Client, default_url
from holdfast.cli.follow import follow
from holdfast.cli.stack import LocalStack, StackOptions
from holdfast.domain.errors import InvalidSpec, Unavailable
from holdfast.domain.job import JobSpec
from holdfast.wire.jobfile import load_job, parse_job, to_body

NODES_TIMEOUT_S = 120.0
NODES_POLL_S = 0.1


def register(app: typer.Typer) -> None:
    app.command(
        rich_help_panel="Run",
        context_settings={"allow_interspersed_args": False},
        epilog="Examples: [bold]holdfast run job.yaml[/] · [bold]holdfast run --nnodes 2 --nproc-per-node 8 train.py[/]",
    )(run)


def run(
    target: Annotated[str, typer.Argument(help="A job file (.yaml) or a Python script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    nnodes: Annotated[str, typer.Option("--nnodes", help="Nodes, N or MIN:MAX as in torchrun.")] = "1",
    nproc_per_node: Annotated[
        str, typer.Option("--nproc-per-node", "--nproc_per_node", help="Workers per node: a number, gpu, cpu or auto.")
    ] = "1",
    max_restarts: Annotated[
        int | None,
        typer.Option("--max-restarts", "--max_restarts", help="Restarts in a row without a new step.", min=0),
    ] = None,
    name: Annotated[str, typer.Option(help="Job name; default: the script's.")] = "",
    spares: Annotated[int, typer.Option(help="Spare nodes, when a local stack is started for the job.", min=0)] = 0,
    policy: Annotated[Path | None, typer.Option(help="Policy script of the job.")] = None,
    api: Annotated[str, typer.Option(help="API to submit to.", envvar=ENV_API, show_default=False)] = "",
    local: Annotated[
        bool, typer.Option("--local", help="Start a local stack for this job, even when an API answers.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Submit and return.")] = False,
    tee: Annotated[str, typer.Option(help="Ranks whose output is shown, comma-separated.")] = "0",
    module: Annotated[bool, typer.Option("-m", "--module", hidden=True)] = False,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    rdzv: Annotated[
        list[str] | None,
        typer.Option(
            "--rdzv-backend",
            "--rdzv_backend",
            "--rdzv-endpoint",
            "--rdzv_endpoint",
            "--rdzv-id",
            "--rdzv_id",
            "--rdzv-conf",
            "--rdzv_conf",
            hidden=True,
        ),
    ] = None,
    master: Annotated[
        list[str] | None, typer.Option("--master-addr", "--master_addr", "--master-port", "--master_port", hidden=True)
    ] = None,
) -> None:
    """Run a job: on a running Holdfast (`holdfast up`) when one answers, else on a local stack started just for it.

    Takes an unmodified torchrun script with torchrun's flags. Rendezvous flags are accepted and not needed: Holdfast gives
    every generation a rendezvous of its own.
    """
    if module:
        raise InvalidSpec("--module", target, "a path to a script: modules cannot be launched yet")
    del standalone, rdzv, master
    if target.endswith((".yaml", ".yml")):
        if arguments:
            raise InvalidSpec("arguments", arguments, "none: a job file names its script's arguments itself (args:)")
        spec = load_job(Path(target))
    else:
        spec = parse_job(_body(target, arguments or [], nnodes, nproc_per_node, max_restarts, name, policy), Path.cwd())
    raise typer.Exit(_run(spec, api, local, detach, spares, _ranks(tee)))


def _run(spec: JobSpec, api: str, local: bool, detach: bool, spares: int, tee: frozenset[int]) -> int:
    console = Console(highlight=False)
    with ExitStack() as cleanup:
        url = api or default_url()
        if local or not (api or _answers(url)):
            if detach:
                raise Unavailable(
                    f"--detach needs a running Holdfast; none answers at {url}: start one with `holdfast up`"
                )
            url = _start_stack(spec, spares, console, cleanup)
        client = cleanup.enter_context(Client(url))
        client.submit(to_body(spec))
        console.print(f"[bold]{spec.name}[/] submitted to {url}")
        if detach:
            return 0
        return follow(client, spec.name, console, tee=tee)


def _start_stack(spec: JobSpec, spares: int, console: Console, cleanup: ExitStack) -> str:
    directory = Path(tempfile.mkdtemp(prefix=f"holdfast-{spec.name}-"))
    nodes = spec.nodes + spares
    console.print(f"no Holdfast is running here: starting one for this job with {nodes} nodes; logs in {directory}")
    options = StackOptions(directory=directory, nodes=nodes, workers_per_node=spec.nproc_per_node)
    stack = cleanup.enter_context(LocalStack(options, say=lambda text: console.print(f"[dim]{text} …[/]")))
    with Client(stack.api_url) as client:
        wait_for_nodes(client, stack, nodes)
    return stack.api_url


def wait_for_nodes(client: Client, stack: LocalStack, count: int) -> None:
    """Return when `count` nodes are connected. Raises `Unavailable` when they do not come."""
    deadline = time.monotonic() + NODES_TIMEOUT_S
    while True:
        connected = [node["node"] for node in client.nodes() if node["state"] != "lost"]
        if len(connected) >= count:
            return
        stack.check()
        if time.monotonic() > deadline:
            missing = sorted(set(stack.node_names) - set(connected))
            raise Unavailable(
                f"nodes {', '.join(missing)} did not connect within {NODES_TIMEOUT_S:.0f} s; "
                f"see {stack.directory}/nodes/*/agent.log"
            )
        time.sleep(NODES_POLL_S)


def _answers(url: str) -> bool:
    try:
        with Client(url) as client:
            client.version()
    except Unavailable:
        return False
    return True


def _ranks(tee: str) -> frozenset[int]:
    try:
        return frozenset(int(rank) for rank in tee.split(",") if rank.strip())
    except ValueError:
        raise InvalidSpec("--tee", tee, "ranks separated by commas, for example 0,7") from None


def _body(
    script: str, arguments: list[str], nnodes: str, nproc: str, max_restarts: int | None, name: str, policy: Path | None
) -> dict[str, Any]:
    """torchrun's flags as a job body."""
    minimum, _, maximum = nnodes.partition(":")
    try:
        fewest, most = int(minimum), int(maximum or minimum)
    except ValueError:
        raise InvalidSpec("--nnodes", nnodes, "a number or MIN:MAX, for example 2 or 1:4") from None
    if not 1 <= fewest <= most:
        raise InvalidSpec("--nnodes", nnodes, "1 ≤ MIN ≤ MAX")
    workers = _workers(nproc)
    body: dict[str, Any] = {
        "name": name or Path(script).stem.replace("_", "-").lower(),
        "script": script,
        "args": arguments,
        "cwd": os.getcwd(),  # as torchrun: the script sees the directory that the command was typed in
        "nodes": most,
        "nproc_per_node": workers,
        "mesh": {"dp": most * workers},
        "elastic": {"min_dp": fewest * workers, "max_dp": most * workers},
    }
    if max_restarts is not None:
        body["limits"] = {"restarts_without_progress_max": max_restarts}
    if policy is not None:
        body["policy"] = str(policy)
    return body


def _workers(nproc: str) -> int:
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    match nproc:
        case "gpu" if not gpus:
            raise InvalidSpec("--nproc-per-node", nproc, "a number or cpu: this machine has no GPU")
        case "gpu":
            return gpus
        case "cpu":
            return os.cpu_count() or 1
        case "auto":
            return gpus or os.cpu_count() or 1
        case number if number.isdigit() and int(number) > 0:
            return int(number)
    raise InvalidSpec("--nproc-per-node", nproc, "a number of at least 1, gpu, cpu or auto")
