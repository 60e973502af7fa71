"""How lists and single things are shown: one table style, `--json` everywhere, and `watch` as a table that stays up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

WATCH_S = 0.5
STATE_STYLE = {
    "running": "green",
    "active": "green",
    "completed": "green",
    "resolved": "green",
    "spare": "cyan",
    "preparing": "yellow",
    "starting": "yellow",
    "pending": "yellow",
    "waiting": "yellow",
    "open": "yellow",
    "decided": "yellow",
    "stopping": "yellow",
    "cordoned": "magenta",
    "failed": "red",
    "lost": "red",
}

Api = Annotated[str, typer.Option(help="The API to ask.", envvar="HOLDFAST_API", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

Row = Mapping[str, Any]
console = Console(highlight=False)


def text(value: Any) -> str:
    """A cell: seconds with two digits, lists joined, nothing as a dash."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, dict):
        return " × ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(text(item) for item in value)
    style = STATE_STYLE.get(str(value))
    return f"[{style}]{value}[/]" if style else str(value)


def table(rows: Iterable[Row], columns: Sequence[str], title: str = "") -> Table:
    """`columns` are keys of the rows; "a.b" reaches into an object."""
    result = Table(box=None, pad_edge=False, title=title or None, title_justify="left", header_style="bold")
    for column in columns:
        result.add_column(column.split(".")[-1].replace("_", " "), overflow="fold")
    for row in rows:
        result.add_row(*(text(_reach(row, column)) for column in columns))
    return result


def show_list(rows: Iterable[Row], columns: Sequence[str], as_json: bool, empty: str) -> None:
    items = list(rows)
    if as_json:
        print(json.dumps(items, indent=2))
    elif items:
        console.print(table(items, columns))
    else:
        console.print(f"[dim]{empty}[/]")


def show_one(row: Row, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dict(row), indent=2))
        return
    result = Table(box=None, pad_edge=False, show_header=False)
    result.add_column(style="bold")
    result.add_column(overflow="fold")
    for key, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            result.add_row(key.replace("_", " "), table(value, list(value[0])))
        else:
            result.add_row(key.replace("_", " "), text(value))
    console.print(result)


def watch(rows: Callable[[], Iterable[Row]], columns: Sequence[str]) -> None:
    """Keep the table on the screen until Ctrl-C."""
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(table(rows(), columns), refresh=True)
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            return


def _reach(row: Row, column: str) -> Any:
    value: Any = row
    for key in column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
