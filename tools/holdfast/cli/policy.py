"""`holdfast policy`: tests a policy before a job uses it."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.tables import console, table
from holdfast.domain.errors import InvalidSpec, PolicyError
from holdfast.policy import ACTIONS
from holdfast.supervisor.policies.script import PolicyScript, sample_incidents, sample_job, try_script

app = typer.Typer(help="Policies: check, actions.", no_args_is_help=True)

COLUMNS = ("incident", "answer", "reason", "problem")
UNUSABLE = 2


@app.command(epilog="Example: [bold]holdfast policy check examples/policy.py[/]")
def check(
    script: Annotated[str, typer.Argument(help="A Python file with decide(), or plugin:NAME for an installed policy.")],
) -> None:
    """Test a policy against one incident of every kind.

    Exit code 2 if the policy fails: it cannot be imported, has no decide(), raises an exception, takes longer than one second,
    or returns an action that is invalid or impossible.

    In a running job, such a failure is reported and the default policy decides.
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
        console.print(f"[red]{script}: for incidents with a problem, the default policy would decide[/]")
        raise typer.Exit(UNUSABLE)
    console.print(f"[green]{script}: all answers are valid[/]")


@app.command(epilog="Example: [bold]holdfast policy actions[/]")
def actions() -> None:
    """List the actions that a policy can return, and what each does to the run."""
    rows = [{"action": spec.kind, "effect": spec.effect, "": spec.summary} for spec in ACTIONS.values()]
    console.print(table(rows, ("action", "effect", "")))


def require_usable(script: str) -> None:
    """Raises `InvalidSpec` unless the policy returns an action for one incident of every kind, in time."""
    try:
        with PolicyScript(script) as policy:
            policy.load()
            for incident in sample_incidents():
                policy.decide(incident, sample_job(incident))
    except PolicyError as error:
        raise InvalidSpec(
            "policy",
            script,
            f"a policy with a working decide(incident, job) -> Action ({error}); `holdfast policy check` shows details",
        ) from error
