"""`holdfast demo`: trains a small GPT on this machine and injects nine faults, or three."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.demo import gpu_reset_stand_in
from holdfast.cli.demo.course import LONG, SHORT, reference_losses
from holdfast.cli.demo.picture import draw
from holdfast.cli.demo.report import Report, print_summary, print_tables
from holdfast.cli.demo.scenario import Scenario
from holdfast.cli.run import wait_for_nodes
from holdfast.cli.stack import LocalStack
from holdfast.cli.stack_options import StackOptions
from holdfast.cli.terminal import Terminal
from holdfast.cli.trace import tree
from holdfast.domain.errors import InvalidSpec

FAILED = 1
STACK = "stack"
PIPE_COLUMNS = 140


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Start here", epilog="Example: [bold]holdfast demo --short[/]")(demo)


def unused(out: Path) -> Path:
    """Return `out`, or a directory in it if an earlier demo is there: its stack keeps the checkpoints of the same jobs, and
    nothing of it is deleted."""
    if not (out / STACK).exists():
        return out
    return next(place for number in itertools.count(2) if not (place := out / f"run-{number}").exists())


def demo(
    out: Annotated[
        Path,
        typer.Option(
            help="Directory for report.json, logs and, with matplotlib, timeline.png; of a further demo in it, run-2, run-3, …"
        ),
    ] = Path("out/demo"),
    short: Annotated[
        bool, typer.Option("--short", help="Three faults on five nodes: about a minute instead of several.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Training steps of the main job: {LONG.steps}, at least {LONG.steps_min}; "
            f"with --short {SHORT.steps}, at least {SHORT.steps_min}.",
            show_default=False,
        ),
    ] = None,
    keep_stack: Annotated[
        bool, typer.Option("--keep", help="Keep the stack running at the end until Enter or Ctrl-C.")
    ] = False,
) -> None:
    """Train a GPT with data parallel 3 × pipeline parallel 3 on ten local nodes, and inject nine faults.

    Nine nodes are active, one is a spare. The faults: a worker crash, a lost node, a hang, a GPU that must be reset (a stand-in
    replaces nvidia-smi, so no GPU is needed), a lost GPU without a spare, the repair, a slow rank, the loss of both nodes that
    hold a shard, and a bug in a script. With --short: data parallel 2 × pipeline parallel 2 on five nodes, and the first three
    faults.

    The demo checks the finding and the action of each fault. It takes a few minutes. Ctrl-C stops and removes everything.
    """
    # a pipe has no width, but the tables need a width
    console = Terminal(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    course = SHORT if short else LONG
    steps = course.steps if steps is None else steps
    if steps < course.steps_min:
        raise InvalidSpec(
            "--steps", steps, f"at least {course.steps_min}, so that there is time for {course.faults} faults"
        )
    try:
        out = unused(out)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSpec(
            "--out", str(out), f"a directory that can be created and written ({error.strerror})"
        ) from error
    began = time.time()
    resets = {"HOLDFAST_GPU_RESET_COMMAND": gpu_reset_stand_in.command(), "HOLDFAST_GPU_DEVICES": str(out / "no-gpus")}
    options = StackOptions(directory=out / STACK, nodes=course.nodes, environment=resets)
    with (
        LocalStack(options, say=lambda text: console.print(text, soft_wrap=True)) as stack,
        stack.connect() as client,
    ):
        wait_for_nodes(client, stack, course.nodes)
        console.print(f"[dim]{course.nodes} nodes are up after {time.time() - began:.1f} s[/]")
        dashboard = stack.dashboard(for_terminal=console.is_terminal)
        console.print(f"dashboard while it runs: [bold]{dashboard}[/]", soft_wrap=True)
        scenario = Scenario(client=client, console=console, out=out.resolve(), course=course, steps=steps)
        outcome = scenario.run()
        slowest = max(
            outcome.incidents, key=lambda each: (each.get("first_step_at") or 0.0) - each["fault_at"], default=None
        )
        trace = tree(client.trace(slowest["id"])) if slowest else None
        if keep_stack:
            console.input(f"the stack is still running at {stack.api_url}; press Enter to stop it ")
    console.print("[dim]training the same model without faults, in one process, to compare the losses …[/]")
    report = Report.of(course, outcome, reference_losses(out.resolve(), course, steps))
    report.write(out / "report.json")
    picture = draw(report, out / "timeline.png")
    if trace is not None:
        console.print("\n[bold]The slowest incident[/] (holdfast incidents show ID --trace)")
        console.print(trace)
    print_tables(console, report)
    print_summary(console, report, out, picture)
    if report.failures:
        raise typer.Exit(FAILED)
