"""`holdfast inject`: real faults, made on purpose, to test a set-up before the night does.

A fault is made on the machine where the node runs: run the command there (for a local stack that is this machine).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

from holdfast.cli.client import Client, default_url
from holdfast.cli.machine_room import ask, socket_of
from holdfast.cli.processes import kill_tree
from holdfast.domain.errors import Conflict, HoldfastError, NotFound, Unavailable

app = typer.Typer(
    help="Make a real fault, to test your set-up.",
    no_args_is_help=True,
    epilog="Example: [bold]holdfast inject crash --job gpt --rank 4[/]",
)
console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)

AGENT_MODULE = "holdfast.agent"

Api = Annotated[str, typer.Option(help="The API to ask where things run.", envvar="HOLDFAST_API", show_default=False)]
Job = Annotated[str, typer.Option(help="Job to hurt.")]
RankOption = Annotated[int, typer.Option(help="Rank to hurt.", min=0)]
Node = Annotated[str, typer.Option(help="Node to hurt.")]


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="inject", rich_help_panel="Run")


@dataclass(frozen=True, slots=True)
class Injector:
    """The faults as calls; `holdfast demo` uses the same object as the command line."""

    client: Client

    def crash(self, job: str, rank: int) -> str:
        """SIGKILL one worker."""
        node, pid = self._worker(job, rank)
        _send(pid, signal.SIGKILL)
        return f"SIGKILL to rank {rank} of {job} (pid {pid} on {node})"

    def hang(self, job: str, rank: int) -> str:
        """SIGSTOP one worker: it stays alive and stops making progress."""
        node, pid = self._worker(job, rank)
        _send(pid, signal.SIGSTOP)
        return f"SIGSTOP to rank {rank} of {job} (pid {pid} on {node})"

    def node_loss(self, node: str) -> str:
        """SIGKILL the agent and everything under it; a local stack drops the node's memory tier too."""
        facts = self._here(node)
        switchboard = socket_of(facts["directory"])
        if switchboard.exists():
            ask(switchboard, "power_off", node)
        else:
            kill_tree(_agent(facts).pid)
        return f"{node} lost: SIGKILL to its agent (pid {facts['agent_pid']}) and all its processes"

    def nodes_loss(self, *nodes: str) -> str:
        """Several nodes of one local stack at the same moment, as when they share a power supply."""
        facts = [self._here(node) for node in nodes]
        ask(socket_of(facts[0]["directory"]), "power_off", *nodes)
        return f"{' and '.join(nodes)} lost at once: SIGKILL to their agents and all their processes"

    def node_return(self, node: str) -> str:
        """Switch a lost node of a local stack on again."""
        facts = self._here(node)
        ask(socket_of(facts["directory"]), "power_on", node)
        return f"{node} switched on"

    def xid(self, node: str, code: int, gpu: int = 0) -> str:
        """Write an Xid line, as the NVIDIA driver words it, into the kernel log that the node's agent reads."""
        facts = self._here(node)
        path = Path(facts["kernel_log"])
        line = f"NVRM: Xid (PCI:0000:{gpu + 0x18:02x}:00): {code}, pid='<unknown>', name=<unknown>, injected by holdfast inject"
        if code == 79:
            line = (
                f"NVRM: Xid (PCI:0000:{gpu + 0x18:02x}:00): 79, GPU has fallen off the bus, injected by holdfast inject"
            )
        try:
            with path.open("ab", buffering=0) as log:
                # /dev/kmsg takes "<priority>text" and adds the rest; a plain file holds what kmsg would have shown
                log.write(f"<3>{line}\n".encode() if _is_device(path) else _kmsg_record(line))
        except OSError as error:
            raise HoldfastError(f"cannot write to the kernel log {path} of {node}: {error}") from error
        return f"Xid {code} on GPU {gpu} of {node}, through {path}"

    def _worker(self, job: str, rank: int) -> tuple[str, int]:
        view = self.client.job(job)
        for worker in view["ranks"]:
            if worker["rank"] == rank:
                break
        else:
            raise NotFound(f"job {job} has no rank {rank} now; it is {view['phase']} with {len(view['ranks'])} ranks")
        node, pid = str(worker["node"]), worker.get("pid")
        agent = _agent(self._here(node))
        # The view is a moment old, and pids are used again: only a process of this very agent is a worker of ours.
        if not pid or all(process.pid != pid for process in agent.children(recursive=True)):
            raise Conflict(f"rank {rank} of {job} has no running process on {node} now; the job is {view['phase']}")
        return node, int(pid)

    def _here(self, node: str) -> dict[str, Any]:
        facts = self.client.node(node)
        if facts["hostname"] != socket.gethostname():
            raise Unavailable(
                f"{node} runs on {facts['hostname']}, this is {socket.gethostname()}; run `holdfast inject` on that machine"
            )
        return facts


def _agent(facts: dict[str, Any]) -> psutil.Process:
    """The node's agent. Raises `Conflict` when it does not run: its pid may be somebody else's by now."""
    node, pid = facts["node"], int(facts["agent_pid"])
    try:
        process = psutil.Process(pid)
        ours = AGENT_MODULE in process.cmdline()
    except psutil.NoSuchProcess:
        ours = False
    except psutil.AccessDenied as error:
        raise HoldfastError(f"the agent of {node} (pid {pid}) is not yours to hurt; run this as its user") from error
    if not ours:
        raise Conflict(f"the agent of {node} does not run (pid {pid}); the node is {facts['state']}")
    return process


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError as error:
        raise Conflict(f"process {pid} ended just now") from error
    except PermissionError as error:
        raise HoldfastError(f"process {pid} is not yours to hurt; run this as its user") from error


def _is_device(path: Path) -> bool:
    return path.is_char_device()


def _kmsg_record(line: str) -> bytes:
    microseconds = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    return f"3,0,{microseconds},-;{line}\n".encode()


@app.command()
def crash(job: Job, rank: RankOption, api: Api = "") -> None:
    """SIGKILL one rank. Expected: restart in place."""
    with Client(api or default_url()) as client:
        console.print(Injector(client).crash(job, rank))


@app.command()
def hang(job: Job, rank: RankOption, api: Api = "") -> None:
    """SIGSTOP one rank. Expected: found by lack of progress, the rank named, restart."""
    with Client(api or default_url()) as client:
        console.print(Injector(client).hang(job, rank))


@app.command("node-loss")
def node_loss(node: Node, api: Api = "") -> None:
    """SIGKILL a node's agent and all its workers. Expected: a spare takes the ranks, else the replica leaves."""
    with Client(api or default_url()) as client:
        console.print(Injector(client).node_loss(node))


@app.command("node-return")
def node_return(node: Node, api: Api = "") -> None:
    """Switch on a local stack's node that was lost. Expected: it becomes a spare, and the job scales up if it can."""
    with Client(api or default_url()) as client:
        console.print(Injector(client).node_return(node))


@app.command()
def xid(
    node: Node,
    code: Annotated[
        int, typer.Option(help="The Xid, for example 79 (GPU has fallen off the bus).", min=1, max=999)
    ] = 79,
    gpu: Annotated[int, typer.Option(help="GPU index.", min=0, max=15)] = 0,
    api: Api = "",
) -> None:
    """Write an NVIDIA Xid line into the node's kernel log. Expected: as the Xid catalogue says."""
    with Client(api or default_url()) as client:
        console.print(Injector(client).xid(node, code, gpu))
