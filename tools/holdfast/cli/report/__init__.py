"""`holdfast report`: how often a job was interrupted, for how long, where its time went, what that cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.client import Client
from holdfast.cli.local_runs import api_url
from holdfast.cli.report.numbers import Faults, Report, Terms, faults_of, report
from holdfast.cli.report.page import page, summary
from holdfast.cli.report.words import compared, money, percent, span
from holdfast.cli.tables import Api, AsJson, Name, Row, console, table
from holdfast.domain.errors import Conflict, InvalidSpec


def register(app: typer.Typer) -> None:
    example = "Example: holdfast report llm --html llm.html --price-per-gpu-hour 2.5"
    app.command("report", rich_help_panel="Look", epilog=example)(command)


def command(
    name: Name,
    html: Annotated[
        Path | None,
        typer.Option(help="Write one self-contained page to this file; it must not exist.", show_default=False),
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Price of an hour of one GPU.", min=0.0, show_default=False)
    ] = None,
    currency: Annotated[str, typer.Option(help="What stands before an amount.")] = "$",
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
    """Report a job's newest run: MTBF and MTTR by kind and node, goodput, and what each cause cost."""
    for one, other, pair in (
        (flops_per_token, peak_flops, "--flops-per-token and --peak-flops"),
        (restart_s, checkpoint_every_s, "--restart-s and --checkpoint-every-s"),
    ):
        if (one is None) != (other is None):
            raise InvalidSpec(pair, "only one of them", "both, or none")
    if html is not None and html.exists():
        raise Conflict(f"{html} exists; choose another file, or remove it")
    terms = Terms(price_per_gpu_hour, flops_per_token, peak_flops, restart_s, checkpoint_every_s)
    with Client(api or api_url(name)) as client:
        job, ledger = client.job(name), client.goodput(name)
        incidents = sorted(client.incidents(name), key=lambda each: each["t_fault"])
        timeline = client.timeline(name) if html is not None else {}
    made = report(job, ledger, incidents, terms)
    if html is not None:
        html.write_text(page(made, timeline, faults_of(incidents, made.started_at), currency), encoding="utf-8")
    if as_json:
        print(json.dumps(asdict(made), indent=2))
        return
    _show(made, currency)
    if html is not None:
        console.print(f"\n{html}")


def _show(made: Report, currency: str) -> None:
    console.print(summary(made, currency))
    parts = [("scheduling", made.scheduling), ("runtime", made.runtime), ("program (MFU)", made.mfu)]
    console.print("goodput: " + " × ".join(f"{name} {percent(share)}" for name, share in parts))
    priced = made.cost is not None
    shares: list[Row] = [
        {
            "class": each.name,
            "time": span(each.seconds),
            "share": percent(each.share),
            "cost": money(each.cost or 0, currency),
        }
        for each in made.shares
    ]
    console.print(table(shares, ("class", "time", "share", *(("cost",) if priced else ()))))
    for title, groups in (("by kind", made.by_kind), ("by node", made.by_node)):
        if groups:
            columns = ("name", "faults", "MTBF", "MTTR", "longest", "steps again", *(("cost",) if priced else ()))
            console.print(table([_row(each, currency) for each in groups], columns, title=f"\nfaults {title}"))
    if made.comparison is not None:
        console.print(f"\n{compared(made.comparison, currency)}")
    for note in made.notes:
        console.print(f"note: {note}")


def _row(each: Faults, currency: str) -> Row:
    return {
        "name": each.name,
        "faults": each.count,
        "MTBF": span(each.mtbf_s or 0.0),
        "MTTR": "" if each.mttr_s is None else span(each.mttr_s),
        "longest": "" if each.longest_s is None else span(each.longest_s),
        "steps again": each.rework_steps,
        "cost": money(each.cost or 0.0, currency),
    }
