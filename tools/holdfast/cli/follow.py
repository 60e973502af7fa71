"""Follow one job until it ends: live view, output of the selected ranks, exit code."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from holdfast.cli.client import Client
from holdfast.cli.connection import NoApi
from holdfast.cli.endings import ENDED, exit_code
from holdfast.cli.last_copy import LastCopy
from holdfast.cli.live import JobDisplay
from holdfast.cli.log_tail import ALL_RANKS, LogTail
from holdfast.cli.tables import markup
from holdfast.cli.warning_lines import NEWEST, WarningLines
from holdfast.domain.errors import NotFound, Unavailable
from holdfast.domain.words import plural

POLL_S = 0.2
NODES_EVERY = 5  # polls; requesting the states of all nodes is the slow part
SETTLE_MAX_S = 30.0  # after the end, for the last checkpoint to reach the disks; copies continue beyond it
WARNINGS_EVERY = 10  # polls: two requests for the newest findings
NODES_NAMED_MAX = 4
SLOW_IMPORTS_S = 3.0  # longer ones are mentioned after a recovery
SILENCE_MAX_S = 900.0  # training continues while the control plane does not answer


@dataclass(frozen=True, slots=True)
class How:
    """How to resume a finished job, and how to delete its checkpoints; each completes "To …: ". `memory`: how long a checkpoint
    exists that is only in memory; completes "It …". `first_error`: the command that shows why a job failed."""

    resume: str
    delete: str
    memory: str
    first_error: str


def by_command(name: str) -> How:
    """Return the commands for a job on a permanent installation."""
    return How(
        resume=f"holdfast jobs resume {name}",
        delete=f"holdfast checkpoints prune {name}",
        memory="is lost if one of these nodes ends before that",
        first_error=f"holdfast logs {name} --first-error",
    )


def follow(
    client: Client,
    name: str,
    console: Console,
    *,
    check: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    until_left: bool = False,
    how: How | None = None,
    suspended_wait_s: float = 0.0,
    logs: LogTail | None = None,
) -> int:
    """Return the exit code for the end of the job (`endings.py`). `check` raises an exception to end the wait.
    `until_left`: after completion, also wait until the final upload has ended. `suspended_wait_s`: how long to wait for a job
    that is suspended at the first poll to continue. `logs`: the output that is shown, for a caller that goes on reading it;
    by default that of all ranks.

    If the control plane does not answer, wait for it; raises `Unavailable` after `SILENCE_MAX_S`, and when it has lost the job.
    """
    logs, warnings = logs or LogTail(client, name, ALL_RANKS), WarningLines(name)
    copying = LastCopy(on_this_machine=until_left, waits_s=SETTLE_MAX_S if until_left and console.is_terminal else 0.0)
    found: list[Mapping[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    silent_since: float | None = None
    ended_at, resumes_by = 0.0, clock() + suspended_wait_s
    nodes: list[Mapping[str, Any]] = []
    with JobDisplay(console) as display:
        for poll in itertools.count():
            check()
            try:
                job = client.job(name)
                if poll % NODES_EVERY == 0:
                    nodes = list(client.nodes())
                display.update(job, nodes)
                changes = list(_incident_lines(client, name, seen, job))
                lines = list(logs.lines(job))
                if poll % WARNINGS_EVERY == 0 or (job["phase"] in ENDED and not ended_at):
                    found = list(client.newest_findings(NEWEST, job=name))
                    of_nodes = client.newest_findings(NEWEST) if job["ranks"] else []
                    changes += warnings.new([*found, *of_nodes], job)
            except Unavailable as error:
                if silent_since is None:
                    silent_since = clock()
                    # it did answer, so the advice to start one would mislead
                    why = "the supervisor does not answer" if type(error) is NoApi else str(error)
                    display.say(f"[yellow]waiting[/]   {escape(why)}; training continues")
                if clock() - silent_since > SILENCE_MAX_S:
                    raise
                sleep(POLL_S)
                continue
            except NotFound:
                if not poll:
                    raise
                raise Unavailable(
                    f"the supervisor no longer knows {name}, because its state was lost; the job's workers may still train, "
                    f"unattended: `holdfast nodes list` shows where, and `holdfast jobs stop {name}` ends them before you "
                    "submit the job again with --resume (docs/supervisor-machine.md)"
                ) from None
            if silent_since is not None:
                silent_since = None
                display.say("connected to the supervisor again")
            for line in lines:
                display.print(line)
            for line in changes:
                display.say(line)
            if not job.get("suspended"):
                resumes_by = 0.0
            if (job["phase"] in ENDED and not (until_left and job.get("leaving"))) or (
                job.get("suspended") and clock() >= resumes_by
            ):
                ended_at = ended_at or clock()
                if settled(job) or clock() - ended_at > SETTLE_MAX_S:
                    break
                if line := copying.look(job.get("kept"), found, clock()):
                    display.say(line)
                if copying.given_up:
                    break
            else:
                ended_at = 0.0
            sleep(POLL_S)
        for line in logs.rest():
            display.print(line)
    console.print(markup(f"[bold]{escape(name)}[/] {job['phase']}: {escape(job['reason'])}"), soft_wrap=True)
    how = how or by_command(name)
    if job["phase"] == "failed":
        console.print(
            escape(f"the exception of the rank that failed first, and its log: {how.first_error}"), soft_wrap=True
        )
    if description := kept(job, how) or _unsaved(job):
        console.print(escape(description), soft_wrap=True)
    return exit_code(job)


def _unsaved(job: Mapping[str, Any]) -> str:
    """Describe what a finished job without a checkpoint can be started again from; empty if it has one."""
    if job["phase"] not in ENDED or job.get("checkpoint_step") or job.get("step") == 0:
        return ""
    if job.get("step") is None:
        return (
            "Holdfast retains no checkpoint of this job, because its script reports no steps: only what the script has saved "
            "itself remains (docs/scripts.md)"
        )
    return (
        f"no checkpoint was saved by step {job['step']}: the script did not call run.checkpoint, or none was due "
        "(checkpoint.interval_steps). Another run starts at step 0"
    )


def settled(job: Mapping[str, Any]) -> bool:
    """Return whether the last checkpoint of a finished or suspended job is on its nodes' disks."""
    if suspended := job.get("suspended"):
        return suspended["durable"] or not suspended["step"] or not suspended["nodes_left"]
    kept = job.get("kept")
    return not job.get("checkpoint_step") or bool(kept and kept["on_disk"] and kept["step"] >= job["checkpoint_step"])


def kept(job: Mapping[str, Any], how: How) -> str:
    """Describe the retained checkpoint of a finished job, and how to use and delete it; empty if there is none. For a suspended
    job, describe the checkpoint that it continues from, and its tiers."""
    if suspended := job.get("suspended"):
        return _resumable(suspended)
    found = job.get("kept")
    if not found:
        return ""
    nodes = list(found["directories"])
    on = ", ".join(nodes[:NODES_NAMED_MAX]) + (
        f" and {len(nodes) - NODES_NAMED_MAX} more" if len(nodes) > NODES_NAMED_MAX else ""
    )
    under = sorted(set(found["directories"].values()))
    if not found["on_disk"] and nodes:
        return (
            f"checkpoint at step {found['step']} is only in the memory of {on}: it has not been written to "
            f"{', '.join(under[:NODES_NAMED_MAX])}, and replicator.log of the node says why. It {how.memory}"
        )
    where = f" on {on} under {', '.join(under[:NODES_NAMED_MAX])}" if nodes else ""
    return f"checkpoint at step {found['step']} is retained{where}. To resume: {how.resume}. To delete: {how.delete}"


def _resumable(suspended: Mapping[str, Any]) -> str:
    how = "The job continues automatically when there are nodes for it, and their agents report to the same supervisor"
    if not suspended["step"]:
        return f"no checkpoint is saved. {how}, from step 0"
    tiers = [
        name if count is True else f"{name} of {plural(count, 'rank')}"
        for name, count in suspended["tiers"].items()
        if count
    ]
    under = sorted(set(suspended["directories"].values()))
    where = f", under {', '.join(under[:NODES_NAMED_MAX])}" if under else ""
    more = "" if suspended["durable"] else "; not all copies were made: shards only in memory are lost with the machine"
    return f"checkpoint at step {suspended['step']} is in: {', '.join(tiers)}{where}{more}. {how}"


def _incident_lines(client: Client, name: str, seen: set[tuple[str, str]], job: Mapping[str, Any]) -> Iterator[str]:
    """Describe what is new. Incidents of an earlier job of this name are in the history, and not in this run."""
    for incident in reversed(list(client.incidents(name))):
        if incident["state"] in ("resolved", "failed") and (
            incident["decided_at"] or incident["detected_at"]
        ) < job.get("submitted_at", 0.0):
            continue
        if (key := (incident["id"], incident["state"])) in seen:
            continue
        unseen = not any(identifier == incident["id"] for identifier, _ in seen)
        seen.add(key)
        if unseen and incident["state"] != "open" and escape(incident["cause"].rstrip(".")) not in describe(incident):
            yield describe({**incident, "state": "open"})  # the cause, because the next line has the action only
        preload = (job.get("spec") or {}).get("preload") or ()
        yield describe(incident, stepped=bool(job.get("step")), learns="auto" in preload)


def describe(incident: Mapping[str, Any], *, stepped: bool = True, learns: bool = False) -> str:
    """Describe the current state of an incident in one line of markup. `stepped`: the script has reported steps. `learns`: the
    worker template learns the script's imports."""
    action = incident.get("action") or {}
    kind, cause = action.get("kind", ""), escape(incident["cause"].rstrip("."))
    reason = escape(action.get("reason") or incident["cause"])
    match incident["state"]:
        case "open":
            return f"[yellow]detected[/]  {cause}"
        case "resolved" if incident.get("first_step_at"):
            took = incident["first_step_at"] - incident["fault_at"]
            ran = "first step" if stepped else "all ranks running again"
            return f"[green]resolved[/]  {cause}: {kind}, {took:.2f} s from fault to {ran}{_slow_imports(incident, learns)}"
        case "failed" if kind and kind != "stop":
            return f"[red]failed[/]    {cause}: {kind} led to no new step"
        case "failed":
            return f"[red]stopped[/]   {reason if cause in reason else f'{cause}: {reason}'}"
        case state:
            return f"[yellow]{state:9}[/] {kind}: {reason}"


def _slow_imports(incident: Mapping[str, Any], learns: bool) -> str:
    """How much of a recovery the script needed until it called the library, if that is long."""
    script_s = (incident.get("phases_s") or {}).get("script", 0.0)
    if script_s < SLOW_IMPORTS_S:
        return ""
    advice = (
        ": if that recurs, the log of rank 0 says why" if learns else r": `preload: \[auto]` loads its imports ahead"
    )
    return f", {script_s:.1f} s of it until the script called holdfast.train{advice}"
