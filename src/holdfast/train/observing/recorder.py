"""Makes this rank's flight recorder readable from outside while the rank itself hangs.

torch records every collective in C++ (`FlightRecorder.hpp`), and serves the records from C++ threads (`_WorkerServer`), which
answer while Python's interpreter lock is held. The agent queries them after the rank has been silent for a while. torch does
not record the members of a group for every backend, so they are sent in a worker message, once for each new group. If torch
has no such server, the agent uses only the state of the process."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from holdfast.domain.collectives import compact
from holdfast.train.channels import Notes

log = logging.getLogger("holdfast.train")

SERVES_TIMEOUT_S = 1.0
GROUPS_MAX = 256  # reported per rank; a job with four mesh dimensions has about thirty


class Recorder:
    """Serves the recorder after `open`. An empty `path` means that there is no agent to query it."""

    def __init__(self, path: str, notes: Notes) -> None:
        self._path = path
        self._served = ""  # the path, once it is served
        self._notes = notes
        self._groups_reported = 0
        self._server: Any = None

    def open(self) -> None:
        """Start serving when the process group exists; before that there are no records. A second call does nothing."""
        if self._path and dist.is_initialized():
            self._served, self._path = self._path, ""
            self._server = _serve(self._served)

    def tell_groups(self) -> None:
        """Report the members of new groups. Called between steps; costs one comparison if there are none."""
        self.open()
        if self._server is None or not dist.is_initialized():
            return
        try:
            count = len(distributed_c10d._world.pg_map)
            if count != self._groups_reported:
                self._groups_reported = count
                self._notes.groups(_members())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # These tables are private to torch and may differ in another release, which must not end the run.
            log.warning("cannot read process groups from this torch (%r): hangs are diagnosed without them", error)
            self.close()

    def close(self) -> None:
        if self._server is not None:
            _wait_until_it_serves(self._served)
            self._server.shutdown()
            self._server = None


def _wait_until_it_serves(path: str) -> None:
    """Wait until the server's loop runs: torch (2.13) loses an earlier shutdown and then waits for the loop indefinitely."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SERVES_TIMEOUT_S)
        client.connect(path)
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        client.recv(1)


def _serve(path: str) -> Any:
    """Start torch's server on a Unix socket. Returns None and logs the reason if that fails."""
    try:
        from torch._C._distributed_c10d import _WorkerServer

        with suppress(FileNotFoundError):
            Path(path).unlink()
        return _WorkerServer(path)
    except (ImportError, RuntimeError, OSError) as error:
        log.info(
            "the flight recorder cannot be read from outside (%s): hangs are diagnosed from processes alone", error
        )
        return None


def _members() -> dict[str, str]:
    """Return the global ranks of each group, by the recorder's name of the group."""
    world = distributed_c10d._world
    named = [(name, world.pg_group_ranks.get(group)) for group, name in list(world.pg_names.items())[:GROUPS_MAX]]
    return {name: compact(sorted(ranks, key=ranks.__getitem__)) for name, ranks in named if ranks}
