"""The `holdfast` command: wires the subcommands together and turns every expected error into one clear message, exit 2."""

from __future__ import annotations

import signal
import sys
from importlib import import_module, metadata
from types import FrameType, MappingProxyType
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from holdfast.domain.errors import HoldfastError

USAGE_ERROR = 2
SIGNALLED = 128  # + the signal's number, as a shell has it

# Subcommand → what adds it, a function or a group, in the order of the help. Imported when asked for: together they take four
# times as long as one.
COMMANDS = MappingProxyType(
    {
        "demo": "demo:register",
        "up": "up:register",
        "agent": "agent:register",
        "run": "run:register",
        "inject": "inject:register",
        "jobs": "jobs:app",
        "nodes": "nodes:app",
        "incidents": "incidents:app",
        "actions": "incidents:actions_app",
        "breaker": "breaker:app",
        "checkpoints": "checkpoints:app",
        "policy": "policy:app",
        "explain": "explain:register",
        "doctor": "doctor:register",
        "health": "health:register",
        "simulate": "simulate:register",
    }
)


def application(wanted: str = "") -> typer.Typer:
    """The command line with the subcommand `wanted`; with every one when there is none of that name."""
    app = typer.Typer(
        name="holdfast",
        help="Keeps large PyTorch training jobs moving: notices what broke, decides by your policy, recovers in seconds.",
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
            app.add_typer(part, name=name, rich_help_panel="Look")
        else:
            part(app)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(metadata.version("holdfast"))
        raise typer.Exit


def _root(
    # Eager: said without a subcommand as well.
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    # Without a callback Typer takes an application of a single command for that command.
    ...


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 the job or check failed, 2 the input is wrong, 128 + N ended by signal N."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    try:
        # turns Ctrl-C into exit code 130, after everything that was started has been stopped
        application(*sys.argv[1:2])()
    except HoldfastError as error:
        # as text, not markup: messages hold file:100: and [lists], which rich would read as emoji and styles
        message = Text.assemble(("error:", "bold red"), f" {error}")
        Console(stderr=True, highlight=False).print(message, soft_wrap=True)
        sys.exit(USAGE_ERROR)


def _terminated(number: int, _frame: FrameType | None) -> None:
    # Unwinds as Ctrl-C does: the default would end us at once and leave shared-memory files behind.
    sys.exit(SIGNALLED + number)


if __name__ == "__main__":
    main()
