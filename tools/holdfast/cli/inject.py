"""`holdfast inject`: injects real faults to test a setup.

For a single fault, run the command on the machine of the node; for a local stack this is the machine of the stack. Faults on a
schedule (`--every`, `holdfast.cli.chaos`) are executed by the agents, so the command can run on any machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from holdfast.cli.chaos import Campaign, parse_mix
from holdfast.cli.client import Client
from holdfast.cli.durations import seconds
from holdfast.cli.listing import screen
from holdfast.cli.local_runs import api_url
from holdfast.cli.processes import kill_tree
from holdfast.cli.stack_power import ask, socket_of
from holdfast.cli.tables import table
from holdfast.cli.terminal import Terminal
from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, NotFound, Unavailable
from holdfast.domain.faults import (
    FOR_S_MAX,
    INJECTED,
    LOSS_PERCENT_DEFAULT,
    LOSS_PERCENT_MAX,
    LOSS_PERCENT_MIN,
    OFFSET_S_DEFAULT,
    OFFSET_S_MAX,
    XID_MAX,
    FaultKind,
    xid_line,
)
from holdfast.domain.words import plural
from holdfast.runtime.kernel_records import kernel_record

app = typer.Typer(
    no_args_is_help=True,
    invoke_without_command=True,
    epilog="Examples: [bold]holdfast inject crash --job gpt --rank 4[/] · "
    "[bold]holdfast inject --job gpt --every 20m --for 8h --seed 7 --mix crash=3,node_loss=1,hang=1[/]",
)
console = Terminal(highlight=False, emoji=False, markup=False, soft_wrap=True)

AGENT_MODULE = "holdfast.agent"
HELP = """Inject a real fault, or faults on a schedule, to test your setup.

A fault by its name acts on this machine.

""" + (
    "The faults of a schedule (--every) are executed by the agents of the job's nodes, which refuse them unless the job file "
    "has `chaos: true`. A schedule ends after its time, with the job or with Ctrl-C. It prints how each fault was found and "
    "when the job finished a step again. "
    "A lasting fault (hang, slow, disk_full, lossy_link, clock_jump) ends by itself, even if this command has ended. "
    "redis_kill, leader_kill, lossy_link and clock_jump are refused unless a setting of the supervisor or the agent allows "
    "them: see docs/fault-injection.md."
)
# Fraction of the time in which the process is stopped; more than half, because a rank that shares cores may work at full speed
# in half of the time.
THROTTLED_SHARE = 0.75
THROTTLE_PERIOD_S = 0.1
COLUMNS = ("kind", "rank", "node", "step", "found_as", "action", "found_after_s", "steps_after_s", "outcome")

Api = Annotated[str, typer.Option(help="URL of the Holdfast API.", envvar="HOLDFAST_API", show_default=False)]
Job = Annotated[str, typer.Option(help="Target job.")]
RankOption = Annotated[int, typer.Option(help="Target rank.", min=0)]
Node = Annotated[str, typer.Option(help="Target node.")]


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="inject", rich_help_panel="Run")


@dataclass(frozen=True, slots=True)
class Injector:
    """The faults as methods; used by the command line and by `holdfast demo`."""

    client: Client

    def crash(self, job: str, rank: int) -> str:
        """Send SIGKILL to one worker."""
        node, pid = self._worker(job, rank)
        _send(pid, signal.SIGKILL)
        return f"SIGKILL to rank {rank} of {job} (pid {pid} on {node})"

    def hang(self, job: str, rank: int) -> str:
        """Send SIGSTOP to one worker: the process stays alive and makes no progress."""
        node, pid = self._worker(job, rank)
        _send(pid, signal.SIGSTOP)
        return f"SIGSTOP to rank {rank} of {job} (pid {pid} on {node})"

    def slow(self, job: str, rank: int) -> str:
        """Stop and continue one worker in turn until its process ends, as if its node were throttled."""
        node, pid = self._worker(job, rank)
        threading.Thread(target=_throttle, args=(pid,), name=f"throttle {pid}", daemon=True).start()
        return f"rank {rank} of {job} (pid {pid} on {node}) runs {1 - THROTTLED_SHARE:.0%} of the time"

    def node_loss(self, node: str) -> str:
        """Send SIGKILL to the agent and all its descendants. A local stack also deletes the node's memory tier."""
        facts = self._here(node)
        switchboard = socket_of(facts["directory"])
        if switchboard.exists():
            ask(switchboard, "power_off", node)
        else:
            kill_tree(_agent(facts).pid)
        return f"{node} lost: SIGKILL to its agent (pid {facts['agent_pid']}) and all its processes"

    def nodes_loss(self, *nodes: str) -> str:
        """Stop several nodes of one local stack at the same moment, as when a shared power supply fails."""
        facts = [self._here(node) for node in nodes]
        ask(socket_of(facts[0]["directory"]), "power_off", *nodes)
        return f"{' and '.join(nodes)} lost at once: SIGKILL to their agents and all their processes"

    def node_return(self, node: str) -> str:
        """Start a lost node of a local stack again."""
        facts = self._here(node)
        ask(socket_of(facts["directory"]), "power_on", node)
        return f"{node} started"

    def xid(self, node: str, code: int, gpu: int = 0) -> str:
        """Write an Xid line, as the NVIDIA driver words it, into the kernel log that the node's agent reads."""
        facts = self._here(node)
        path = Path(facts["kernel_log"])
        line = xid_line(code, gpu)
        if code == 79:
            line = f"NVRM: Xid (PCI:0000:{gpu + 0x18:02x}:00): 79, GPU has fallen off the bus, {INJECTED}"
        try:
            with path.open("ab", buffering=0) as log:
                log.write(kernel_record(line, device=_is_device(path)))
        except OSError as error:
            raise HoldfastError(f"cannot write to the kernel log {path} of {node}: {error}") from error
        return f"Xid {code} on GPU {gpu} of {node}, through {path}"

    def _worker(self, job: str, rank: int) -> tuple[str, int]:
        view = self.client.job(job)
        for worker in view["ranks"]:
            if worker["rank"] == rank:
                break
        else:
            raise NotFound(
                f"job {job} has no rank {rank} now; the job is {view['phase']} with {plural(len(view['ranks']), 'rank')}"
            )
        node, pid = str(worker["node"]), worker.get("pid")
        agent = _agent(self._here(node))
        # The view may be outdated and pids are reused: accept only a descendant of this node's agent.
        if not pid or all(process.pid != pid for process in agent.children(recursive=True)):
            raise Conflict(f"rank {rank} of {job} has no running process on {node} now; the job is {view['phase']}")
        return node, int(pid)

    def _here(self, node: str) -> dict[str, Any]:
        facts = self.client.node(node)
        if facts["hostname"] != socket.gethostname():
            raise Unavailable(
                f"{node} runs on {facts['hostname']}, but this machine is {socket.gethostname()}; run `holdfast inject` on "
                f"{facts['hostname']}"
            )
        return facts


def _agent(facts: dict[str, Any]) -> psutil.Process:
    """Return the agent of the node. Raises `Conflict` if it is not running; its pid may have been reused."""
    node, pid = facts["node"], int(facts["agent_pid"])
    try:
        process = psutil.Process(pid)
        ours = AGENT_MODULE in process.cmdline()
    except psutil.NoSuchProcess:
        ours = False
    except psutil.AccessDenied as error:
        raise HoldfastError(
            f"permission denied to inspect the agent of {node} (pid {pid}); run this command as the user who owns it"
        ) from error
    if not ours:
        raise Conflict(f"the agent of {node} (pid {pid}) is not running; the node is {facts['state']}")
    return process


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError as error:
        raise Conflict(f"process {pid} has just exited; run the command again") from error
    except PermissionError as error:
        raise HoldfastError(
            f"permission denied to signal process {pid}; run this command as the user who owns it"
        ) from error


def _throttle(pid: int) -> None:
    """Throttle the process until it ends. The pidfd cannot refer to another process, even if the pid is reused."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            while True:
                signal.pidfd_send_signal(process, signal.SIGSTOP)
                time.sleep(THROTTLE_PERIOD_S * THROTTLED_SHARE)
                signal.pidfd_send_signal(process, signal.SIGCONT)
                time.sleep(THROTTLE_PERIOD_S * (1 - THROTTLED_SHARE))
        finally:
            os.close(process)


def _is_device(path: Path) -> bool:
    return path.is_char_device()


@app.callback(help=HELP)
def scheduled(
    context: typer.Context,
    job: Annotated[str, typer.Option("--job", help="Target job of a schedule. Its job file has `chaos: true`.")] = "",
    every: Annotated[
        str,
        typer.Option(
            help="Inject faults on a schedule, on average one in this time: 30s, 20m, 1h.", show_default=False
        ),
    ] = "",
    for_: Annotated[str, typer.Option("--for", help="Length of the schedule.")] = "1h",
    mix: Annotated[
        str, typer.Option(help=f"Kinds and weights: {', '.join(FaultKind)}.")
    ] = "crash=3,node_loss=1,hang=1",
    seed: Annotated[int, typer.Option(help="Seed of gaps, kinds and ranks; equal seeds give equal schedules.")] = 0,
    lasting: Annotated[str, typer.Option("--lasting", help="Length of one lasting fault.")] = "1m",
    code: Annotated[int, typer.Option("--xid", help="The Xid of kind xid.", min=1, max=XID_MAX)] = 94,
    loss: Annotated[
        float,
        typer.Option(
            "--loss",
            help="Percent of the packets that kind lossy_link loses, in each direction.",
            min=LOSS_PERCENT_MIN,
            max=LOSS_PERCENT_MAX,
        ),
    ] = LOSS_PERCENT_DEFAULT,
    jump: Annotated[
        float,
        typer.Option(
            "--jump",
            help="Seconds by which the clock jumps for kind clock_jump; negative = back.",
            min=-OFFSET_S_MAX,
            max=OFFSET_S_MAX,
        ),
    ] = OFFSET_S_DEFAULT,
    out: Annotated[
        Path | None, typer.Option(help="Also write the table as JSON to this file.", show_default=False)
    ] = None,
    api: Api = "",
) -> None:
    if context.invoked_subcommand is not None:
        if every:
            raise InvalidSpec("--every", every, f"no {context.invoked_subcommand} command: set the kinds with --mix")
        return
    if not every or not job:
        raise InvalidSpec("--every" if not every else "--job", "", "both --job and --every, or one of the commands")
    last_s = seconds(lasting)
    if last_s > FOR_S_MAX:
        raise InvalidSpec("--lasting", lasting, f"at most {FOR_S_MAX:g} s")
    if not jump:
        raise InvalidSpec("--jump", jump, "seconds, not 0")
    if out is not None and not out.absolute().parent.is_dir():
        raise InvalidSpec("--out", str(out), "a file in a directory that exists")
    with Client(api or api_url()) as client:
        campaign = Campaign(
            api=client,
            job=job,
            seed=seed,
            every_s=seconds(every),
            mix=parse_mix(mix),
            for_s=seconds(for_),
            last_s=last_s,
            xid=code,
            say=console.print,
            loss_percent=loss,
            offset_s=jump,
        )
        campaign.run()
    console.print(f"ended: {campaign.ended_by}")
    screen().print(table([each.as_json() for each in campaign.faults], COLUMNS))
    if out is not None:
        out.write_text(json.dumps(campaign.report(), indent=2) + "\n")
        console.print(f"wrote {out}")
    if any(each.outcome == "not survived" for each in campaign.faults):
        raise typer.Exit(1)


@app.command()
def crash(job: Job, rank: RankOption, api: Api = "") -> None:
    """Send SIGKILL to one rank. Expected: restart on the same nodes."""
    with Client(api or api_url()) as client:
        console.print(Injector(client).crash(job, rank))


@app.command()
def hang(job: Job, rank: RankOption, api: Api = "") -> None:
    """Send SIGSTOP to one rank. Expected: a hang finding that names the rank, and a restart."""
    with Client(api or api_url()) as client:
        console.print(Injector(client).hang(job, rank))


@app.command("node-loss")
def node_loss(node: Node, api: Api = "") -> None:
    """Send SIGKILL to a node's agent and all its workers. Expected: hot swap; without a spare, scale down."""
    with Client(api or api_url()) as client:
        console.print(Injector(client).node_loss(node))


@app.command("node-return")
def node_return(node: Node, api: Api = "") -> None:
    """Start a lost node of a local stack again. Expected: it becomes a spare, and the job scales up if it can."""
    with Client(api or api_url()) as client:
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
    """Write an NVIDIA Xid line into the node's kernel log. Expected: the action of the Xid catalogue."""
    with Client(api or api_url()) as client:
        console.print(Injector(client).xid(node, code, gpu))
