"""`holdfast init`: what a training script needs in order to report its steps, and a job file for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
import yaml

from holdfast.cli import torchrun
from holdfast.cli.script_changes import Change, Found, Ready, Unclear, Uses, changes
from holdfast.cli.terminal import Terminal
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.words import plural
from holdfast.wire.jobfile import parse_job

SCRIPT_BYTES_MAX = 4 << 20
HEAD = """\
# Written by `holdfast init`. Run it: holdfast run --local {file}
# Every key, with its default and an example: docs/job-file.md
"""
# Each line, and the comment after it. A key in a comment is not set.
LINES = (
    ("name: {name}", "of the job and of its checkpoints"),
    ("script: {script}", "relative to this file"),
    ("args: []", 'of every worker, for example [--lr, "3e-4"]'),
    ("nodes: {nodes}", "machines, each with one agent"),
    ("nproc_per_node: {workers}", "workers per node, usually its GPUs"),
    ("hang: {{floor_s: 60}}", "a pause that the script does not announce is a hang after ten times as long"),
    ("# mesh: {{dp: 2, tp: 4}}", "outermost first; without it all ranks are data-parallel"),
    ("# elastic: {{min_dp: 1}}", "go on with fewer replicas when a node is lost and none is spare"),
    ("# spares: 1", "free nodes that are reserved for this job"),
    ("# checkpoint:", "of run.checkpoint; what the script saves by itself is left alone"),
    ("#   interval_steps: auto", "or a number of steps"),
    ("#   store: gs://bucket/prefix", "or file:///mnt/shared; survives the loss of all nodes"),
    ("# policy: policy.py", "the action for each incident; without it the default policy decides"),
    ("# preload: []", "do not learn which modules the script imports; a restart then waits for them"),
    ("# env: {{NCCL_DEBUG: WARN}}", "of every worker; stored and shown. For secrets: env_from"),
)
COMMENT_COLUMN = 32
CHANGED = (
    'A pause of more than ten minutes without a step counts as a hang: put a longer evaluation into `with run.phase("eval"):`.',
    "It still saves by itself only. Planned changes (a cordon, maintenance, growth) wait for run.checkpoint, which it does not "
    "call: docs/checkpoints.md, In the script.",
)
UNMODIFIED = (
    "It runs all the same: after a fault it starts again, and goes on from a checkpoint that it has written itself. "
    "docs/frameworks.md, hf.attach, shows the lines to write."
)


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Run", epilog="Example: [bold]holdfast init train.py --nproc-per-node 8[/]")(init)


def init(
    script: Annotated[Path, typer.Argument(help="A training script, as torchrun starts it.", show_default=False)],
    nnodes: Annotated[int, typer.Option(help="Nodes of the job.", min=1)] = 1,
    nproc_per_node: Annotated[str, typer.Option(help="Workers per node: a number, gpu, cpu or auto.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="The job file to write. Default: job.yaml beside the script.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing job file.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print only the diff, for `patch`. Writes nothing.")] = False,
) -> None:
    """Write a job file for a training script, and print the lines that let the script report its steps.

    The script is read, not run, and not changed. It runs without the lines as well: then Holdfast sees that a rank ends, but
    not how many steps it has finished.

    Exit code 1 with --diff if there is no diff.
    """
    text = _read(script)
    shown = os.path.relpath(script)
    found = changes(text, shown)
    if diff:
        _only_diff(found, shown)
        return
    path = out or script.parent / "job.yaml"
    body = _job_file(script, path, nnodes, nproc_per_node)
    if path.exists() and not force:
        raise Conflict(f"{path} exists: --force replaces it, --out FILE writes another one, --diff writes none")
    try:
        path.write_text(body, encoding="utf-8")
    except OSError as error:
        raise InvalidSpec("--out", str(path), f"a file that can be written ({error.strerror or error})") from error
    console = Terminal(highlight=False, emoji=False, markup=False)
    for line in _about(found, shown):
        console.print(line, soft_wrap=True)
    console.print(f"\nwritten: {path}\nnext:", soft_wrap=True)
    first = f"holdfast init {shown} --diff | patch -p0" if isinstance(found, Change) else "holdfast doctor"
    for command in (first, f"holdfast run --local {os.path.relpath(path)}"):
        console.print(f"    {command}", soft_wrap=True)


def _read(script: Path) -> str:
    """Raises `InvalidSpec`."""
    try:
        if script.stat().st_size > SCRIPT_BYTES_MAX:
            raise InvalidSpec("script", str(script), f"a script of at most {SCRIPT_BYTES_MAX >> 20} MiB")
        return script.read_bytes().decode("utf-8")  # with its own line ends, which the diff keeps
    except OSError as error:
        raise InvalidSpec("script", str(script), f"a readable file ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InvalidSpec("script", str(script), f"a Python file in UTF-8 ({error})") from error


def _only_diff(found: Found, shown: str) -> None:
    if isinstance(found, Change):
        typer.echo(found.diff, nl=False)
        return
    for line in _about(found, shown):
        typer.echo(line, err=True)
    raise typer.Exit(1)


def _about(found: Found, shown: str) -> list[str]:
    """Return lines for the user about the script and the changes to it."""
    match found:
        case Change(diff, notes):
            added = plural(sum(line.startswith("+") for line in diff.splitlines()) - 1, "more line")
            about = (
                f"{shown} runs unmodified. With {added} it reports its steps, so that hangs and slow ranks are found:"
            )
            return [about, "", diff, *notes, *CHANGED]
        case Uses(framework):
            page = f"docs/frameworks.md#{framework.section}"
            if not framework.lines:
                return [f"{shown} uses {framework.name}. It needs no change to report its steps and to save ({page})."]
            about = f"{shown} uses {framework.name}. It runs unmodified; with its integration it reports its steps and saves"
            return [f"{about} ({page}):", "", *(f"    {line}" for line in framework.lines)]
        case Ready():
            return [f"{shown} uses Holdfast already: no lines are proposed."]
        case Unclear(reason):
            return [f"No lines are proposed for {shown}: {reason}.", UNMODIFIED]


def _job_file(script: Path, path: Path, nodes: int, nproc_per_node: str) -> str:
    """The text of the job file, which the loader accepts. Raises `InvalidSpec`."""
    name = torchrun.job_name(str(script))
    target = os.path.relpath(script.resolve(), path.resolve().parent)
    workers = torchrun.workers(nproc_per_node)
    given = {"name": name, "script": _scalar(target), "nodes": nodes, "workers": workers}
    lines = [f"{line.format(**given):<{COMMENT_COLUMN}} # {comment}\n" for line, comment in LINES]
    text = HEAD.format(file=os.path.relpath(path)) + "".join(lines)
    parse_job(yaml.safe_load(text), path.resolve().parent)
    return text


def _scalar(text: str) -> str:
    """Return the value as YAML on one line, with quotes where YAML needs them."""
    return yaml.safe_dump(text, allow_unicode=True, width=len(text) + 100).removesuffix("\n...\n").rstrip()
