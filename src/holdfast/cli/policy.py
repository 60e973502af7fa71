"""`holdfast policy`: find out what a policy script does before the night does."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.tables import console, table
from holdfast.domain.errors import InvalidSpec, PolicyError
from holdfast.supervisor.policies.script import PolicyScript, sample_incidents, sample_job, try_script

app = typer.Typer(help="Policy scripts: check what they answer.", no_args_is_help=True)

COLUMNS = ("incident", "answer", "reason", "problem")
UNUSABLE = 2


@app.command(epilog="Example: [bold]holdfast policy check examples/policy.py[/]")
def check(
    script: Annotated[str, typer.Argument(help="A Python file with decide(), or plugin:NAME for an installed policy.")],
) -> None:
    """Load the script and ask it about one incident of every kind; every answer must be possible.

    Exit code 2 when it cannot be used: it does not import, lacks decide, answers nonsense, too late or impossibly.

    A running job would report that, and the default policy would decide in its place.
    """
    trials = try_script(script)
    rows = [
        {
            "incident": trial.kind,
            "answer": trial.action.kind if trial.action else None,
            "reason": trial.action.reason if trial.action else None,
            "problem": trial.problem,
        }
        for trial in trials
    ]
    unusable = any(trial.problem for trial in trials)
    console.print(table(rows, COLUMNS if unusable else COLUMNS[:-1]))
    if unusable:
        console.print(f"[red]{script}: where there is a problem, the default policy would decide[/]")
        raise typer.Exit(UNUSABLE)
    console.print(f"[green]{script}: every answer can be carried out[/]")


def require_usable(script: str) -> None:
    """Raises `InvalidSpec` unless the script answers one incident of every kind, in time and with an action."""
    try:
        with PolicyScript(script) as policy:
            policy.load()
            for incident in sample_incidents():
                policy.decide(incident, sample_job(incident))
    except PolicyError as error:
        raise InvalidSpec(
            "policy", script, f"a script with decide(incident, job) -> Action that works ({error})"
        ) from error
