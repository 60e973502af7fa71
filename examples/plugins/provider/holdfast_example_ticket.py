"""A provider that files a ticket: one JSON document per machine, in the directory $EXAMPLE_TICKETS.

A program that watches the directory buys or boots the machine. Files are written atomically, one per request. For nodes that
jobs lack there is one file per pool, with the number of nodes that the pool should have.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import anyio.to_thread

from holdfast.supervisor.providers import Machine, MoreNodes


class Tickets:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def replace(self, machine: Machine) -> str:
        return await anyio.to_thread.run_sync(self._file, machine.request, machine)

    async def more(self, asked: MoreNodes) -> str:
        return await anyio.to_thread.run_sync(self._file, f"nodes of {asked.pool or 'no pool'}", asked)

    def _file(self, name: str, wanted: Machine | MoreNodes) -> str:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(wanted), indent=2) + "\n")
        partial.rename(path)
        return f"ticket {path.name}"


def build() -> Tickets:
    return Tickets(Path(os.environ["EXAMPLE_TICKETS"]))
