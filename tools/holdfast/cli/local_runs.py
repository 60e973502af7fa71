"""The APIs of jobs that `holdfast run` has started a local stack for, so that commands in another terminal find them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from rich.console import Console

from holdfast.cli.client import Client
from holdfast.cli.connection import ENV_API, NoApi, default_url
from holdfast.domain.errors import HoldfastError, Unavailable

RUNS = Path("~/.local/state/holdfast/runs")  # a local stack uses the subdirectory with the job's name
CONNECT_TIMEOUT_S = 0.5
DIRECTORIES_MAX = 200  # newest first; older runs are assumed to have ended


def api_url(job: str = "", *, say: Callable[[str], None] | None = None) -> str:
    """Return HOLDFAST_API if it is set; otherwise the default URL if something listens there, or else the API of the local run
    of `job`, or of the only local run of this user.

    `say` reports which local run was chosen; by default on standard error. Raises `Unavailable` if several local runs match.
    """
    url = default_url()
    if ENV_API in os.environ or _listens(url):
        return url
    found = running()
    if job in found:
        return found[job]
    if len(found) > 1:
        each = ", ".join(f"{name} at {at}" for name, at in found.items())
        raise Unavailable(
            f"no Holdfast API answers at {url}, and {len(found)} local runs do: choose one of {each} with --api URL or "
            f"{ENV_API}"
        )
    for name, at in found.items():
        (say or _note)(f"the local run {name}, at {at}")
        return at
    return url


def running(runs: Path = RUNS) -> dict[str, str]:
    """Return name → URL of the local runs of this user whose API answers, newest first."""
    found: dict[str, str] = {}
    for ready in _newest(runs.expanduser().glob("*/supervisor/ready.json")):
        url = _announced(ready)
        if url and url not in found.values() and _is_holdfast(url):
            found[ready.parent.parent.name] = url
    return found


def _newest(paths: Iterable[Path]) -> list[Path]:
    dated = []
    for path in paths:
        try:
            dated.append((path.stat().st_mtime, path))
        except OSError:
            continue
    return [path for _, path in sorted(dated, reverse=True)[:DIRECTORIES_MAX]]


def _announced(ready: Path) -> str:
    try:
        return str(json.loads(ready.read_text())["api"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _is_holdfast(url: str) -> bool:
    if not _listens(url):
        return False
    try:
        with Client(url, token="", sleep=_give_up) as client:
            client.version()
    except NoApi:
        return False
    except HoldfastError:
        pass  # the stack has no leader at the moment
    return True


def _listens(url: str) -> bool:
    try:
        parts = urlsplit(url)
        with socket.create_connection(
            (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), CONNECT_TIMEOUT_S
        ):
            return True
    except (OSError, ValueError):
        return False


def _give_up(_seconds: float) -> NoReturn:
    raise Unavailable("no leader yet, and the list of local runs must not wait for one")


def _note(text: str) -> None:
    Console(stderr=True, highlight=False, emoji=False).print(f"[dim]{text}[/]", soft_wrap=True)
