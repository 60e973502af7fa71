"""`holdfast report`: how often a job was interrupted, for how long, where its time went, what that cost; of one job, or all."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.client import Client
from holdfast.cli.completion import names
from holdfast.cli.durations import period
from holdfast.cli.local_runs import api_url
from holdfast.cli.report import offline
from holdfast.cli.report.fleet_page import fleet_page
from holdfast.cli.report.page import page
from holdfast.cli.report.show import show, show_fleet
from holdfast.cli.tables import Api, AsJson, console
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.supervisor.report.numbers import Report, Terms, faults_of, joined, report
from holdfast.supervisor.report.sources import Range

DAY_S = 86_400.0
Json = Mapping[str, Any]


def register(app: typer.Typer) -> None:
    example = (
        "Examples: holdfast report llm --html llm.html --price-per-gpu-hour 2.5 · holdfast report --fleet --last 30d · "
        "holdfast report llm --history history.sqlite3"
    )
    app.command("report", rich_help_panel="Look", epilog=example)(command)


def command(
    name: Annotated[
        str, typer.Argument(help="Name of the job; none with --fleet.", autocompletion=names, show_default=False)
    ] = "",
    fleet: Annotated[bool, typer.Option("--fleet", help="Report all jobs, within the range of --last.")] = False,
    last: Annotated[
        float,
        typer.Option(
            parser=period,
            metavar="DURATION",
            help="With --fleet: how far back, such as 12h or 30d. Default: 7d.",
            show_default=False,
        ),
    ] = 7 * DAY_S,
    history: Annotated[
        Path | None,
        typer.Option(
            help="Read this history.sqlite3 of a supervisor instead of asking one; the file is not changed.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write one self-contained page to this file; it must not exist.", show_default=False),
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Price of an hour of one GPU.", min=0.0, show_default=False)
    ] = None,
    currency: Annotated[str | None, typer.Option(help="What stands before an amount.", show_default=False)] = None,
    flops_per_token: Annotated[
        float | None,
        typer.Option(
            help="FLOPs of one trained token, about 6 × parameters; with --peak-flops, for MFU.", show_default=False
        ),
    ] = None,
    peak_flops: Annotated[
        float | None, typer.Option(help="Peak FLOP/s of one device, such as 989e12.", show_default=False)
    ] = None,
    restart_s: Annotated[
        float | None,
        typer.Option(help="Compare with: seconds of a restart without Holdfast.", min=0.0, show_default=False),
    ] = None,
    checkpoint_every_s: Annotated[
        float | None,
        typer.Option(help="Compare with: seconds between checkpoints without Holdfast.", min=0.0, show_default=False),
    ] = None,
    as_json: AsJson = False,
    api: Api = "",
) -> None:
    """Report a job's newest run, or with --fleet all jobs: MTBF and MTTR by kind and node, goodput, and what each cause cost.

    Prices, FLOPs and what to compare with can be stated in the job file (`report`); options take precedence."""
    if bool(name) == fleet:
        raise InvalidSpec("NAME", name, "the name of a job, or --fleet")
    if html is not None and html.exists():
        raise Conflict(f"{html} exists; choose another file, or remove it")
    given = Terms(price_per_gpu_hour, flops_per_token, peak_flops, restart_s, checkpoint_every_s, currency)
    if fleet:
        values = _of_fleet(given, last, history, api)
        text, say = fleet_page(values), partial(show_fleet, values)
    else:
        made = _of_job(name, given, history, api, timeline=html is not None)
        text, values, say = _page(made) if html is not None else "", asdict(made.report), partial(show, made.report)
    if html is not None:
        html.write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps(values, indent=2))
        return
    say()
    if html is not None:
        console.print(f"\n{html}")


@dataclass(frozen=True, slots=True)
class _Made:
    report: Report
    incidents: list[Json]
    timeline: Json


def _page(made: _Made) -> str:
    faults = faults_of(made.incidents, made.report.started_at)
    return page(made.report, made.timeline, faults, made.report.currency)


def _of_job(name: str, given: Terms, history: Path | None, api: str, *, timeline: bool) -> _Made:
    if history is not None:
        return _Made(*offline.of_job(history, name, given))
    with Client(api or api_url(name)) as client:
        job, ledger = client.job(name), client.goodput(name)
        incidents: list[Json] = sorted(client.incidents(name), key=lambda each: float(each["fault_at"]))
        stated = Terms(**(job.get("spec", {}).get("report") or {}))
        made = report(job, ledger, incidents, joined(given, stated))
        return _Made(made, incidents, client.timeline(name) if timeline else {})


def _of_fleet(given: Terms, last_s: float, history: Path | None, api: str) -> dict[str, Any]:
    """Return the report in the form of the API."""
    now = time.time()
    part = Range(max(0.0, now - last_s), now)
    if history is not None:
        return offline.of_fleet(history, given, part)
    with Client(api or api_url()) as client:
        stated = {each.name: value for each in fields(given) if (value := getattr(given, each.name)) is not None}
        return client.fleet_report(since=part.since, until=part.until, **stated)
