"""`holdfast up` when parts of it are killed, and when it is killed itself: runs go on, and nothing stays dead."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from commands import MEMORY, Shell, read_until, refused
from waiting import TIMEOUT_S, wait_until

from holdfast.cli import api_token
from holdfast.cli.client import Client
from holdfast.cli.connection import NoApi
from holdfast.domain.distribution import DISTRIBUTION
from holdfast.domain.errors import Unavailable

PORTS = ["--port", "0", "--control-port", "0", "--diagnostics-port", "0"]
START_TIMEOUT_S = 120.0
SCRIPT = """
import pathlib, sys, time
beats = pathlib.Path(sys.argv[1])
while True:
    with beats.open("a") as file:
        file.write(".")
    time.sleep(0.02)
"""


class Up:
    """A running `holdfast up`, and all that it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def wait_said(self, *parts: str) -> None:
        def all_said() -> bool:
            assert self.process.poll() is None, f"it has ended:\n{self.said}\n{self.errors()}"
            return all(part in self.said for part in parts)

        wait_until(all_said, description=f"{parts} in what it says", timeout_s=START_TIMEOUT_S)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait(TIMEOUT_S)
        self._reader.join()


@dataclass
class Run:
    """One job on one node under `holdfast up`, from a directory of its own."""

    shell: Shell
    root: Path
    stack: ExitStack
    up: Up
    flags: tuple[str, ...]

    @property
    def client(self) -> Client:
        record = json.loads((self.root / "up" / "stack.json").read_text())
        token = api_token.read(self.root / "up" / api_token.FILE)
        return Client(record["endpoints"]["supervisor"]["api"], token=token)

    def pid_of(self, part: str) -> int:
        if part == "redis":
            return redis_pid(self.root / "up")
        place = self.root / "up" / ("nodes/node-0/agent.pid" if part == "node-0" else f"{part}/{part}.pid")
        return int(place.read_text().split()[0])

    def start_again(self, *flags: str) -> None:
        self.up = Up(self.stack.enter_context(self.shell.start("up", "--dir", "up", *(flags or self.flags))))

    def job(self) -> dict[str, Any]:
        """As soon as somebody answers."""

        def answer() -> dict[str, Any] | None:
            try:
                with self.client as client:
                    return dict(client.job("steady"))
            except (NoApi, Unavailable):
                return None

        return wait_until(answer, description="the API to answer", timeout_s=START_TIMEOUT_S)

    def worker(self) -> int:
        return int(
            wait_until(
                lambda: next((each["pid"] for each in self.job()["ranks"] if each["pid"]), None),
                description="the worker's pid",
                timeout_s=START_TIMEOUT_S,
            )
        )

    def beats(self) -> int:
        return (self.root / "beats").stat().st_size

    def goes_on(self) -> None:
        before = self.beats()
        wait_until(lambda: self.beats() > before + 3, description="the worker to go on")


def redis_pid(directory: Path) -> int:
    with redis.Redis(unix_socket_path=str(directory / "redis" / "redis.sock")) as client:
        return int(client.info("server")["process_id"])


@contextmanager
def leaving_nothing(root: Path) -> Iterator[Shell]:
    """A shell; what its commands leave is ended by pid, since nothing of it is tied to them."""
    shell = Shell(root)
    try:
        yield shell
    finally:
        with suppress(redis.ConnectionError):  # it has overwritten its environment, and with it our mark
            psutil.Process(redis_pid(root / "up")).kill()
        for process in shell.processes():
            process.kill()
        shell.assert_nothing_runs()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The run that all faults of this module happen to, one after the other."""
    root = tmp_path_factory.mktemp("up")
    (root / "train.py").write_text(SCRIPT)
    flags = ("--nodes", "1", *PORTS)
    with leaving_nothing(root) as shell, ExitStack() as stack:
        up = Up(stack.enter_context(shell.start("up", "--dir", "up", *flags)))
        up.wait_said("Ctrl-C stops everything")
        run = Run(shell, root, stack, up, flags)
        with run.client as client:
            job = {"name": "steady", "script": str(root / "train.py"), "args": [str(root / "beats")]}
            client.submit({**job, "nodes": 1, "nproc_per_node": 1, "mesh": {"dp": 1}})
        wait_until((root / "beats").exists, description="the worker to begin", timeout_s=START_TIMEOUT_S)
        yield run


@pytest.mark.parametrize(
    ("part", "name"), [("supervisor", "supervisor"), ("diagnostics", "diagnostics"), ("redis", "Redis")]
)
def test_a_service_that_is_killed_is_started_again_and_the_run_goes_on(run: Run, part: str, name: str) -> None:
    worker, before, generation = run.worker(), run.pid_of(part), run.job()["generation"]
    psutil.Process(before).kill()
    run.up.wait_said(f"{name} was killed by SIGKILL; restarting", f"{name} restarted")
    wait_until(lambda: run.pid_of(part) != before, description=f"another {name}")
    run.goes_on()
    assert (run.worker(), run.job()["generation"]) == (worker, generation)


def test_the_versions_of_all_services_are_shown(run: Run) -> None:
    def shown() -> set[str]:
        with run.client as client:
            node = client.node("node-0")
        return {node["version"], node["diagnostics_version"], node["replicator_version"]}

    own = {importlib.metadata.version(DISTRIBUTION)}
    wait_until(lambda: shown() == own, description="one version of all services", timeout_s=START_TIMEOUT_S)


@pytest.mark.parametrize(
    ("part", "then"), [("diagnostics", "it will be replaced after 30 s"), ("node-0", "its workers would exit with it")]
)
def test_a_part_that_stands_still_is_named_and_the_run_goes_on(run: Run, part: str, then: str) -> None:
    worker, pid, generation = run.worker(), run.pid_of(part), run.job()["generation"]
    psutil.Process(pid).suspend()
    try:
        run.up.wait_said(f"{part} (pid {pid}) is stopped by a signal", then)
        run.goes_on()
    finally:
        psutil.Process(pid).resume()
    run.up.wait_said(f"{part} runs again after")
    run.goes_on()
    assert (run.worker(), run.job()["generation"], run.pid_of(part)) == (worker, generation, pid)


def test_an_agent_of_another_fleet_is_refused_and_says_so(run: Run, tmp_path: Path) -> None:
    """Two fleets of the same name on one host, and an agent that is configured with the port of the other one."""
    token = run.root / "up" / "join-token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    (tmp_path / "theirs").write_text("the-token-of-another-fleet")
    run.up.wait_said(f"--join-token-file {token}")
    command = re.search("holdfast (agent --supervisor .*) --join-token-file", run.up.said)
    assert command is not None
    # no telemetry may be counted for the node, whose name is that of a real one
    flags = ("--node", "node-0", "--dir", str(tmp_path), "--memory", str(tmp_path), "--no-preflight")
    worker, generation = run.worker(), run.job()["generation"]
    arguments = (*command[1].split(), *flags, "--kernel-log", os.devnull, "--capacity", "1")
    for more in ((), ("--join-token-file", str(tmp_path / "theirs"))):
        with run.shell.start(*arguments, *more) as agent:
            line = read_until(agent, "control session (refused|failed)", errors=True)
            assert "join token" in line.string
            agent.terminate()
            agent.wait(TIMEOUT_S)
    log = (run.root / "up" / "supervisor" / "supervisor.log").read_text()
    assert "agent of another fleet refused" in log
    assert token.read_text() not in log
    run.goes_on()
    assert (run.worker(), run.job()["generation"]) == (worker, generation)


def test_a_killed_up_leaves_everything_running_and_the_next_takes_it_over(run: Run) -> None:
    parts = ("supervisor", "diagnostics", "redis", "node-0")
    worker, before = run.worker(), {part: run.pid_of(part) for part in parts}
    run.up.end(signal.SIGKILL)
    run.goes_on()
    assert run.worker() == worker, "the API answers without it"
    refused(run.shell("up", "--dir", "up", "--nodes", "2", *PORTS), "was started with --nodes 1", "node-0 (pid")
    run.goes_on()
    run.start_again()
    run.up.wait_said("took over", "Ctrl-C stops everything")
    assert {part: run.pid_of(part) for part in parts} == before
    run.goes_on()
    assert run.worker() == worker


def test_what_died_together_with_up_is_started_where_it_was_and_the_rest_taken_over(run: Run) -> None:
    worker, agent, generation = run.worker(), run.pid_of("node-0"), run.job()["generation"]
    run.up.end(signal.SIGKILL)
    for part in ("supervisor", "diagnostics", "redis"):
        psutil.Process(run.pid_of(part)).kill()
    run.start_again()
    run.up.wait_said("took over node-0", "Ctrl-C stops everything")
    run.goes_on()
    assert (run.worker(), run.pid_of("node-0"), run.job()["generation"]) == (worker, agent, generation)


def test_an_agent_that_is_killed_is_started_again_and_its_ranks_come_back(run: Run) -> None:
    before, worker = run.pid_of("node-0"), run.worker()
    psutil.Process(before).kill()
    run.up.wait_said("node-0 has exited; restarting")
    wait_until(lambda: run.job()["phase"] == "running" and run.worker() != worker, description="a new worker")
    run.goes_on()


def test_a_part_that_ends_again_and_again_is_named_with_its_log_and_the_run_goes_on(run: Run) -> None:
    worker = run.worker()
    history = run.root / "up" / "supervisor" / "history.sqlite3"
    assert history.exists()
    for path in history.parent.glob("history.sqlite3*"):
        path.unlink()
    history.mkdir()
    psutil.Process(run.pid_of("supervisor")).kill()
    run.up.wait_said("3 times in a row", "supervisor.log", "history.sqlite3")
    assert psutil.Process(worker).is_running()
    run.goes_on()
    history.rmdir()
    assert run.worker() == worker, "it came up as soon as it could"


def test_ctrl_c_ends_what_was_taken_over(run: Run) -> None:
    tiers = [path for path in MEMORY.iterdir() if (path / "node-0").exists() and str(path) in str(_record(run))]
    assert tiers
    run.up.end(signal.SIGKILL)
    run.start_again()
    run.up.wait_said("took over", "Ctrl-C stops everything")
    run.up.end(signal.SIGINT)
    assert run.up.process.returncode == 130, run.up.said
    run.shell.assert_nothing_runs()
    assert not [path for path in tiers if path.exists()]
    assert not (run.root / "up" / "stack.json").exists()


def _record(run: Run) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run.root / "up" / "stack.json").read_text())
    return record
