"""The local stack: every service of Holdfast as real processes on this machine.

One Redis (embedded unless a URL is given), one diagnostics, one supervisor, and any number of nodes: each node is a real
agent process with its own directory, its own memory tier under /dev/shm and its own kernel-log file, so that it can be
killed whole. Everything is a child of this process and dies with it (PR_SET_PDEATHSIG), whatever ends it.

    <directory>/redis/ diagnostics/ supervisor/     logs and state of the services
    <directory>/nodes/<node>/                       the agent's directory: agent.log, kernel.log, worker logs, disk tier
    /dev/shm/holdfast-stack-<pid>-<id>/<node>/                  the node's memory tier; gone when the node loses power
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from holdfast.cli.claim import Claim
from holdfast.cli.machine_room import MachineRoom
from holdfast.cli.preflight import redis_version
from holdfast.domain.errors import Conflict, NotFound, Unavailable
from holdfast.log.embedded import EmbeddedRedis
from holdfast.runtime.children import tied

SERVICE_START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.02
LOG_TAIL_LINES = 15
MEMORY_ROOT = Path("/dev/shm")
MEMORY_PREFIX = "holdfast-stack-"  # then the pid of the stack, and something random
NODES_MAX = 256  # on one machine: each is an agent, a replicator and a template, half a gigabyte before any worker
WILDCARDS = ("0.0.0.0", "[::]")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """How to build a stack. Ports are 0 = any free one; `nodes` is how many agents to start, 0 = control plane only."""

    directory: Path
    nodes: int = 0
    workers_per_node: int = 1
    zones: int = 3  # failure domains that the nodes are spread over
    redis_url: str = ""
    fleet: str = "main"
    host: str = "127.0.0.1"
    api_port: int = 0
    control_port: int = 0
    diagnostics_port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


class LocalStack:
    """Start with `with LocalStack(options) as stack:`; everything is gone when the block ends, also after Ctrl-C."""

    def __init__(self, options: StackOptions, say: Say = lambda _: None) -> None:
        self._options = options
        self._say = say
        self._directory = options.directory
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._redis: EmbeddedRedis | None = None
        self._machine_room: MachineRoom | None = None
        self._memory_root: Path | None = None
        self._claim: Claim | None = None
        self._endpoints: dict[str, dict[str, str]] = {}  # by service, as it announced them; kept over its restarts
        self._closing = False
        self.redis_url = options.redis_url

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        if self.redis_url:
            redis_version(self.redis_url)
        self._claim = Claim(self._options.directory)
        self._directory = self._claim.path
        _sweep_memory_of_dead_stacks()
        self._memory_root = Path(tempfile.mkdtemp(prefix=f"{MEMORY_PREFIX}{os.getpid()}-", dir=MEMORY_ROOT))
        self._machine_room = MachineRoom(self._directory, {"power_off": self.power_off, "power_on": self.power_on})
        if not self.redis_url:
            self._say("starting Redis (embedded)")
            self._redis = EmbeddedRedis(self._directory / "redis")
            self._redis.start()
            self.redis_url = self._redis.url
        self._say("starting diagnostics and supervisor")
        self._start_diagnostics()
        self._start_supervisor()
        if self._options.nodes:
            self._say(f"starting {self._options.nodes} nodes")
        for node in self.node_names:
            self.power_on(node)

    def stop(self) -> None:
        """End everything, nodes first; safe to call twice and after a half start. Ctrl-C and SIGTERM are ignored meanwhile."""
        previous = _ignore_signals()
        try:
            self._closing = True
            _stop_all(list(self._agents.values()))
            self._agents.clear()
            if self._machine_room is not None:
                self._machine_room.close()
                self._machine_room = None
            _stop_all(list(reversed(self._services.values())))
            self._services.clear()
            if self._redis is not None:
                self._redis.stop()
                self._redis = None
            if self._memory_root is not None:
                shutil.rmtree(self._memory_root, ignore_errors=True)
                self._memory_root = None
            if self._claim is not None:
                self._claim.release()
                self._claim = None
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise `Unavailable`, with the end of its log, when a service has died. A dead agent is not an error here."""
        for name, process in self._services.items():
            if (code := process.poll()) is not None:
                raise Unavailable(f"{name} ended with code {code}:\n{self._log_tail(self._directory / name)}")

    # ------------------------------------------------------------------ what callers need

    @property
    def api_url(self) -> str:
        return self._endpoints["supervisor"]["api"]

    @property
    def control_endpoint(self) -> str:
        return self._outward(self._endpoints["supervisor"]["control"])

    @property
    def directory(self) -> Path:
        return self._options.directory

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node-{index}" for index in range(self._options.nodes))

    def service_pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in (self._services | self._agents).items()}

    # ------------------------------------------------------------------ nodes

    def power_on(self, node: str) -> None:
        """Start the agent of `node`. Raises `Conflict` when it is running."""
        self._know(node)
        if self._closing:
            raise Conflict("the stack is being stopped")
        if (old := self._agents.get(node)) is not None and old.poll() is None:
            raise Conflict(f"{node} is running (agent pid {old.pid}); nothing to switch on")
        directory, memory = self._node_directory(node), self._node_memory(node)
        for path in (directory, memory, directory / "disk"):
            path.mkdir(parents=True, exist_ok=True)
        kernel_log = directory / "kernel.log"
        kernel_log.touch()
        index = self.node_names.index(node)
        self._agents[node] = self._spawn(
            "holdfast.agent",
            directory / "agent.log",
            {
                "HOLDFAST_NODE": node,
                "HOLDFAST_SUPERVISOR": self.control_endpoint,
                "HOLDFAST_AGENT_DIR": str(directory),
                "HOLDFAST_MEMORY_DIR": str(memory),
                "HOLDFAST_DISK_DIR": str(directory / "disk"),
                "HOLDFAST_KERNEL_LOG": str(kernel_log),
                "HOLDFAST_CAPACITY": str(self._options.workers_per_node),
                "HOLDFAST_ZONE": f"zone-{index % self._options.zones}",
                "HOLDFAST_ADDRESS": self._outward(self._options.host),
                "HOLDFAST_PREFLIGHT_EVERY_S": "0",  # the nodes are one machine: testing each would only slow the others
                # the nodes share this machine's cores: one compute thread per worker unless the user says otherwise
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            },
        )

    def power_off(self, *nodes: str) -> None:
        """SIGKILL the agents and everything under them, and drop their memory tiers: what a power failure does."""
        agents = {}
        for node in nodes:
            self._know(node)
            process = self._agents.get(node)
            if process is None or process.poll() is not None:
                raise Conflict(f"{node} is not running; nothing to switch off")
            agents[node] = process
        for process in agents.values():  # all at once, before anything slow
            kill_tree(process.pid)
        for node, process in agents.items():
            process.wait(STOP_TIMEOUT_S)
            shutil.rmtree(self._node_memory(node), ignore_errors=True)

    def _know(self, node: str) -> None:
        if node not in self.node_names:
            raise NotFound(f"there is no node {node!r} in this stack; it has {', '.join(self.node_names) or 'none'}")

    def _node_directory(self, node: str) -> Path:
        return self._directory / "nodes" / node

    def _node_memory(self, node: str) -> Path:
        assert self._memory_root is not None, "the stack has not been started"
        return self._memory_root / node

    # ------------------------------------------------------------------ services

    def kill_service(self, name: str) -> None:
        """SIGKILL `redis`, `diagnostics` or `supervisor`; it stays away until `start_service`."""
        if name == "redis" and self._redis is not None:
            os.kill(self._redis.pid, signal.SIGKILL)
            self._redis.stop()
            return
        process = self._services.pop(name, None)
        if process is None:
            raise NotFound(f"no service {name!r} of this stack is running; these are: {', '.join(self._services)}")
        kill_tree(process.pid)
        process.wait(STOP_TIMEOUT_S)

    def start_service(self, name: str) -> None:
        """Start a service that was killed: where it was, with what it has kept. Raises `Conflict` when it is running."""
        if name in self._services:
            raise Conflict(f"{name} is running (pid {self._services[name].pid})")
        match name:
            case "redis" if self._redis is not None:
                self._redis.start()
            case "diagnostics":
                self._start_diagnostics()
            case "supervisor":
                self._start_supervisor()
            case _:
                raise NotFound(f"this stack has no service {name!r} that it could start")

    @staticmethod
    def _outward(address: str) -> str:
        """An address that others can use: a wildcard means every interface here, and nothing on another machine."""
        for wildcard in WILDCARDS:
            if address == wildcard or address.startswith(f"{wildcard}:"):
                return socket.gethostname() + address.removeprefix(wildcard)
        return address

    def _start_diagnostics(self) -> None:
        listen = self._address("diagnostics", "endpoint", self._options.diagnostics_port)
        self._start_service("diagnostics", "holdfast.diagnostics", {"HOLDFAST_DIAGNOSTICS_LISTEN": listen})

    def _start_supervisor(self) -> None:
        self._start_service(
            "supervisor",
            "holdfast.supervisor",
            {
                "HOLDFAST_SUPERVISOR_LISTEN": self._address("supervisor", "control", self._options.control_port),
                "HOLDFAST_API_LISTEN": self._address("supervisor", "api", self._options.api_port),
                "HOLDFAST_DATA_DIR": str(self._directory / "supervisor"),
                "HOLDFAST_DIAGNOSTICS": self._outward(self._endpoints["diagnostics"]["endpoint"]),
            },
        )

    def _address(self, service: str, endpoint: str, port: int) -> str:
        """Where to listen: where the service was before, so that everybody finds it again, else at `port`."""
        known = self._endpoints.get(service, {}).get(endpoint, "")
        return known.removeprefix("http://") or f"{self._options.host}:{port}"

    def _start_service(self, name: str, module: str, environment: Mapping[str, str]) -> None:
        directory = self._directory / name
        directory.mkdir(parents=True, exist_ok=True)
        ready = directory / "ready.json"
        ready.unlink(missing_ok=True)
        process = self._spawn(
            module,
            directory / f"{name}.log",
            {"HOLDFAST_REDIS_URL": self.redis_url, "HOLDFAST_READY_FILE": str(ready), **environment},
        )
        self._services[name] = process
        deadline = time.monotonic() + SERVICE_START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None:
                raise Unavailable(
                    f"{name} did not start (exit code {process.returncode}):\n{self._log_tail(directory)}"
                )
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{name} was not ready after {SERVICE_START_TIMEOUT_S:.0f} s:\n{self._log_tail(directory)}"
                )
            time.sleep(POLL_S)
        self._endpoints[name] = json.loads(ready.read_text())

    def _spawn(self, module: str, log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        with log.open("ab") as output:
            return subprocess.Popen(
                # also from the machine room's thread, which is stopped after the last agent
                tied([sys.executable, "-m", module], thread_lasts=True),
                env={**inherited, "HOLDFAST_FLEET": self._options.fleet, **self._options.environment, **environment},
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to us alone; we end the children in order
            )

    def _log_tail(self, directory: Path) -> str:
        lines: list[str] = []
        for log in sorted(directory.glob("*.log")):
            lines += log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(lines) or f"(nothing in {directory})"


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, the parent first so that it cannot react."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _stop_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to all at once, then SIGKILL to those that are left at the deadline."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()


def _sweep_memory_of_dead_stacks() -> None:
    """A stack that was killed with SIGKILL could not drop its nodes' memory tiers; the next one does it."""
    for directory in MEMORY_ROOT.glob(f"{MEMORY_PREFIX}*-*"):
        owner = directory.name.removeprefix(MEMORY_PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)) and directory.stat().st_uid == os.getuid():
            shutil.rmtree(directory, ignore_errors=True)


def _ignore_signals() -> dict[signal.Signals, Any]:
    """The handlers to put back."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # it gets no signals
    return {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
