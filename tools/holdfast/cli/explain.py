"""`holdfast explain`: prints one finding with its evidence, its rule and the resulting action."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from holdfast.cli.client import Client
from holdfast.cli.local_runs import api_url
from holdfast.cli.tables import Api, AsJson, console, markup, show_list, show_one
from holdfast.domain.findings import DATED, ESTIMATE

LATEST_MAX = 20
COLUMNS = ("id", "kind", "severity", "node", "rank", "at", "verdict")
# Evidence that other lines show.
_SAID = ("rule", "source", "traceparent", "signal_traceparent")
_INCIDENT = "i-"  # prefix of incident ids; ids of findings begin with the job, node or other subject
_ACTIONS = {
    "watch": "watch",
    "restart_process": "restart the process",
    "reset_gpu": "reset the GPU",
    "reboot_node": "reboot the node",
    "replace_node": "replace the node",
    "stop_job": "stop the job",
}


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Example: [bold]holdfast explain[/] lists the latest findings, [bold]holdfast explain ID[/] explains a "
        "finding, or the finding of an incident.",
        rich_help_panel="Look",
    )(explain)


def explain(
    finding: Annotated[
        str, typer.Argument(help="Id of a finding or an incident. Default: list the latest findings.")
    ] = "",
    job: Annotated[str, typer.Option(help="List only findings of this job.")] = "",
    node: Annotated[str, typer.Option(help="List only findings of this node.")] = "",
    api: Api = "",
    as_json: AsJson = False,
) -> None:
    """Explain a finding: evidence, matched rule, failure attribution, and the resulting action."""
    with Client(api or api_url()) as client:
        if not finding:
            latest = islice(client.findings(job or None, node or None), LATEST_MAX)
            show_list(latest, COLUMNS, as_json, "no findings yet")
            return
        found, incident = look_up(client, finding)
    if as_json:
        show_one(found or incident or {}, as_json=True)
        return
    for line in story(found, incident):
        console.print(line, soft_wrap=True)


def look_up(client: Client, an_id: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return a finding and its incident, by the id of either. The finding is None for an incident without one."""
    if an_id.startswith(_INCIDENT):
        incident = client.incident(an_id)
        return (client.finding(incident["findings"][0]) if incident["findings"] else None), incident
    found = client.finding(an_id)
    return found, client.incident(found["incident"]) if found["incident"] else None


def story(finding: dict[str, Any] | None, incident: dict[str, Any] | None) -> Iterator[Text]:
    """Yield the lines of an explanation: the finding, its evidence, the recommended actions, the resulting action."""
    if finding is not None:
        yield from _finding(finding)
    if incident is not None:
        yield from _incident(incident)


def _finding(finding: dict[str, Any]) -> Iterator[Text]:
    yield markup(f"[bold]{escape(finding['summary'])}[/]")
    yield _line("finding", f"{finding['id']}, {finding['kind']}, {finding['severity']}, {_confidence(finding)}")
    yield _line("where", _where(finding))
    delay = max(0.0, finding["at"] - finding["since"])
    yield _line(
        "when",
        f"started {_moment(finding['since'])}{_estimated(finding)}, detected {_moment(finding['at'])}, {delay:.2f} s later",
    )
    yield _line("rule", f"{finding['rule']} (source: {finding['source']})")
    if blame := finding["evidence"].get("blame"):
        why = finding["evidence"].get("because", "")
        yield _line("attributed to", f"{blame}" + (f", because: {why}" if why else ""))
    for name, value in sorted(finding["evidence"].items()):
        if name not in _SAID and value:
            yield _line(f"  {name}", _indented(value))
    recommended_actions = " → ".join(_ACTIONS.get(rung, rung) for rung in finding["recommended_actions"]) or "none"
    yield _line("recommended", recommended_actions)
    yield _line("advice", finding["advice"])
    yield _line("expires", f"{_moment(finding['at'] + finding['ttl_s'])} ({finding['ttl_s']:g} s)")
    yield _line("result", f"{finding['verdict']}, at {_moment(finding['judged_at'])}")


def _incident(incident: dict[str, Any]) -> Iterator[Text]:
    yield _line("incident", f"{incident['id']}, {incident['state']}: {incident['cause']}")
    action = incident["action"]
    if action is None:
        yield _line("action", "not decided yet")
        return
    nodes = f" of {', '.join(action['nodes'])}" if action["nodes"] else ""
    yield _line("action", f"{action['kind']}{nodes}, decided by {incident['decided_by']}: {action['reason']}")
    for rung in incident.get("walk", ()):  # a supervisor of an earlier version sends no walk
        nodes = f" of {', '.join(rung['nodes'])}" if rung["nodes"] else ""
        yield _line(f"  rung {rung['recipe']}.{rung['rung']}", f"{rung['action']}{nodes}, {_ended(rung)}")
    if left := action.get("fallbacks"):
        yield _line("  not tried", " → ".join(rung["kind"] for rung in left))
    if incident["outcome"]:
        yield _line("outcome", incident["outcome"])


def _ended(rung: dict[str, Any]) -> str:
    limit = f", at most {rung['within_s']:g} s" if rung["within_s"] else ""
    if rung["end"] is None:
        return f"since {_moment(rung['began_at'])}{limit}: {rung['reason']}"
    took = rung["ended_at"] - rung["began_at"]
    after = f" after {took:.1f} s{limit}" if took > 0 else ""
    return f"{rung['end']}{after}: {rung['why']}"


def _line(name: str, value: str) -> Text:
    return markup(f"[bold]{escape(name):16}[/] {escape(value)}")


def _indented(value: str) -> str:
    """Indent the lines of a value below each other."""
    return ("\n" + " " * 17).join(value.splitlines())


def _estimated(finding: dict[str, Any]) -> str:
    return " (an estimate)" if finding["evidence"].get(DATED, "").startswith(ESTIMATE) else ""


def _confidence(finding: dict[str, Any]) -> str:
    return f"confidence {finding['confidence'] * 100:.0f} %"


def _where(finding: dict[str, Any]) -> str:
    parts = [
        f"{name} {finding[key]}"
        for name, key in (("node", "node"), ("GPU", "gpu"), ("rank", "rank"), ("job", "job"))
        if finding[key] not in ("", None)
    ]
    if finding["generation"]:
        parts.append(f"generation {finding['generation']}")
    return ", ".join(parts) or "not attributed to a node or job"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S.%f")[:-4]
