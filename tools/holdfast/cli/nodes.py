"""`holdfast nodes`: the nodes of a fleet; takes nodes out of service and returns them."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli import incidents, invites
from holdfast.cli.client import Client
from holdfast.cli.durations import period
from holdfast.cli.local_runs import api_url
from holdfast.cli.tables import Api, AsJson, Name, Row, console, look_at, show_list, show_one, table, text

app = typer.Typer(
    help="Nodes: list, show, watch, invite, their GPUs, cordon, announce maintenance, repair, restart an agent.",
    no_args_is_help=True,
)

invites.register(app)

COLUMNS = ("node", "state", "job", "zone", "pool?", "capacity", "version", "hostname", "reason")
FAULT_COLUMNS = ("at", "incident", "job", "weight", "shared")
CHECK_COLUMNS = ("name", "ok", "detail")
GPU_COLUMNS = ("gpu", "temperature", "power", "memory used", "busy", "ECC errors", "rows", "NVLinks", "PCIe")
LINK_COLUMNS = ("at", "partner", "verdict", "out", "in", "expected", "round trip")
Reason = Annotated[str, typer.Option(help="Kept in the node's record.")]

Source = Annotated[str, typer.Option(help="Source of the notice. A later notice of the same source replaces this one.")]


def show_node(row: Row, as_json: bool) -> None:
    """Show the node, then its faults and incidents in separate tables."""
    if as_json:
        show_one(row, as_json)
        return
    past = {"faults": FAULT_COLUMNS, "incidents": incidents.COLUMNS}
    show_one({key: value for key, value in row.items() if key not in (*past, "preflight", "links")}, as_json)
    if (tested := row["preflight"]) is not None:
        console.print(table(tested["checks"], CHECK_COLUMNS, title=f"\npre-flight: {_outcome(tested)}"))
    if tests := row.get("links"):
        shown = [_link(test) for test in tests]
        console.print(table(shown, LINK_COLUMNS, title="\nnetwork tests with other idle nodes"))
    for key, columns in past.items():
        if row[key]:
            console.print(table(row[key], columns, title=f"\n{key}"))


def _link(test: Row) -> Row:
    """Format a network test: speeds in GB/s, round trips in ms; the failure instead of speeds that were not measured."""
    shown = {key: test[key] for key in ("at", "partner", "verdict")}
    if test["failure"]:
        return {**shown, "out": test["failure"], "in": "", "expected": "", "round trip": ""}
    usual = test["expected_bytes_per_s"]
    return {
        **shown,
        "out": _speed(test["out_bytes_per_s"]),
        "in": _speed(test["in_bytes_per_s"]),
        "expected": "" if usual is None else _speed(usual),
        "round trip": f"{test['round_trip_s'] * 1e3:.2f} ms",
    }


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _outcome(tested: Row) -> str:
    if not tested["at"]:
        return "in progress"
    verdict = "passed" if tested["passed"] else "failed"
    return f"{verdict} at {text(tested['at'], 'at')}, {tested['duration_s']:.1f} s"


look_at(
    app,
    rows=Client.nodes,
    row=Client.node,
    columns=COLUMNS,
    thing="node",
    empty="no nodes; add one with `holdfast agent` or `holdfast up --nodes N`",
    show=show_node,
)


@app.command()
def gpus(name: Name, api: Api = "", as_json: AsJson = False) -> None:
    """Show the newest values of a node's GPUs, which its agent is asked for: temperature, power, memory, errors, links."""
    with Client(api or api_url()) as client:
        items = client.gpus(name)["gpus"]
    rows = items if as_json else [_gpu(gpu) for gpu in items]
    empty = f"{name} has no GPU, or its agent cannot read them (`holdfast doctor` there says why)"
    show_list(rows, GPU_COLUMNS, as_json, empty)


def _gpu(gpu: Row) -> Row:
    if gpu["lost"]:
        return {"gpu": gpu["gpu"], "temperature": "lost", "ECC errors": "its driver does not reach it"}
    errors = [_of(gpu, "ecc_uncorrected", "{} uncorrected"), _of(gpu, "ecc_uncorrected_ever", "{} in its life")]
    rows = [_of(gpu, "remapped_rows", "{} remapped")]
    rows += ["reset needed"] * bool(gpu["remap_pending"]) + ["no spare row"] * bool(gpu["remap_failed"])
    links = [_of(gpu, "nvlinks_up", "{} up"), _of(gpu, "nvlinks_down", "{} down") if gpu["nvlinks_down"] else ""]
    return {
        "gpu": gpu["gpu"],
        "temperature": _of(gpu, "temperature_c", "{:.0f} °C"),
        "power": _of(gpu, "power_w", "{:.0f} W"),
        "memory used": "" if gpu["memory_used"] is None else f"{gpu['memory_used'] / 2**30:.1f} GiB",
        "busy": _of(gpu, "utilization", "{} %"),
        "ECC errors": ", ".join(filter(None, errors)),
        "rows": ", ".join(filter(None, rows)),
        "NVLinks": ", ".join(filter(None, links)),
        "PCIe": "" if gpu["pcie_width"] is None else f"x{gpu['pcie_width']} of x{gpu['pcie_width_max'] or '?'}",
    }


def _of(gpu: Row, field: str, form: str) -> str:
    """Return the formatted value; empty if it is not known."""
    return "" if gpu[field] is None else form.format(gpu[field])


@app.command()
def cordon(name: Name, api: Api = "", reason: Reason = "no reason given") -> None:
    """Take a node out of service. Unlike `kubectl cordon`, this also moves its running ranks to a spare, at a checkpoint."""
    with Client(api or api_url()) as client:
        client.cordon(name, reason)
    console.print(f"{name}: cordoned; to undo: holdfast nodes uncordon {name}")


@app.command()
def uncordon(name: Name, api: Api = "", reason: Reason = "no reason given") -> None:
    """Return a node to service that is cordoned, quarantined, held down or sent away. Its fault history still counts."""
    with Client(api or api_url()) as client:
        client.uncordon(name, reason)
    console.print(f"{name}: uncordoned")


@app.command("restart-agent")
def restart_agent(name: Name, api: Api = "", reason: Reason = "restarted by operator") -> None:
    """Replace the agent of a node without ranks by a new one, for example after an update of its package."""
    with Client(api or api_url()) as client:
        client.restart_agent(name, reason)
    console.print(f"{name}: its agent is restarted")


@app.command()
def announce(
    name: Name,
    event: Annotated[str, typer.Argument(help="What will happen, in a few words.")] = "maintenance",
    within: Annotated[
        str, typer.Option("--in", help="Time until it starts: 30s, 45m, 2h. Default: it may start at any time.")
    ] = "",
    source: Source = "operator",
    api: Api = "",
) -> None:
    """Announce maintenance of a node. Its jobs save and move their ranks in time; it gets no new ranks."""
    in_s = period(within) if within else None
    with Client(api or api_url()) as client:
        client.announce(name, source, event, in_s)
    console.print(f"{name}: {event} is announced; to undo: {_undo(name, source)}")


def _undo(name: str, source: str) -> str:
    return f"holdfast nodes withdraw {name}" + ("" if source == "operator" else f" --source {source}")


@app.command()
def withdraw(name: Name, source: Source = "operator", api: Api = "") -> None:
    """Withdraw a maintenance notice that was announced by `holdfast nodes announce` or by the API."""
    with Client(api or api_url()) as client:
        client.withdraw(name, source)
    console.print(f"{name}: the notice of {source} is withdrawn")


@app.command()
def repair(name: Name, api: Api = "") -> None:
    """Mark a node as repaired. Clears its cordon, its quarantine, its hold-down, its probation and its fault history."""
    with Client(api or api_url()) as client:
        client.repaired(name)
    console.print(f"{name}: marked as repaired")
