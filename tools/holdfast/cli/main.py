"""The `holdfast` command: combines the subcommands, and prints every expected error as one message (exit code 2)."""

from __future__ import annotations

import errno
import inspect
import io
import signal
import sys
from importlib import import_module, metadata
from types import FrameType, MappingProxyType
from typing import Annotated

import typer
from typer.models import CommandInfo, TyperInfo

from holdfast.cli.endings import FAILED, SIGNALLED, USAGE_ERROR, show_error
from holdfast.domain.distribution import DISTRIBUTION
from holdfast.domain.errors import HoldfastError

# Subcommand → the function or group that adds it, in the order of the help. Imported on demand: importing all of them takes
# four times as long as importing one.
COMMANDS = MappingProxyType(
    {
        "demo": "demo:register",
        "up": "up:register",
        "agent": "agent:register",
        "run": "run:register",
        "init": "init:register",
        "slurm": "slurm.commands:app",
        "kubernetes": "kubernetes.commands:app",
        "inject": "inject:register",
        "jobs": "jobs:app",
        "nodes": "nodes:app",
        "incidents": "incidents:app",
        "actions": "incidents:actions_app",
        "breaker": "breaker:app",
        "notify": "notify:app",
        "checkpoints": "checkpoints:app",
        "policy": "policy:app",
        "dashboard": "dashboard:register",
        "logs": "logs:register",
        "explain": "explain:register",
        "report": "report:register",
        "doctor": "doctor:register",
        "health": "health:register",
        "ca": "ca:app",
        "tokens": "tokens:app",
        "audit": "audit:app",
        "simulate": "simulate:register",
    }
)
PANELS = MappingProxyType(
    {
        "Run": frozenset({"slurm", "kubernetes"}),
        "Look": frozenset({"jobs", "nodes", "incidents", "actions", "checkpoints"}),
        "Operate": frozenset({"breaker", "notify", "policy", "ca", "tokens", "audit"}),
    }
)


def application(wanted: str = "") -> typer.Typer:
    """Return the application with the subcommand `wanted`, or with all subcommands if `wanted` is not one of them."""
    app = typer.Typer(
        name="holdfast",
        help="Fault tolerance for large PyTorch training jobs: detects failures, asks your policy, restores training.",
        epilog="Start with `holdfast demo`, or run your own script: `holdfast run --nnodes 1 --nproc-per-node 2 train.py`.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in [wanted] if wanted in COMMANDS else COMMANDS:
        module, attribute = COMMANDS[name].split(":")
        part = getattr(import_module(f"holdfast.cli.{module}"), attribute)
        if isinstance(part, typer.Typer):
            panel = next(panel for panel, names in PANELS.items() if name in names)
            app.add_typer(part, name=name, rich_help_panel=panel)
        else:
            part(app)
    _join_lines(app)
    return app


def _join_lines(app: typer.Typer) -> None:
    """Leave the line breaks of help to the terminal: Typer keeps those of a docstring, from its second paragraph on."""
    commands: list[CommandInfo | TyperInfo] = [*app.registered_commands]
    if app.registered_callback is not None and not isinstance(app.info.help, str):
        commands.append(app.registered_callback)
    for command in commands:
        paragraphs = (command.help or inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _join_lines(group.typer_instance)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(metadata.version(DISTRIBUTION))
        raise typer.Exit


def _root(
    # Eager: works without a subcommand as well.
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    # Without a callback Typer would treat an application with a single command as that command.
    ...


def main() -> None:
    """Entry point. Exit codes: 0 success, 1 the job or check failed, 2 invalid input, 128 + N ended by signal N. `holdfast run`
    has more of them (`endings.py`)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # a question mark for `×`, or in a name
    try:
        # turns Ctrl-C into exit code 130, after all started processes have been stopped
        application(*sys.argv[1:2])()
    except HoldfastError as error:
        show_error(error)
        sys.exit(USAGE_ERROR)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        show_error(HoldfastError("no room for the output: the disk is full"))
        sys.exit(FAILED)
    except KeyboardInterrupt:  # while the subcommand is imported; from then on Typer does this
        sys.exit(SIGNALLED + signal.SIGINT)


def _terminated(number: int, _frame: FrameType | None) -> None:
    # Unwind the stack as Ctrl-C does: the default handler would exit at once and leave shared-memory files behind.
    sys.exit(SIGNALLED + number)


if __name__ == "__main__":
    main()
