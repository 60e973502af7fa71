"""`holdfast run`: runs a job file, or a script with torchrun's own flags."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from holdfast.cli import job_environment, torchrun
from holdfast.cli.client import Client
from holdfast.cli.connection import ENV_API, NoApi, default_url
from holdfast.cli.endings import ENDED, UNAVAILABLE, show_error
from holdfast.cli.follow import How, by_command, follow
from holdfast.cli.last_save import stop_saved
from holdfast.cli.launcher import ENV_LAUNCHER, Launcher, Start, changed_keys, require_one_start, submit
from holdfast.cli.local_runs import RUNS
from holdfast.cli.log_tail import LogTail, Ranks
from holdfast.cli.policy import require_usable
from holdfast.cli.stack import LocalStack
from holdfast.cli.stack_options import NODES_MAX, StackOptions
from holdfast.cli.terminal import Terminal, output_may_be_lost
from holdfast.domain.errors import InvalidSpec, Unavailable
from holdfast.domain.evolve import evolve
from holdfast.domain.job import JobSpec
from holdfast.domain.words import plural
from holdfast.wire.job_fields import NAME_CHARS_MAX
from holdfast.wire.jobfile import load_job, parse_job

NODES_TIMEOUT_S = 120.0
NODES_POLL_S = 0.1
SETTLE_TIMEOUT_S = 30.0
SUSPENDED_WAIT_S = 300.0  # for the nodes of a new allocation
# Unlimited: days may pass between two runs of a name.
KEEP_ALL = {"HOLDFAST_REPLICATOR_RETENTION_S": "0"}

# Options that a job file replaces: parameter → (option, key of the file).
IN_JOB_FILE = {
    "nnodes": ("--nnodes", "nodes, elastic"),
    "nproc_per_node": ("--nproc-per-node", "nproc_per_node"),
    "max_restarts": ("--max-restarts", "limits.restarts_without_progress_max"),
    "name": ("--name", "name"),
    "policy": ("--policy", "policy"),
    "preload": ("--preload", "preload"),
}


def register(app: typer.Typer) -> None:
    app.command(
        rich_help_panel="Run",
        context_settings={"allow_interspersed_args": False, "token_normalize_func": torchrun.spelling},
        epilog="Examples: [bold]holdfast run job.yaml[/] · "
        "[bold]holdfast run --nnodes 2 --nproc-per-node 8 train.py --lr 3e-4[/]",
    )(run)


@output_may_be_lost()
def run(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(help="A job file (.yaml) or a Python script; with -m a module, with --no-python a program.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    nnodes: Annotated[str, typer.Option(help="Nodes, N or MIN:MAX as in torchrun.")] = "1",
    nproc_per_node: Annotated[str, typer.Option(help="Workers per node: a number, gpu, cpu or auto.")] = "1",
    max_restarts: Annotated[
        int | None,
        typer.Option(help="Maximum number of restarts in a row without a new step.", min=0),
    ] = None,
    name: Annotated[
        str,
        typer.Option(help="Job name. Default: derived from the script; numbered if an unfinished job has that name."),
    ] = "",
    spares: Annotated[int | None, typer.Option(help="Spare nodes of a local stack.", min=0)] = None,
    policy: Annotated[
        str, typer.Option(help="Policy of the job: a Python file with decide(), or plugin:NAME for an installed one.")
    ] = "",
    preload: torchrun.Preload = None,
    env: job_environment.Env = None,
    env_file: job_environment.EnvFile = None,
    env_from: job_environment.EnvFrom = None,
    api: Annotated[str, typer.Option(help="URL of the Holdfast API.", envvar=ENV_API, show_default=False)] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Start from the newest complete checkpoint of this job name.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start at step 0. Existing checkpoints of this job name are retained.")
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", help="With --resume: step of the checkpoint.", min=1, show_default=False)
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Start a local stack for this job, even if an API is reachable.")
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help=f"Directory of a local stack for checkpoints, state and logs. Default: {RUNS}/NAME.",
            show_default=False,
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit the job and return.")] = False,
    attach: Annotated[
        bool,
        typer.Option(
            "--attach",
            help="Follow the job of this name if this launcher has submitted it, else submit it. For a launcher that a "
            f"scheduler restarts: {ENV_LAUNCHER} identifies it, or a file of this user on this machine.",
        ),
    ] = False,
    show_ranks: Annotated[
        str,
        typer.Option(
            help="Ranks whose output is printed: all, or a list such as 0,7. Default: 0, and with pipeline stages (pp) the "
            "first of the last stage.",
            show_default=False,
        ),
    ] = "",
    local_ranks_filter: torchrun.LocalRanksFilter = "",
    tee: torchrun.Tee = "",
    unneeded: torchrun.Unneeded = None,
    standalone: torchrun.Standalone = False,
    module: torchrun.Module = False,
    no_python: torchrun.NoPython = False,
    run_path: torchrun.RunPath = False,
    virtual_local_rank: torchrun.VirtualLocalRank = False,
    numa_binding: torchrun.NumaBinding = "",
    signals_to_handle: torchrun.SignalsToHandle = "",
) -> None:
    """Run a job. Uses the Holdfast API if one is reachable; otherwise starts a local stack and stops it afterwards.

    Accepts an unmodified torchrun script and torchrun's options; options for the rendezvous are ignored.

    Exit codes: 0 the job completed · 1 it failed · 2 wrong usage · 69 no supervisor answers · 75 suspended: all of its nodes
    ended, submit it again · 93 do not restart: an error of the script, or an operator stopped the job · 128 + N ended by
    signal N (Ctrl-C: 130).
    """
    del unneeded, standalone
    torchrun.refuse(
        {
            "--virtual-local-rank": virtual_local_rank,
            "--numa-binding": numa_binding,
            "--signals-to-handle": signals_to_handle,
        }
    )
    kind = torchrun.kind_of(module=module, no_python=no_python, run_path=run_path)
    given = job_environment.Given.of(env or (), env_file or (), env_from or (), os.environ)
    is_file = kind == "script" and target.endswith((".yaml", ".yml"))
    if local and _typed(context, "api"):
        raise InvalidSpec("--api", api, "either --api or --local, because --local starts its own stack")
    require_one_start(resume=resume, fresh=fresh)
    if step is not None and not resume:
        raise InvalidSpec("--step", step, "--step together with --resume")
    if is_file:
        _reject_flags_with_job_file(context, arguments or [])
        spec = load_job(Path(target))
    else:
        body = torchrun.body(
            target,
            arguments or [],
            nnodes=nnodes,
            nproc_per_node=nproc_per_node,
            max_restarts=max_restarts,
            name=name,
            policy=policy,
            spares=spares or 0,
            kind=kind,
            preload=torchrun.modules(preload),
        )
        spec = parse_job(body, Path.cwd())
    ranks = torchrun.shown_ranks(show_ranks or local_ranks_filter, tee, spec.mesh)
    _ranks_exist(ranks, spec)
    url = _running_api(api, local)
    for option, is_set in (("--detach", detach), ("--attach", attach)):
        if is_set and not url:
            raise Unavailable(
                f"{option} needs a running Holdfast, but no API answers at {default_url()}; start one with `holdfast up`"
                if not local
                else f"{option} cannot be used with --local, because the local stack ends with this command; "
                "leave one of them out"
            )
    if directory is not None and url:
        raise InvalidSpec(
            "--dir",
            str(directory),
            f"--dir only with a local stack, but the job is submitted to {url}; add --local to start a local stack",
        )
    place = (directory or RUNS / spec.name).expanduser()
    if resume and not url and not place.exists():
        raise Unavailable(
            f"no checkpoint to resume from: no Holdfast API answers at {default_url()}, and the directory of a local stack for "
            f"{spec.name}, {place}, does not exist. Start the Holdfast that ran the job (`holdfast up`), or set the directory "
            "with --dir"
        )
    start = Start(resume, fresh, step, Launcher.of(spec.name, url) if attach else None)
    own = None if url else _Own(place, spec.spares if spares is None else spares)
    if own is not None:
        _require_room(spec, own)
    spec = _with_environment(spec, given, url, is_file)
    try:
        if url and not name and not attach and not resume and not is_file:
            spec = _with_free_name(spec, url)
        code = _run(spec, url, own, detach, ranks, start)
    except Unavailable as error:
        show_error(error)
        code = UNAVAILABLE
    raise typer.Exit(code)


def _with_environment(spec: JobSpec, given: job_environment.Given, url: str, is_file: bool) -> JobSpec:
    """Return the job with its complete environment, and print the names of the variables."""
    launch = given.applied(spec.launch)
    own = [*dict(launch.env), *(source.name for source in launch.env_from)]
    passed = job_environment.Passed.of({} if is_file and url else os.environ, besides=own)
    if url:  # the agents of a local stack inherit the complete environment of this shell
        launch = given.applied(launch, passed.values)
    console = Terminal(highlight=False, emoji=False)
    for line in job_environment.report(launch, passed, local=not url):
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
    return evolve(spec, launch=launch)


def _with_free_name(spec: JobSpec, url: str) -> JobSpec:
    """Number a name that was derived from the script if an unfinished job has it: "train", "train-2"."""
    with Client(url) as client:
        taken = {job["name"] for job in client.jobs() if job["phase"] not in ENDED}
    numbered = (f"{spec.name[: NAME_CHARS_MAX - len(end)]}{end}" for end in (f"-{number}" for number in count(2)))
    return spec if spec.name not in taken else evolve(spec, name=next(name for name in numbered if name not in taken))


@dataclass(frozen=True, slots=True)
class _Own:
    """A local stack for this job only."""

    directory: Path
    spares: int


def _run(spec: JobSpec, url: str, own: _Own | None, detach: bool, ranks: Ranks, start: Start) -> int:
    """Run the job at `url`, or on the local stack `own`."""
    console = Terminal(highlight=False, emoji=False)
    with ExitStack() as cleanup:
        check: Callable[[], None] = lambda: None  # noqa: E731
        if own is not None:
            stack = _start_stack(spec, own, console, cleanup)
            url, check, client = stack.api_url, stack.tend, cleanup.enter_context(stack.connect())
        else:
            client = cleanup.enter_context(Client(url))
        found = None
        if start.launcher is None:
            submit(client, spec, start)
        else:
            found = start.launcher.submit(client, spec, start)
        logs = LogTail(client, spec.name, ranks)
        try:
            if found is None:
                resumed = f", resuming from step {client.job(spec.name)['goes_on_from']}" if start.resume else ""
                console.print(f"[bold]{spec.name}[/] submitted to {url}{resumed}", soft_wrap=True)
            else:
                console.print(
                    f"attached to [bold]{spec.name}[/] at {url}: {found['phase']}, {escape(found['reason'])}",
                    soft_wrap=True,
                )
                if changed := changed_keys(found, spec):
                    console.print(
                        f"[yellow]the job file has changed since the job was submitted[/] ({', '.join(changed)}), and is not "
                        "read again: the job continues as it was submitted. To use the new file, submit the job with --resume",
                        soft_wrap=True,
                    )
            how = by_command(spec.name) if own is None else _how_here(spec.name, own.directory)
            where = _where_kept(client, spec.name) if own is None else _kept_here(own.directory, how)
            console.print(f"[dim]{escape(where)}[/]", soft_wrap=True)
            if ranks is not None and len(ranks) < spec.mesh.world_size and not detach:
                shown = ", ".join(map(str, sorted(ranks))) or "none"
                console.print(
                    f"[dim]output is shown of rank {shown}; of all ranks with --show-ranks all[/]", soft_wrap=True
                )
            if detach:
                return 0
            wait_s = SUSPENDED_WAIT_S if found is not None else 0.0
            left = own is not None
            return follow(
                client, spec.name, console, logs=logs, check=check, until_left=left, how=how, suspended_wait_s=wait_s
            )
        except (KeyboardInterrupt, SystemExit) as error:
            if own is not None:
                reason = "the command that ran the job was interrupted"
                how = _how_here(spec.name, own.directory)
                stop_saved(client, spec.name, console, reason=reason, how=how, check=check, output=logs.rest)
            elif isinstance(error, KeyboardInterrupt):
                console.print(f"[bold]{spec.name}[/] continues to run. To stop it: holdfast jobs stop {spec.name}")
            raise


def _where_kept(client: Client, name: str) -> str:
    places = sorted({f"{node['disk_dir']}/{name}" for node in client.nodes() if node.get("disk_dir")})
    where = f" ({places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''})" if places else ""
    return (
        f"after its end, what run.checkpoint has saved is retained on the nodes' disks{where} until "
        f"`holdfast checkpoints prune {name}`, or for the retention period of the nodes (default: 7 days)"
    )


def _kept_here(directory: Path, how: How) -> str:
    return f"after its end, what run.checkpoint has saved is retained in {directory}. To resume from it: {how.resume}"


def _how_here(name: str, directory: Path) -> How:
    return How(
        resume="run the same command with --resume",
        delete=f"delete the directory {directory}",
        memory="is lost with this local stack, which ends now",
        first_error=f"holdfast logs {name} --first-error --dir {shlex.quote(str(directory))}",
    )


def _require_room(spec: JobSpec, own: _Own) -> None:
    """Raises `InvalidSpec` if a local stack cannot have as many nodes as the job needs."""
    if spec.nodes + own.spares > NODES_MAX:
        field, value = ("nodes", spec.nodes) if spec.nodes > NODES_MAX else ("spares", own.spares)
        raise InvalidSpec(
            field,
            value,
            f"at most {NODES_MAX} nodes including spares, because all nodes of a local stack run on this machine "
            "(`holdfast agent` starts a node on another machine)",
        )


def _start_stack(spec: JobSpec, own: _Own, console: Console, cleanup: ExitStack) -> LocalStack:
    if spec.policy:
        require_usable(spec.policy_spec)  # the supervisor checks it too, but only after the stack has been started
    if command := spec.launch.command:  # as above: the job would wait for a node that has the program
        path = dict(spec.launch.env).get("PATH", os.environ.get("PATH", os.defpath))
        if shutil.which(command, path=path) is None:
            raise InvalidSpec("command", command, "a program in PATH that may be executed")
    nodes = spec.nodes + own.spares
    console.print(
        f"starting a local stack with {plural(nodes, 'node')} for this job; checkpoints and logs are in "
        f"{escape(str(own.directory))}",
        soft_wrap=True,
    )
    options = StackOptions(
        directory=own.directory,
        nodes=nodes,
        workers_per_node=spec.nproc_per_node,
        environment=KEEP_ALL,
        nodes_on=False,
    )
    stack = cleanup.enter_context(LocalStack(options, say=lambda text: console.print(text, soft_wrap=True)))
    with stack.connect() as client:
        cut_off = _stop_interrupted_jobs(client)
        earlier = {node["node"]: node["incarnation"] for node in client.nodes()}
        keeping = {path.parent.parent.name for path in own.directory.glob(f"nodes/*/disk/{spec.name}")}
        stack.power_on_all()
        wait_for_nodes(client, stack, nodes, earlier)
        _settle(client, keeping & set(stack.node_names), cut_off)
    return stack


def _stop_interrupted_jobs(client: Client) -> list[str]:
    """Stop the jobs that were running when the stack ended, so that they do not start again. Returns their names."""
    cut_off = [job["name"] for job in client.jobs() if job["phase"] not in ENDED]
    for name in cut_off:  # there is nothing to save: the workers ended with the stack
        client.stop(name, "the local stack that ran the job was stopped", save=False)
    return cut_off


def wait_for_nodes(client: Client, stack: LocalStack, count: int, earlier: Mapping[str, str] | None = None) -> None:
    """Wait until `count` nodes are connected. `earlier`: node → incarnation in the previous run of the stack, which the
    supervisor may still show as connected. Raises `Unavailable` after `NODES_TIMEOUT_S`."""
    deadline = time.monotonic() + NODES_TIMEOUT_S
    while True:
        connected = [
            node["node"]
            for node in client.nodes()
            if node["connected"] and node["incarnation"] != (earlier or {}).get(node["node"])
        ]
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


def _settle(client: Client, keeping: set[str], stopped: Sequence[str]) -> None:
    """Wait until the nodes have reported their checkpoints and the stopped jobs have ended. After a timeout, return: the
    supervisor then rejects the submission with the reason."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while time.monotonic() < deadline:
        reported = keeping <= {node["node"] for node in client.nodes() if node["inventoried"]}
        if reported and all(client.job(name)["phase"] in ENDED for name in stopped):
            return
        time.sleep(NODES_POLL_S)


def _running_api(api: str, local: bool) -> str:
    """Return the URL to submit to; empty = start a local stack. Raises `Unavailable` if the API answers with an error."""
    if local:
        return ""
    if api:
        return api
    url = default_url()
    try:
        with Client(url) as client:
            client.version()
    except NoApi:
        return ""
    return url


def _reject_flags_with_job_file(context: typer.Context, arguments: list[str]) -> None:
    """Raises `InvalidSpec` for options and arguments that the job file would replace."""
    if arguments:
        raise InvalidSpec(
            "arguments",
            " ".join(arguments),
            "no arguments after a job file: put options before it, and the script's arguments into it (args:)",
        )
    for parameter, (flag, key) in IN_JOB_FILE.items():
        if _typed(context, parameter):
            raise InvalidSpec(flag, context.params[parameter], f"no {flag} with a job file; set {key}: in the file")


def _typed(context: typer.Context, parameter: str) -> bool:
    """Return whether the option was given on the command line; a default or an environment variable does not count."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _ranks_exist(ranks: Ranks, spec: JobSpec) -> None:
    last = spec.mesh.world_size - 1
    if ranks is not None and (missing := sorted(rank for rank in ranks if rank > last)):
        raise InvalidSpec("--show-ranks", missing[0], f"a rank of this job, 0 to {last}")
