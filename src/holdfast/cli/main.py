"""The `holdfast` command: wires the subcommands together and turns every expected error into one clear message, exit 2."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import typer
from rich.console import Console
from rich.text import Text

from holdfast.cli import (
    agent,
    breaker,
    checkpoints,
    demo,
    doctor,
    explain,
    health,
    incidents,
    inject,
    jobs,
    nodes,
    policy,
    run,
    simulate,
    up,
)
from holdfast.domain.errors import HoldfastError

USAGE_ERROR = 2
SIGNALLED = 128  # + the signal's number, as a shell has it

app = typer.Typer(
    name="holdfast",
    help="Keeps large PyTorch training jobs moving: notices what broke, decides by your policy, recovers in seconds.",
    epilog="Start with `holdfast demo`, or run your own script: `holdfast run --nnodes 1 --nproc-per-node 2 train.py`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (demo, up, agent, run, inject):
    module.register(app)
for name, group in (
    ("jobs", jobs.app),
    ("nodes", nodes.app),
    ("incidents", incidents.app),
    ("actions", incidents.actions_app),
    ("breaker", breaker.app),
    ("checkpoints", checkpoints.app),
    ("policy", policy.app),
):
    app.add_typer(group, name=name, rich_help_panel="Look")
for module in (explain, doctor, health, simulate):
    module.register(app)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 the job or check failed, 2 the input is wrong, 128 + N ended by signal N."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    try:
        app()  # turns Ctrl-C into exit code 130, after everything that was started has been stopped
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
