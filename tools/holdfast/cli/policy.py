"""`holdfast policy`: tests a policy before a job uses it, and shows and changes the policy of a job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.markup import escape

from holdfast.cli.client import Client
from holdfast.cli.durations import DAY_S, period
from holdfast.cli.local_runs import api_url
from holdfast.cli.tables import Api, AsJson, console, show_one, table
from holdfast.domain.errors import InvalidSpec, MalformedMessage, NotFound, PolicyError
from holdfast.domain.incidents import Action
from holdfast.domain.job import Param, PolicySpec
from holdfast.domain.words import plural
from holdfast.policy import ACTIONS, RUNGS_MAX
from holdfast.supervisor.policies.review import Review, review
from holdfast.supervisor.policies.script import PolicyScript, ask_samples, try_script
from holdfast.supervisor.published import PolicyAsked
from holdfast.wire import records
from holdfast.wire.job_sections import policy_body
from holdfast.wire.jobfile import parse_policy

app = typer.Typer(help="Policies: check, actions, show, set, test, export.", no_args_is_help=True)

COLUMNS = ("incident", "answer", "reason", "problem")
REVIEW_COLUMNS = ("at", "incident", "kind", "decided", "instead", "why")
UNUSABLE = 2
DEFAULT_POLICY = "default"
WEEK_S = 7 * DAY_S
_FIRST = ", ".join(kind for kind, spec in ACTIONS.items() if spec.goes_first)
_RECIPES = (
    (
        "a.otherwise(b)",
        f"A recipe: b follows if a is impossible, fails or exceeds its limit. At most {RUNGS_MAX} rungs; after the last one "
        "the policy is asked again.",
    ),
    ("a.within(s)", "Limit of one rung: every rank has finished a step s seconds after the decision."),
    ("a.then(b)", f"One rung: a, then b with the same decision. a is {_FIRST}; or gpu_reset, and b is restart."),
)

Script = Annotated[str, typer.Argument(help="A Python file with decide(), or plugin:NAME for an installed policy.")]
Params = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE", help="Value that the policy reads as job.params[NAME]. Repeatable."),
]
JobName = Annotated[str, typer.Argument(help="Name of the job.")]
Since = Annotated[
    float,
    typer.Option(
        parser=period, metavar="PERIOD", help="How far to go back, for example 12h. Default: 7d.", show_default=False
    ),
]


@app.command(epilog="Example: [bold]holdfast policy check examples/policy.py[/]")
def check(script: Script, param: Params = None) -> None:
    """Test a policy against one incident of every kind.

    Exit code 2 if the policy fails: it cannot be imported, has no decide(), raises an exception, takes longer than one second,
    or returns an action that is invalid or impossible.

    In a running job, such a failure is reported and the default policy decides.
    """
    trials = try_script(_given(script, param))
    rows = [
        {
            "incident": trial.kind,
            "answer": trial.action.recipe if trial.action else None,
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
    rows = [{"rung": form, "": what} for form, what in _RECIPES]
    console.print(table(rows, ("rung", "")))


@app.command(epilog="Example: [bold]holdfast policy show llm[/]")
def show(
    job: JobName,
    api: Api = "",
    text: Annotated[bool, typer.Option("--text", help="Print the text of the script only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the policy that decides a job's incidents. The script is shown as it was submitted, even if its file has changed."""
    with Client(api or api_url()) as client:
        policy = client.policy(job)
    if text:
        if not policy["source"]:
            raise NotFound(f"{policy['name'] or 'the default policy'} has no text of its own")
        print(policy["source"], end="")
        return
    if as_json:
        show_one(policy, as_json=True)
        return
    brief = {key: value for key, value in policy.items() if key not in ("source", "before", "sha256")}
    brief |= {"name": policy["name"] or DEFAULT_POLICY, "sha256": policy["sha256"][:12]}
    if policy["source"]:
        brief["text"] = f"{plural(len(policy['source'].splitlines()), 'line')}; --text prints them"
    if policy["before"]:
        brief["before"] = [
            {"name": each["name"] or DEFAULT_POLICY, "sha256": each["sha256"][:12], "since_at": each["since"]}
            for each in policy["before"]
        ]
    since = brief.pop("since")
    show_one({"name": brief.pop("name"), "since_at": since, **brief}, as_json=False)


@app.command("set", epilog="Example: [bold]holdfast policy set llm policy.py --since 30d[/]")
def change(
    job: JobName,
    script: Annotated[str, typer.Argument(help="A Python file with decide(), plugin:NAME, or default.")],
    param: Params = None,
    since: Since = WEEK_S,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Change the policy without confirmation.")] = False,
    api: Api = "",
) -> None:
    """Change the policy of a running job, after a dry run against the job's recorded incidents.

    The new policy decides from the next question on. If the job waits because of the old policy, the new one is asked at once.
    """
    policy = _given(script, param)
    require_usable(policy)
    with Client(api or api_url()) as client:
        client.job(job)  # report a job that does not exist before the dry run
        _print_review(review(policy, _recorded(client, job, since)), policy, since)
        if not yes:
            typer.confirm(f"Let {policy.name or 'the default policy'} decide about {job}?", abort=True)
        operation = client.change_policy(job, policy_body(policy))
    console.print(str(operation.get("reason")), soft_wrap=True)


@app.command("test", epilog="Example: [bold]holdfast policy test policy.py --job llm --since 30d[/]")
def dry_run(
    script: Annotated[str, typer.Argument(help="A Python file with decide(), plugin:NAME, or default.")],
    job: Annotated[str, typer.Option(help="Job whose recorded incidents the policy is asked about.")] = "",
    questions: Annotated[
        Path | None, typer.Option("--from", help="File with questions, written by `holdfast policy export`.")
    ] = None,
    param: Params = None,
    since: Since = WEEK_S,
    api: Api = "",
    as_json: AsJson = False,
) -> None:
    """Ask a policy about recorded incidents, and show which decisions would have been different, and why. Changes nothing.

    Without --job and --from, the policy is asked about the incidents of all jobs.
    """
    if job and questions is not None:
        raise InvalidSpec("--from", str(questions), "either --job or --from, not both")
    policy = _given(script, param)
    if questions is not None:
        found = _read(questions, time.time() - since)
    else:
        with Client(api or api_url()) as client:
            names = [job] if job else [str(each["name"]) for each in client.jobs()]
            found = [asked for name in names for asked in _recorded(client, name, since)]
    reviews = review(policy, found)
    if as_json:
        print(json.dumps([_row(each) for each in reviews], indent=2))
    else:
        _print_review(reviews, policy, since)
    if any(each.problem for each in reviews):
        raise typer.Exit(UNUSABLE)


@app.command(epilog="Example: [bold]holdfast policy export llm --out questions.jsonl[/]")
def export(
    job: JobName,
    out: Annotated[Path, typer.Option(help="File to write, one question per line.")],
    since: Since = WEEK_S,
    api: Api = "",
) -> None:
    """Write the questions to a job's policies and their answers to a file, for `holdfast policy test --from` on any machine."""
    with Client(api or api_url()) as client:
        found = _recorded(client, job, since)
    lines = b"".join(records.dumps(asked, PolicyAsked) + b"\n" for asked in found)
    try:
        out.write_bytes(lines)
    except OSError as error:
        raise InvalidSpec("--out", str(out), f"a file that can be written ({error.strerror})") from error
    console.print(f"{plural(len(found), 'question')} written to {escape(str(out))}", soft_wrap=True)


def require_usable(policy: PolicySpec) -> None:
    """Raises `InvalidSpec` unless the policy returns an action for one incident of every kind, in time."""
    if not policy.name:
        return
    try:
        with PolicyScript(policy) as script:
            ask_samples(script, policy.params)
    except PolicyError as error:
        raise InvalidSpec(
            "policy",
            policy.name,
            f"a policy with a working decide(incident, job) -> Action ({error}); `holdfast policy check` shows details",
        ) from error


# ---------------------------------------------------------------- input


def _given(script: str, params: Sequence[str] | None) -> PolicySpec:
    """Return the policy of the command line. Raises `InvalidSpec`."""
    name = "" if script == DEFAULT_POLICY else script
    return parse_policy({"file": name, "params": dict(map(_param, params or ()))}, Path.cwd())


def _param(text: str) -> tuple[str, Param]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidSpec("--param", text, "NAME=VALUE, for example max_swaps=3")
    try:
        read = yaml.safe_load(value) if value.strip() else ""
    except yaml.YAMLError:
        read = value
    return name, read if isinstance(read, str | int | float | bool) else value


def _recorded(client: Client, job: str, since_s: float) -> list[PolicyAsked]:
    """Return the recorded questions, oldest first."""
    found = client.policy_questions(job, since=time.time() - since_s)
    return [_question(json.dumps(each).encode(), job) for each in found][::-1]


def _read(path: Path, since: float) -> list[PolicyAsked]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidSpec("--from", str(path), f"a readable file ({error.strerror})") from error
    found = [_question(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    return [asked for asked in found if asked.at >= since]


def _question(line: bytes, where: str) -> PolicyAsked:
    try:
        return records.loads(line, PolicyAsked)
    except MalformedMessage as error:
        raise InvalidSpec(
            "question", where, f"a question as `holdfast policy export` of this version writes it ({error})"
        ) from error


# ---------------------------------------------------------------- output


def _print_review(reviews: Sequence[Review], policy: PolicySpec, since_s: float) -> None:
    name = escape(policy.name or "the default policy")
    if not reviews:
        console.print(f"[dim]no policy was asked in the last {_days(since_s)}: nothing to compare[/]")
        return
    shown = [each for each in reviews if each.differs or each.problem]
    if shown:
        console.print(table(map(_row, shown), REVIEW_COLUMNS))
    differing = sum(each.differs for each in reviews)
    first = datetime.fromtimestamp(reviews[0].asked.at).strftime("%Y-%m-%d %H:%M")
    console.print(
        f"{name} was asked about {plural(len(reviews), 'recorded question')} since {first}: "
        + (
            f"[yellow]{differing} would have been decided differently[/]"
            if differing
            else "[green]the same decisions[/]"
        )
    )
    if failed := sum(bool(each.problem) for each in reviews):
        console.print(f"[red]it failed {plural(failed, 'time')}; the default policy would have decided instead[/]")


def _row(each: Review) -> dict[str, Any]:
    incident = each.asked.incident
    return {
        "at": each.asked.at,
        "incident": incident.id,
        "kind": str(incident.kind),
        "decided": _short(each.asked.action),
        "instead": _short(each.action) if each.differs else None,
        "why": each.problem or each.action.reason,
    }


def _short(action: Action) -> str:
    return " otherwise ".join(map(_rung, action.rungs))


def _rung(action: Action) -> str:
    more: Iterable[str] = (*action.nodes, *([f"dp {action.dp}"] if action.dp is not None else []))
    limit = (f"within {action.within_s:g} s",) if action.within_s else ()
    return " ".join((action.steps, *more, *limit))


def _days(since_s: float) -> str:
    return f"{since_s / DAY_S:g} days" if since_s > DAY_S else f"{since_s / 3600:g} hours"
