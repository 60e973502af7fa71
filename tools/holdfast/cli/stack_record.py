"""The record of a stack, with which the next stack of the same directory takes it over if its starter was killed.

<directory>/stack.json                 how it was started, the name of the directory, memory tiers, where services listen
<directory>/<service>/<service>.pid    of each process, written by itself (`holdfast.runtime.processes.survivors`)
<directory>/nodes/<node>/agent.pid
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.runtime.files import write_whole
from holdfast.runtime.processes.survivors import Survivor, find

FILE = "stack.json"
SERVICES = ("diagnostics", "supervisor")


@dataclass(frozen=True, slots=True)
class StackRecord:
    """`flags`: option of `holdfast up` → value. Processes with other values cannot be taken over."""

    flags: Mapping[str, Any]
    path: str
    memory: str
    endpoints: Mapping[str, Mapping[str, str]]

    def write(self, directory: Path) -> None:
        write_whole(directory / FILE, json.dumps(asdict(self), indent=1).encode())


def read(directory: Path) -> StackRecord | None:
    """Return the record; None if it does not exist or cannot be read."""
    try:
        return StackRecord(**json.loads((directory / FILE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def forget(directory: Path) -> None:
    """Delete the record of a stopped stack."""
    (directory / FILE).unlink(missing_ok=True)


def pid_file(directory: Path, part: str) -> Path:
    """Return the pid file of a service or of a node's agent."""
    return directory / part / f"{part}.pid" if part in SERVICES else directory / "nodes" / part / "agent.pid"


def survivors(directory: Path) -> dict[str, Survivor]:
    """Return the running processes of a stack whose starter was killed, by service or node, without Redis."""
    nodes = directory / "nodes"
    parts = (*SERVICES, *(sorted(path.name for path in nodes.iterdir()) if nodes.is_dir() else ()))
    found = {part: find(pid_file(directory, part)) for part in parts}
    return {part: survivor for part, survivor in found.items() if survivor is not None}
