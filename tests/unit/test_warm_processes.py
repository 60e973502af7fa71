"""The process that forks, shared by the test processes of a run: what is left of it when they end."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
import warm_processes
from leftovers import gone
from waiting import wait_until
from warm_processes import COMMANDS, Warm, WarmProcess


def test_forks_end_with_their_connection_and_the_process_with_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_processes, "_directory", lambda: str(tmp_path))
    first, second = Warm(COMMANDS, (), {}), Warm(COMMANDS, (), {})
    with socket.create_server(("127.0.0.1", 0)) as silent, open(os.devnull, "wb") as nothing:
        asked = f"http://127.0.0.1:{silent.getsockname()[1]}"

        def stopped(warm: Warm) -> WarmProcess:
            """A fork that does not end by itself."""
            null = nothing.fileno()
            fork = warm.start(["jobs", "list", "--api", asked], tmp_path, os.environ, null, null)
            fork.send_signal(signal.SIGSTOP)
            return fork

        ends, stays = stopped(first), stopped(second)
        server = psutil.Process(ends.pid).ppid()
        assert psutil.Process(stays.pid).ppid() == server
        first.close()
        wait_until(lambda: gone(ends.pid), description="the end of the fork of a closed connection")
        assert stays.poll() is None
        third = Warm(COMMANDS, (), {})
        assert psutil.Process(stopped(third).pid).ppid() == server
        third.close()
        second.close()
        _, status = os.waitpid(server, 0)  # it is a child of this process, which has started it
        assert os.waitstatus_to_exitcode(status) == 0
        assert gone(stays.pid)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
