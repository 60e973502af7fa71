"""Shell completion of the names of jobs and nodes, from the API. `holdfast --install-completion` sets it up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

import typer

from holdfast.cli.client import Client
from holdfast.cli.local_runs import api_url
from holdfast.domain.errors import HoldfastError, Unavailable

# word of the command → the method that lists the objects, and the column with the name
_ROWS: Final[Mapping[str, tuple[Callable[[Client], Iterable[Mapping[str, Any]]], str]]] = {
    "jobs": (Client.jobs, "name"),
    "logs": (Client.jobs, "name"),
    "nodes": (Client.nodes, "node"),
}


def names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names that begin with `incomplete`; none if the API does not answer at once. Completion prints no error."""
    found = next((rows for word, rows in _ROWS.items() if word in context.command_path.split()), None)
    if found is None:
        return []
    rows, column = found
    try:
        with Client(context.params.get("api") or api_url(say=_quiet), sleep=_give_up) as client:
            return sorted(str(row[column]) for row in rows(client) if str(row[column]).startswith(incomplete))
    except HoldfastError:
        return []


def _quiet(_text: str) -> None:
    return


def _give_up(_seconds: float) -> NoReturn:
    raise Unavailable("no leader yet, and the user waits at the prompt")
