"""`holdfast slurm submit`, and the commands that its batch script and its nodes run."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from holdfast.cli.agent import DIGEST_CHARS, own_directory
from holdfast.cli.launcher import Fresh, Resume, chosen_start
from holdfast.cli.slurm import chain as chains
from holdfast.cli.slurm import tools
from holdfast.cli.slurm.allocation import AllocationRun, Here, Plan, holdfast
from holdfast.cli.slurm.chain import Chain
from holdfast.cli.slurm.drains import OWN_REASON
from holdfast.cli.slurm.ending import GRACE_S
from holdfast.cli.slurm.node import NodeTask
from holdfast.cli.slurm.script import Allocation, render
from holdfast.cli.terminal import Terminal, output_may_be_lost
from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.domain.job import JobSpec
from holdfast.domain.nodes import AGENT_DIRECTORY_BYTES_MAX
from holdfast.domain.words import plural
from holdfast.wire.jobfile import load_job

NOTICE_S = 600
CHAIN_MAX = 100
DIRECTORY = Path("holdfast-slurm")  # in the working directory, with the job's name
LOCAL = Path("/tmp")
MEMORY = Path("/dev/shm")
REASON_CHARS_MAX = 120
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED"})  # states of Slurm before the batch script begins

app = typer.Typer(help="Run jobs on a Slurm cluster: submit an allocation, or a chain of them.", no_args_is_help=True)

Directory = Annotated[Path, typer.Option("--dir", help="Shared directory of the job: state, logs, scripts.")]


@app.command(
    epilog="Example: [bold]holdfast slurm submit job.yaml --spares 1 --time 24:00:00 --chain 7 -- --partition=gpu "
    "--gpus-per-node=8[/]"
)
def submit(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job file.", show_default=False)],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="Options of sbatch, each as --name=value.", show_default=False),
    ] = None,
    time: Annotated[str, typer.Option(help="Time limit of each allocation, as Slurm takes it.")] = "24:00:00",
    nodes: Annotated[
        int | None,
        typer.Option(help="Nodes of the job, as a check. Default: nodes of the job file.", min=1, show_default=False),
    ] = None,
    spares: Annotated[
        int | None, typer.Option(help="Additional nodes, which replace failed nodes. Default: the job's.", min=0)
    ] = None,
    chain: Annotated[
        int,
        typer.Option(help="Number of allocations; each continues where the previous one ended.", min=1, max=CHAIN_MAX),
    ] = 1,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help=f"Directory for state and logs, on a file system that all nodes share. Default: ./{DIRECTORY}/NAME.",
            show_default=False,
        ),
    ] = None,
    local: Annotated[Path, typer.Option(help="Directory on each node's own disk: agents, disk tier.")] = LOCAL,
    memory: Annotated[Path, typer.Option(help="Directory on each node's tmpfs: memory tier.")] = MEMORY,
    notice: Annotated[
        int, typer.Option(help="Seconds before the time limit at which Slurm signals the allocation.", min=30, max=7200)
    ] = NOTICE_S,
    drain_condemned: Annotated[
        bool,
        typer.Option(
            "--drain-condemned",
            help="Drain nodes with broken hardware in Slurm, with the reason. Requires the rights of an operator.",
        ),
    ] = False,
    shared_nodes: Annotated[
        bool, typer.Option("--shared-nodes", help="Do not request exclusive nodes (--exclusive).")
    ] = False,
    resume: Resume = False,
    fresh: Fresh = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script and submit nothing.")] = False,
) -> None:
    """Submit a job to Slurm: its nodes and spares as one allocation, or as a chain of allocations.

    The allocation survives nodes that fail. Before its time limit, and by `holdfast slurm cancel`, the job is saved and
    suspended; the next allocation of the chain continues from the saved step. An allocation has the exit codes of `holdfast
    run`.

    The same submission again continues a suspended or failed run, and does not read the job file again; with --resume or
    --fresh it begins a run with the job file as it is now.
    """
    start = chosen_start(resume=resume, fresh=fresh)
    spec = load_job(job_file)
    _require_nodes(nodes, spec)
    _require_short(local)
    if chain > 1 and not spec.checkpoint.store:
        raise InvalidSpec(
            "checkpoint.store",
            "",
            "a store, because the next allocation may have other nodes: a directory that all nodes share "
            "(file:///shared/checkpoints) or a bucket (gs://…)",
        )
    shared = (directory or DIRECTORY / spec.name).expanduser().absolute()
    link = Chain.new(spec.name) if start else Chain.of(shared, spec.name)
    command = [
        *holdfast("slurm", "allocation", str(job_file.absolute())),
        *("--dir", str(shared), "--chain", link.id, "--notice", str(notice)),
        *("--local", str(local), "--memory", str(memory)),
        *(["--drain-condemned"] if drain_condemned else []),
        *([f"--{start}"] if start else []),
    ]
    script = render(
        Allocation(
            name=spec.name,
            nodes=spec.nodes + (spec.spares if spares is None else spares),
            time=time,
            notice_s=notice,
            directory=shared,
            exclusive=not shared_nodes,
            options=options or [],
            command=command,
        )
    )
    if dry_run:
        sys.stdout.write(script)
        return
    _submit(link, script, shared, chain, spec)


def _submit(link: Chain, script: str, shared: Path, count: int, spec: JobSpec) -> None:
    console = Terminal(highlight=False, emoji=False)
    shared.mkdir(parents=True, exist_ok=True, mode=0o700)
    _require_ended(shared, spec.name)
    path = shared / f"{spec.name}.sbatch"
    path.write_text(script)
    path.chmod(0o755)
    link.write(shared)
    for _ in range(count):
        link = replace(link, slurm_jobs=(*link.slurm_jobs, tools.submit(str(path))))
        link.write(shared)
    console.print(
        f"[bold]{escape(spec.name)}[/]: submitted {plural(count, 'allocation')} to Slurm: {', '.join(link.slurm_jobs)}",
        soft_wrap=True,
    )
    console.print(f"[dim]state, logs and the batch script are in {escape(str(shared))}[/]", soft_wrap=True)
    console.print(f"follow: tail -F {escape(str(shared))}/slurm-{link.slurm_jobs[0]}.out", soft_wrap=True)
    if count == 1 and not spec.checkpoint.store:
        console.print(
            "[yellow]checkpoints stay on the nodes' own disks[/]: another allocation resumes only if it gets the same nodes. "
            "To resume on any nodes, set checkpoint.store in the job file",
            soft_wrap=True,
        )


def _require_ended(shared: Path, name: str) -> None:
    """Raises `Conflict` while allocations of an earlier submission wait or run."""
    if not (shared / chains.FILE).exists():
        return
    states = tools.run("squeue", "-h", "-o", "%i", "--me", "-n", name).split()
    if states:
        raise Conflict(
            f"Slurm has {plural(len(states), 'job')} of the name {name} ({', '.join(states)}), and {shared} belongs to it: "
            "wait for its end, `scancel` it, or set another --dir and name"
        )


@app.command(epilog="Example: [bold]holdfast slurm cancel llm[/]")
def cancel(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the job, as in its job file.")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help=f"As given to submit. Default: ./{DIRECTORY}/NAME.", show_default=False)
    ] = None,
) -> None:
    """Save a job and cancel its allocations. If it is submitted again, it continues from the saved step.

    `scancel` saves as well, but only if Slurm tracks processes by cgroups, and within its KillWait (30 s by default).
    """
    console = Terminal(highlight=False, emoji=False)
    shared = (directory or DIRECTORY / name).expanduser().absolute()
    link = chains.newest(shared)
    if link.job != name:
        raise InvalidSpec("--dir", str(shared), f"the directory of {name}: this one is that of {link.job}")
    states = tools.states(link.slurm_jobs)
    waiting = [job for job, state in states.items() if state in WAITING]
    if waiting:  # first, because the next allocation of the chain begins when the running one has ended
        tools.cancel(waiting)
        console.print(f"cancelled before it began: {', '.join(waiting)}", soft_wrap=True)
    for job in (job for job, state in states.items() if state == "RUNNING"):
        tools.tell(job, "USR2")
        console.print(
            f"{job}: {escape(name)} is saved and suspended, and the allocation ends with exit code 75 within {GRACE_S:g} s; "
            f"follow: tail -F {escape(str(shared))}/slurm-{job}.out",
            soft_wrap=True,
        )
    if not states:  # the allocation may have ended by itself
        raise NotFound(f"Slurm has no allocation of {name} that waits or runs ({', '.join(link.slurm_jobs) or 'none'})")


def _require_nodes(nodes: int | None, spec: JobSpec) -> None:
    if nodes is not None and nodes != spec.nodes:
        raise InvalidSpec(
            "--nodes", nodes, f"{spec.nodes}, as in the job file, or no --nodes; spares are additional (--spares)"
        )


def _require_short(local: Path) -> None:
    limit = AGENT_DIRECTORY_BYTES_MAX - 2 * (1 + DIGEST_CHARS) - len(f"/holdfast-{os.getuid()}")
    if len(os.fsencode(local.absolute())) > limit:
        raise InvalidSpec(
            "--local", str(local), f"a path of at most {limit} bytes, because the agents make Unix sockets below it"
        )


# ---------------------------------------------------------------- commands that run in the allocation


@app.command(hidden=True)
def allocation(
    job_file: Annotated[Path, typer.Argument()],
    directory: Directory,
    chain: Annotated[str, typer.Option()],
    notice: Annotated[int, typer.Option()] = NOTICE_S,
    local: Annotated[Path, typer.Option()] = LOCAL,
    memory: Annotated[Path, typer.Option()] = MEMORY,
    drain_condemned: Annotated[bool, typer.Option("--drain-condemned")] = False,
    resume: Resume = False,
    fresh: Fresh = False,
) -> None:
    """Run the control plane and the agents of this allocation, and the job's launcher. Called by the batch script."""
    here = Here.read(os.environ)
    spec = load_job(job_file)
    user = f"holdfast-{os.getuid()}"
    room = AGENT_DIRECTORY_BYTES_MAX - 1 - DIGEST_CHARS  # for the name of a node
    plan = Plan(
        directory=directory,
        chain=chain,
        job_file=job_file,
        job_name=spec.name,
        workers_per_node=spec.nproc_per_node,
        local=own_directory(local / user, spec.name, room),
        memory=memory / user / spec.name,
        notice_s=notice,
        grace_s=min(GRACE_S, notice),
        drains_condemned=drain_condemned,
        start=chosen_start(resume=resume, fresh=fresh),
    )
    with output_may_be_lost():
        code = AllocationRun(plan, here, Terminal(highlight=False, emoji=False)).run()
    raise typer.Exit(code)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def node(
    context: typer.Context,
    supervisor: Annotated[str, typer.Option()],
    directory: Annotated[Path, typer.Option("--dir")],
    memory: Annotated[Path, typer.Option()],
    workers: Annotated[int, typer.Option()],
    shared: Annotated[Path, typer.Option()],
    grace: Annotated[float, typer.Option()],
) -> None:
    """Run an agent, and start it again if it crashes. Called by srun on each node. Other options are those of the agent."""
    name, job = (os.environ.get(variable, "") for variable in ("SLURMD_NODENAME", "SLURM_JOB_ID"))
    if not name or not job:
        raise InvalidSpec("SLURMD_NODENAME", "", "to be set by srun, as `holdfast slurm allocation` starts it")
    for path in (directory, memory):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [
        *holdfast("agent", "--supervisor", supervisor, "--node", name, "--capacity", str(workers)),
        *("--dir", str(directory), "--memory", str(memory)),
        *context.args,
    ]
    raise typer.Exit(NodeTask(command, memory / name, shared, job, grace).run())


@app.command()
def drain(
    name: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node in Slurm.")],
    reason: Annotated[str, typer.Argument(help="Why, in a few words.")],
) -> None:
    """Drain a node in Slurm, unless it is already drained. Requires the rights of an operator."""
    console = Terminal(highlight=False, emoji=False)
    states = tools.node_states(name)
    if len(states) != 1:
        raise InvalidSpec("NODE", name, "the name of one node of this cluster")
    if (known := states[0]).reason:
        console.print(f"{name} is already {known.state}: {escape(known.reason)}; not changed", soft_wrap=True)
        return
    recorded = f"{OWN_REASON} {' '.join(reason.split())}"[:REASON_CHARS_MAX]
    tools.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={recorded}")
    console.print(f"{name} is drained in Slurm: {escape(recorded)}", soft_wrap=True)
