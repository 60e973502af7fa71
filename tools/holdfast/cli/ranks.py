"""`holdfast jobs ranks`: the ranks of a job, the slowest, the hottest or the worst state first."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from holdfast.cli.client import Client
from holdfast.cli.local_runs import api_url
from holdfast.cli.tables import Api, AsJson, Name, Row, console, table
from holdfast.domain.words import plural

COLUMNS = ("rank", "node", "state", "step_s", "own_s", "wait_s", "temperature_c")
WORST_FIRST = ("lost", "absent", "suspect", "unreported", "starting", "alive")

Json = Mapping[str, Any]


class By(StrEnum):
    OWN = "own-step-time"
    STEP = "step-time"
    TEMPERATURE = "temperature"
    STATE = "state"


_NUMBER: Mapping[By, str] = {By.OWN: "own_s", By.STEP: "step_s", By.TEMPERATURE: "temperature_c"}


def register(app: typer.Typer) -> None:
    app.command("ranks", epilog="Example: holdfast jobs ranks llm --by temperature --limit 8")(ranks)


def ranks(
    name: Name,
    by: Annotated[
        By,
        typer.Option(help="What comes first: the largest value, or the worst state. Own step time: without waiting."),
    ] = By.OWN,
    limit: Annotated[int, typer.Option("--limit", "-n", help="Number of ranks; 0 = all.", min=0)] = 16,
    as_json: AsJson = False,
    api: Api = "",
) -> None:
    """Show the slowest, hottest or worst ranks of a job. The agents of its nodes are asked for what they measure now.

    All ranks of a synchronous job need the same time for a step: a slow rank is the one that waits least for the others."""
    with Client(api or api_url(name)) as client:
        columns, measured = client.ranks(name), client.rank_measurements(name)
    rows = in_order(rows_of(columns, measured), by)
    shown = rows[:limit] if limit else rows
    if as_json:
        print(json.dumps(shown, indent=2))
        return
    if not rows:
        console.print(f"{name}: no rank is placed")
        return
    console.print(table([_in_words(row) for row in shown], COLUMNS))
    for line in notes(rows, shown, measured, by):
        console.print(line)


def rows_of(columns: Json, measured: Json) -> list[Row]:
    """Return one row per rank. Measurements of another generation than that of the columns are ignored."""
    same = measured["generation"] == columns["generation"]

    def known(column: str, rank: int) -> float | None:
        values = measured[column] if same else ()
        return values[rank] if rank < len(values) else None

    rows: list[Row] = []
    for rank, (node, state) in enumerate(zip(columns["node"], columns["state"], strict=True)):
        step_s, wait_s = known("step_s", rank), known("wait_s", rank)
        rows.append({
            "rank": rank,
            "node": columns["nodes"][node],
            "state": columns["states"][state],
            "step_s": step_s,
            "own_s": None if step_s is None or wait_s is None else max(0.0, step_s - wait_s),
            "wait_s": wait_s,
            "temperature_c": known("temperature_c", rank),
        })  # fmt: skip
    return rows


def in_order(rows: Sequence[Row], by: By) -> list[Row]:
    """The largest value or the worst state first, then by rank. Ranks whose value is not known come last."""
    key: Callable[[Row], tuple[float, int]]
    if by is By.STATE:
        key = lambda row: (WORST_FIRST.index(row["state"]), row["rank"])  # noqa: E731
    else:
        value = _NUMBER[by]
        key = lambda row: (float("inf") if row[value] is None else -row[value], row["rank"])  # noqa: E731
    return sorted(rows, key=key)


def notes(rows: Sequence[Row], shown: Sequence[Row], measured: Json, by: By) -> list[str]:
    """Return notes below the table: which ranks were left out, and which values are not known."""
    lines = []
    if len(shown) < len(rows):
        lines.append(f"{plural(len(rows) - len(shown), 'more rank')}; --limit 0 shows all")
    if measured["answered"] < measured["nodes"]:
        answered, nodes = measured["answered"], plural(measured["nodes"], "node")
        lines.append(
            f"{answered:,} of {nodes} have answered; of the others nothing is known. A large job is asked in parts: repeat the "
            "command after 5 s for the next part"
        )
    if by in _NUMBER and rows and all(row[_NUMBER[by]] is None for row in rows):
        lines.append(f"no {by.replace('-', ' ')} is known: {_WHY[by]}")
    return lines


_WHY: Mapping[By, str] = {
    By.OWN: "the ranks measure no waiting for others, or have not finished a step; see --by step-time",
    By.STEP: "no rank has finished a step, or the script reports none",
    By.TEMPERATURE: "the nodes have no GPUs whose values their agents can read",
}


def _in_words(row: Row) -> Row:
    seconds = {name: "" if row[name] is None else f"{row[name]:.3f}" for name in ("step_s", "own_s", "wait_s")}
    temperature = row["temperature_c"]
    return {**row, **seconds, "temperature_c": "" if temperature is None else f"{temperature:.0f}"}
