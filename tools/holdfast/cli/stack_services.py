"""The services of a local stack, diagnostics and supervisor: their processes, settings, and announced addresses."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.cli.processes import STOP_TIMEOUT_S, Process, kill_tree, stop_all
from holdfast.cli.stack_options import StackOptions, outward
from holdfast.cli.stack_record import SERVICES
from holdfast.cli.tending import last_lines
from holdfast.domain.errors import Conflict, NotFound, Unavailable

SERVICE_START_TIMEOUT_S = 60.0
POLL_S = 0.02
FREE_BYTES_MIN = 1 << 16  # with less free space, a service cannot write its log and its other files

Spawn = Callable[[str, str, Path, Mapping[str, str]], Process]  # part, module, log, environment


class Services:
    """The service processes of one stack. `directory` may be set to a shorter path of the same directory before the start."""

    def __init__(self, options: StackOptions, spawn: Spawn) -> None:
        self._options, self._spawn = options, spawn
        self.directory = options.directory
        self.processes: dict[str, Process] = {}
        self.endpoints: dict[str, dict[str, str]] = {}  # by service, as it announced them; kept over its restarts

    @property
    def api_url(self) -> str:
        return self.endpoints["supervisor"]["api"]

    @property
    def control_endpoint(self) -> str:
        """Return the address for agents, which also other machines can use."""
        return outward(self.endpoints["supervisor"]["control"])

    @property
    def missing(self) -> list[str]:
        """The services without a process, in the order of their start."""
        return [name for name in SERVICES if name not in self.processes]

    def start(self, name: str) -> None:
        """Start a service and wait until it is serving. Raises `Conflict` if it is running, `NotFound` for an unknown name, and
        `Unavailable`, with the end of its log, if it does not start."""
        if name in self.processes:
            raise Conflict(f"{name} is running (pid {self.processes[name].pid})")
        if name not in SERVICES:
            raise NotFound(f"this stack cannot start a service {name!r}")
        self.spawn(name)
        self._wait_ready(name)

    def spawn(self, name: str) -> int:
        """Start the process of a service, with its previous addresses, and return its pid without waiting for it."""
        directory = self.directory / name
        directory.mkdir(parents=True, exist_ok=True)
        ready = directory / "ready.json"
        ready.unlink(missing_ok=True)
        environment = {
            "HOLDFAST_READY_FILE": str(ready),
            "HOLDFAST_STOP_SIGNAL": self._options.stop_signal,
            **self._environment_of(name),
        }
        self.processes[name] = self._spawn(name, f"holdfast.{name}", directory / f"{name}.log", environment)
        return self.processes[name].pid

    def adopt(self, name: str, process: Process) -> None:
        """Take over the process of an earlier stack of this directory, and wait until it is serving if its addresses are not
        known. Raises `Unavailable`."""
        self.processes[name] = process
        if name not in self.endpoints:
            self._wait_ready(name)

    def kill(self, name: str) -> None:
        """SIGKILL a service. Raises `NotFound` if it is not running."""
        process = self.processes.pop(name, None)
        if process is None:
            raise NotFound(
                f"service {name!r} of this stack is not running; running services: {', '.join(self.processes)}"
            )
        kill_tree(process.pid)
        process.wait(STOP_TIMEOUT_S)

    def stop(self) -> None:
        """Stop all services, the last one first."""
        stop_all(list(reversed(self.processes.values())), signal.Signals[self._options.stop_signal])
        self.processes.clear()

    def check(self) -> None:
        """Raise `Unavailable`, with the end of its log, if a service has exited."""
        for name, process in self.processes.items():
            if (code := process.poll()) is not None:
                raise Unavailable(f"{name} exited with code {code}; the end of its log:\n{self._log_tail(name)}")

    def _environment_of(self, service: str) -> dict[str, str]:
        match service:
            case "diagnostics":
                listen = self._address("diagnostics", "endpoint", self._options.diagnostics_port)
                return {"HOLDFAST_DIAGNOSTICS_LISTEN": listen}
            case _:
                api = self._address("supervisor", "api", self._options.api_port, self._options.api_host)
                return {
                    "HOLDFAST_SUPERVISOR_LISTEN": self._address("supervisor", "control", self._options.control_port),
                    "HOLDFAST_API_LISTEN": api,
                    "HOLDFAST_DATA_DIR": str(self.directory / "supervisor"),
                    "HOLDFAST_DIAGNOSTICS": outward(self.endpoints["diagnostics"]["endpoint"]),
                }

    def _address(self, service: str, endpoint: str, port: int, host: str = "") -> str:
        """Return the address to listen on, with the previous port of the service, so that clients reconnect; else `port`. The
        host of an announced URL may be another one: a name of the certificate."""
        known = self.endpoints.get(service, {}).get(endpoint, "").rstrip("/").rpartition(":")[2]
        return f"{host or self._options.host}:{known or port}"

    def _wait_ready(self, name: str) -> None:
        ready, process = self.directory / name / "ready.json", self.processes[name]
        deadline = time.monotonic() + SERVICE_START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None:
                raise Unavailable(
                    f"{name} did not start (exit code {process.returncode}); the end of its log:\n{self._log_tail(name)}"
                )
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{name} was not ready after {SERVICE_START_TIMEOUT_S:.0f} s; the end of its log:\n{self._log_tail(name)}"
                )
            time.sleep(POLL_S)
        self.endpoints[name] = json.loads(ready.read_text())

    def _log_tail(self, name: str) -> str:
        directory = self.directory / name
        lines = [line for log in sorted(directory.glob("*.log")) for line in last_lines(log)]
        if shutil.disk_usage(directory).free < FREE_BYTES_MIN:
            lines.append(f"{directory} is on a full file system; free space there")
        return "\n".join(lines) or f"(no log in {directory})"
