"""Output of lists and single objects: one table style, `--json`, and `watch` as a live table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from holdfast.cli.client import Client
from holdfast.cli.completion import names
from holdfast.cli.listing import EMPTY, Fields, Listing, screen
from holdfast.cli.local_runs import api_url
from holdfast.domain.errors import InvalidSpec

WATCH_S = 0.5
WATCHED_ROWS_MAX = 200
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
    "suspended": "yellow",
    "open": "yellow",
    "decided": "yellow",
    "stopping": "yellow",
    "cordoned": "magenta",
    "unknown": "magenta",
    "failed": "red",
    "left": "dim",
    "lost": "red",
    "delete": "red",
}

Api = Annotated[str, typer.Option(help="URL of the Holdfast API.", envvar="HOLDFAST_API", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Where = Annotated[
    list[str],
    typer.Option(
        metavar="FIELD=VALUE", help="Only rows with this value, such as state=lost. Repeated: with all of them."
    ),
]

Name = Annotated[str, typer.Argument(help="Name, as `list` shows it.", autocompletion=names)]

Row = Mapping[str, Any]
console = screen()


def markup(line: str) -> Text:
    """Parse a line of markup; text from other sources must be escaped."""
    return Text.from_markup(line, emoji=False)


def text(value: Any, name: str = "") -> str:
    """Format a cell as markup: times as local time, floats with two decimals (a loss: four digits), lists joined, empty
    values as a dash."""
    if value is None or value in ("", [], {}):
        return EMPTY
    if isinstance(value, float) and _is_moment(name):
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S.%f")[:-4]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if name == "loss" else f"{value:.2f}"
    if isinstance(value, dict) and name == "mesh":
        return mesh(value)
    if isinstance(value, dict):
        return "\n".join(f"[dim]{escape(str(key))}[/] {_inline(item, str(key))}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(text(item) for item in value)
    style = STATE_STYLE.get(str(value))
    return f"[{style}]{value}[/]" if style else escape(str(value))


def _inline(value: Any, name: str) -> str:
    """Format one line inside a cell."""
    if isinstance(value, dict) and name != "mesh":
        return ", ".join(f"{escape(str(key))} {text(item, str(key))}" for key, item in value.items()) or EMPTY
    return text(value, name)


def mesh(dims: Mapping[str, int]) -> str:
    """`dp 3 × pp 3`, outermost first."""
    return " × ".join(f"{name} {size}" for name, size in dims.items())


def _is_moment(name: str) -> bool:
    """Return whether a field of the API is a time in Unix seconds, judged by its name."""
    return name == "at" or name.endswith(("since", "_at", "_until"))


def table(rows: Iterable[Row], columns: Sequence[str], title: str = "") -> Listing:
    """Build a table. `columns` are keys of the rows; "a.b" is a nested key, "a?" is left out if no row has a value. Columns
    with sentences come last."""
    rows = list(rows)
    used = (column for column in columns if not column.endswith("?") or any(_reach(row, column[:-1]) for row in rows))
    columns = [column.removesuffix("?") for column in used]
    names = tuple(column.split(".")[0].replace("_", " ") for column in columns)
    cells = (tuple(markup(text(_reach(row, column), column)) for column in columns) for row in rows)
    return Listing(names, tuple(cells), title)


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
    console.print(Fields(tuple((key.replace("_", " "), _field(value, key)) for key, value in row.items())))


def _field(value: Any, name: str) -> Listing | Text:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return table(value, list(value[0]))
    return markup(text(value, name))


def look_at(
    app: typer.Typer,
    *,
    rows: Callable[[Client], Iterable[Row]],
    row: Callable[[Client, str], Row],
    columns: Sequence[str],
    thing: str,
    empty: str,
    show: Callable[[Row, bool], None] = show_one,
) -> None:
    """Add the commands `list`, `show NAME` and `watch` to `app`. `thing`: what a row is, such as job."""

    @app.command("list", help=f"List the {thing}s.")
    def list_all(where: Where = [], api: Api = "", as_json: AsJson = False) -> None:  # noqa: B006 (not changed)
        with Client(api or api_url()) as client:
            none = "none of them" if where else empty
            show_list(selected(rows(client), where), columns, as_json, none)

    @app.command("show", help=f"Show the details of one {thing}.")
    def show_named(name: Name, api: Api = "", as_json: AsJson = False) -> None:
        with Client(api or api_url(name)) as client:
            show(row(client, name), as_json)

    @app.command("watch", help=f"List the {thing}s, and update the list until Ctrl-C.")
    def watch_all(where: Where = [], api: Api = "") -> None:  # noqa: B006 (not changed)
        with Client(api or api_url()) as client:
            watch(lambda: selected(rows(client), where), columns)


def selected(rows: Iterable[Row], where: Sequence[str]) -> Iterator[Row]:
    """The rows whose fields have these values, as lists show them. Raises `InvalidSpec` for a condition that names no field."""
    wanted = [(condition, *condition.partition("=")) for condition in where]
    for row in rows:
        for condition, field, separator, _ in wanted:
            if not separator or field not in row:
                raise InvalidSpec("--where", condition, f"FIELD=VALUE; fields: {', '.join(row)}")
        if all(markup(text(row[field], field)).plain == (value or EMPTY) for _, field, _, value in wanted):
            yield row


def watch(rows: Callable[[], Iterable[Row]], columns: Sequence[str]) -> None:
    """Show the table and update it until Ctrl-C; on a pipe, print it after each change."""

    def first() -> tuple[list[Row], str]:
        found = list(islice(rows(), WATCHED_ROWS_MAX + 1))
        return found[:WATCHED_ROWS_MAX], f"the first {WATCHED_ROWS_MAX} of more" if found[WATCHED_ROWS_MAX:] else ""

    def listing(rows: Iterable[Row], title: str) -> Listing:
        return table(rows, columns, title)

    try:
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(listing(*first()), refresh=True)
                    time.sleep(WATCH_S)
        shown: tuple[list[Row], str] | None = None
        while True:
            if (now := first()) != shown:
                shown = now
                console.print(listing(*now))
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        return


def _reach(row: Row, column: str) -> Any:
    value: Any = row
    for key in column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
