"""How commands are left: Ctrl-C, SIGTERM, a plain file where a terminal was expected. Nothing stays that should not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from commands import Shell, read_until
from leftovers import memory_of
from training import WarmStack
from waiting import TIMEOUT_S, wait_until

from holdfast.cli.client import Client
from holdfast.cli.connection import NoApi
from holdfast.cli.stack_options import StackOptions

PORTS = ["--port", "0", "--control-port", "0", "--diagnostics-port", "0"]


def test_leaving_a_job_that_runs_elsewhere_leaves_it_running(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with WarmStack(StackOptions(directory=tmp_path / "stack")) as stack:
        shell = Shell(tmp_path, stack.for_commands)
        with shell.start("run", "--name", "remote", "train.py") as process:
            read_until(process, "remote submitted to")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130, out + err
        assert "remote continues to run. To stop it: holdfast jobs stop remote" in " ".join(out.split())
        assert "Traceback" not in err
        with Client(stack.api_url) as client:
            assert client.job("remote")["phase"] not in ("stopped", "failed", "stopping")
            assert shell("jobs", "stop", "remote", "--now", "--reason", "enough").code == 0
            wait_until(lambda: client.job("remote")["phase"] == "stopped", description="the stop")
            assert "enough" in client.job("remote")["reason"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stack_is_left_in_order(tmp_path: Path, number: signal.Signals) -> None:
    shell = Shell(tmp_path)
    with shell.start_python("-m", "holdfast.cli.main", "up", "--dir", "up", "--nodes", "1", *PORTS) as process:
        url = read_until(process, r"API\s+(http://\S+)")[1]
        mine = memory_of(process.pid)
        process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == (130 if number is signal.SIGINT else 0), out + err
    assert "Traceback" not in err
    shell.assert_nothing_runs()
    assert mine, "the node had no memory tier"
    assert not [path for path in mine if path.exists()]
    assert not (tmp_path / "up" / "stack.pid").exists()
    assert not (tmp_path / "up" / "stack.sock").exists()
    with Client(url) as client, pytest.raises(NoApi):
        client.version()


SCRIPT = """
import pathlib, time
pathlib.Path("began").touch()
while not pathlib.Path("finish").exists():
    time.sleep(0.02)
"""


def test_a_run_on_a_stack_of_its_own_outlives_its_services(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shell = Shell(tmp_path)
    with shell.start("run", "--local", "train.py") as process:
        wait_until((tmp_path / "began").exists, description="the run to begin")
        for service in ("diagnostics", "supervisor"):
            (found,) = [each for each in shell.processes() if f"holdfast.{service}" in each.cmdline()]
            found.kill()
            read_until(process, f"{service} restarted")
        (tmp_path / "finish").touch()
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, out + err
    assert "completed" in out
    shell.assert_nothing_runs()
