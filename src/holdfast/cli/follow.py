"""Follow one job until it ends: the live view, what the chosen ranks print, and an exit code."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.cli.client import Client
from holdfast.cli.live import JobDisplay

POLL_S = 0.2
READ_BYTES_MAX = 64 * 1024
ENDED = {"completed": 0, "stopped": 1, "failed": 1}


def follow(client: Client, name: str, console: Console, *, tee: frozenset[int] = frozenset()) -> int:
    """Returns 0 when the job completes, 1 when it fails or is stopped."""
    logs = LogTail(client, name, tee)
    seen: set[tuple[str, str]] = set()
    with JobDisplay(console) as display:
        while True:
            job = client.job(name)
            display.update(job, list(client.nodes()))
            for line in logs.lines(job):
                display.print(line)
            for line in _news(client, name, seen):
                display.say(line)
            if (code := ENDED.get(job["phase"])) is not None:
                break
            time.sleep(POLL_S)
    console.print(f"[bold]{name}[/] {job['phase']}: {job['reason']}")
    return code


def _news(client: Client, name: str, seen: set[tuple[str, str]]) -> Iterator[str]:
    for incident in reversed(list(client.incidents(name))):
        if (key := (incident["id"], incident["state"])) in seen:
            continue
        seen.add(key)
        yield describe(incident)


def describe(incident: Mapping[str, Any]) -> str:
    """One line of news about an incident as it stands."""
    action = incident.get("action") or {}
    match incident["state"]:
        case "open":
            return f"[yellow]found[/]     {incident['cause']}"
        case "resolved" if incident.get("t_first_step"):
            took = incident["t_first_step"] - incident["t_fault"]
            return f"[green]resolved[/]  {incident['cause']}: {action.get('kind', '')}, {took:.2f} s from fault to first step"
        case "failed":
            return f"[red]stopped[/]   {incident['cause']}: {action.get('reason', '')}"
        case state:
            return f"[yellow]{state:9}[/] {action.get('kind', '')}: {action.get('reason', incident['cause'])}"


class LogTail:
    """The output of some ranks, read from the agents' log files when the nodes are on this machine."""

    def __init__(self, client: Client, job: str, ranks: frozenset[int]) -> None:
        self._client = client
        self._job = job
        self._ranks = ranks
        self._positions: dict[Path, int] = {}
        self._partial: dict[Path, bytes] = {}
        self._directories: dict[str, Path] = {}

    def lines(self, job: Mapping[str, Any]) -> Iterator[str]:
        for worker in job["ranks"]:
            if worker["rank"] in self._ranks:
                path = self._path(worker["node"], job["generation"], worker["rank"])
                prefix = f"[rank{worker['rank']}] "
                yield from (prefix + line for line in self._read(path))

    def _path(self, node: str, generation: int, rank: int) -> Path:
        if node not in self._directories:
            self._directories[node] = Path(self._client.node(node)["directory"])
        return self._directories[node] / "logs" / self._job / f"g{generation}" / f"rank-{rank}.log"

    def _read(self, path: Path) -> Iterator[str]:
        try:
            with path.open("rb") as log:
                log.seek(self._positions.get(path, 0))
                raw = log.read(READ_BYTES_MAX)
        except FileNotFoundError:  # on another machine, or not written yet
            return
        self._positions[path] = self._positions.get(path, 0) + len(raw)
        *whole, self._partial[path] = (self._partial.get(path, b"") + raw).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
