"""Runs the processes of a soak: Redis, two diagnostics, two supervisors, nodes. Each can be killed, frozen and restarted by
name.

    redis · diagnostics-a, -b · supervisor-a, -b · node-0 … (an agent each, below it replicator, template and workers)

`LocalStack` (of `holdfast up`) is not sufficient: here every service runs twice, each node has a separate network, clock,
memory and disk if the machine allows it, and Redis is reached through relays. `lacks` has the means that the machine does not
allow.

    <work>/<node>/disk/            agent directory and disk tier; a tmpfs of `DISK_BYTES` under root
    <work>/<node>/shm/             memory tier; a tmpfs of `SHM_BYTES` under root, else below /dev/shm
    <logs>/<process>.log           output of each process, kept
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from benchmarks.ports import free_port
from benchmarks.soak import network
from benchmarks.soak.clock import Clocks, Unbuildable
from benchmarks.soak.relay import Relay
from benchmarks.soak.schedule import Need
from holdfast.cli.processes import kill_tree
from holdfast.log.embedded import EmbeddedRedis
from holdfast.runtime.processes.children import tied

MARK = "SOAK_OWNER"  # in the environment of every process; not HOLDFAST_…, which workers do not inherit
DISK_BYTES = 256 << 20
SHM_BYTES = 96 << 20
MEMORY_ROOT = Path("/dev/shm")
PREFIX = "hf-soak-"
READY_TIMEOUT_S = 90.0
GONE_TIMEOUT_S = 20.0
POLL_S = 0.02
SUPERVISORS = ("supervisor-a", "supervisor-b")
DIAGNOSTICS = ("diagnostics-a", "diagnostics-b")
SERVICES = ("redis", *DIAGNOSTICS, *SUPERVISORS)
REPLICATOR, TEMPLATE = "holdfast.replicator", "holdfast.train.warm.template"
WORKER = "holdfast: "  # start of a worker's title, which replaces the command line of its template
REAPER = "holdfast-reaper"  # process name of a reaper; its command line is that of the template
ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Rig:
    """A context manager, which ends all processes and deletes their files at the end."""

    nodes: int
    logs: Path
    zones: int = 3
    lacks: dict[Need, str] = field(default_factory=dict)
    work: Path = field(init=False)
    owner: str = field(init=False)
    network: network.Network | None = field(init=False, default=None)
    clocks: Clocks | None = field(init=False, default=None)
    relays: dict[str, Relay] = field(init=False, default_factory=dict)
    _redis: EmbeddedRedis = field(init=False)
    _processes: dict[str, subprocess.Popen[bytes]] = field(init=False, default_factory=dict)
    _ports: dict[str, dict[str, int]] = field(init=False, default_factory=dict)
    _mounts: list[Path] = field(init=False, default_factory=list)
    _redis_up: bool = field(init=False, default=False)

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/tmp"))  # short, for sockets
        self.owner = self.work.name
        try:
            self._prepare()
            self._start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _prepare(self) -> None:
        try:
            self.clocks = Clocks(self.work / "clocks")
        except Unbuildable as error:
            self.lacks[Need.CLOCK] = str(error)
        if why := network.missing():
            self.lacks[Need.NETWORK] = why
        else:
            self.network = network.Network(self.nodes).__enter__()
        for node in self.node_names:
            for path, size in ((self.disk(node), DISK_BYTES), (self.shm(node), SHM_BYTES)):
                path.mkdir(parents=True, exist_ok=True)
                self._mount(path, size)
        self.store.mkdir()

    def _mount(self, path: Path, size: int) -> None:
        if os.geteuid():
            self.lacks[Need.MOUNT] = "not root"
            return
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "hf-soak", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            self.lacks[Need.MOUNT] = done.stderr.strip()
        else:
            self._mounts.append(path)

    def _start_all(self) -> None:
        self._redis = EmbeddedRedis(self.work / "redis", on_loopback=True)  # on the loopback, for the relays
        self.start("redis")
        host, port = "127.0.0.1", int(self._redis.url.rsplit(":", 1)[1].split("/")[0])
        self.relays = {name: Relay((host, port)) for name in (*DIAGNOSTICS, *SUPERVISORS)}
        for name in DIAGNOSTICS:
            self._ports[name] = {"listen": free_port(self.host)}
        for name in SUPERVISORS:
            self._ports[name] = {"control": free_port(self.host), "api": free_port()}
        for name in (*DIAGNOSTICS, *SUPERVISORS):
            self.start(name)
        for name in self.node_names:
            self.start(name)

    def stop(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is None:
                self.signal(name, signal.SIGCONT)
                process.send_signal(signal.SIGTERM if name in SERVICES else signal.SIGINT)
        deadline = time.monotonic() + GONE_TIMEOUT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill_tree(process.pid)
                process.wait()
        self._processes.clear()
        for relay in self.relays.values():
            relay.close()
        if hasattr(self, "_redis"):
            self._redis.stop()
        if self.network is not None:
            self.network.close()

    def clean(self) -> None:
        """Keep the workers' logs and delete all other files. Call this after `stop` and after the search for leftovers."""
        for node in self.node_names:
            kept = self.logs / node
            for log in self.disk(node).glob("**/*.log"):
                kept.mkdir(exist_ok=True)
                shutil.copyfile(log, kept / "-".join(log.relative_to(self.disk(node)).parts))
        for path in self._mounts:
            subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)
        for path in (self.work, *MEMORY_ROOT.glob(f"{self.owner}-*")):
            shutil.rmtree(path, ignore_errors=True)

    # ------------------------------------------------------------------ locations

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node-{index}" for index in range(self.nodes))

    @property
    def host(self) -> str:
        return "127.0.0.1" if self.network is None else self.network.host

    @property
    def api_urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{self._ports[name]['api']}" for name in SUPERVISORS)

    @property
    def redis_url(self) -> str:
        return self._redis.url

    @property
    def store(self) -> Path:
        return self.work / "store"

    def disk(self, node: str) -> Path:
        return self.work / node / "disk"

    def shm(self, node: str) -> Path:
        return MEMORY_ROOT / f"{self.owner}-{node}" if os.geteuid() else self.work / node / "shm"

    def databases(self) -> dict[str, Path]:
        return {name: self.work / name / "history.sqlite3" for name in SUPERVISORS}

    # ------------------------------------------------------------------ processes

    def running(self, name: str) -> bool:
        if name == "redis":
            return self._redis_up
        process = self._processes.get(name)
        return process is not None and process.poll() is None

    def pid(self, name: str) -> int:
        return self._redis.pid if name == "redis" else self._processes[name].pid

    def child(self, node: str, module: str) -> int | None:
        """Return the pid of the direct child of `node`'s agent that runs `module`; None if there is none."""
        try:
            children = psutil.Process(self.pid(node)).children()
            return next((each.pid for each in children if module in each.cmdline() and each.name() != REAPER), None)
        except (psutil.Error, KeyError):
            return None

    def start(self, name: str) -> None:
        """Start a process again with its old directories. For a service, wait until it serves; for a node, do not wait."""
        if name == "redis":
            with self._preloaded("redis"):
                self._redis.start()
            self._redis_up = True
            return
        if self.running(name):
            return
        if name in DIAGNOSTICS:
            self._serve(name, "holdfast.diagnostics", self._diagnostics(name))
        elif name in SUPERVISORS:
            self._serve(name, "holdfast.supervisor", self._supervisor(name))
        else:
            self._start_node(name)

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process only. Its children and files remain, as after a real crash."""
        if name == "redis":
            os.kill(self._redis.pid, signal.SIGKILL)
            self._redis.stop()
            self._redis_up = False
            return
        process = self._processes[name]
        process.kill()
        process.wait(GONE_TIMEOUT_S)

    def power_off(self, node: str, *, disk: bool = False) -> None:
        """Kill all processes of a node at once and delete its memory tier; with `disk` also its disk, as if it were
        replaced."""
        process = self._processes[node]
        kill_tree(process.pid)
        process.wait(GONE_TIMEOUT_S)
        for path in (self.shm(node), *([self.disk(node)] if disk else [])):
            _empty(path)

    def signal(self, name: str, number: signal.Signals) -> None:
        try:
            os.kill(self.pid(name), number)
        except ProcessLookupError:
            return

    def leftovers(self) -> list[psutil.Process]:
        """Return the processes with this rig's mark in their environment, anywhere in the process tree."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.owner and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    # ------------------------------------------------------------------ starting

    def _serve(self, name: str, module: str, environment: Mapping[str, str]) -> None:
        directory = self.work / name
        directory.mkdir(exist_ok=True)
        ready = directory / "ready.json"
        ready.unlink(missing_ok=True)
        redis = f"redis://127.0.0.1:{self.relays[name].port}/0"
        self._spawn(
            name,
            [sys.executable, "-m", module],
            {"HOLDFAST_REDIS_URL": redis, "HOLDFAST_READY_FILE": str(ready), **environment},
        )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not ready.exists() and self.running("redis"):  # without Redis the service waits, or ends and is restarted
            if time.monotonic() > deadline or not self.running(name):
                return
            time.sleep(POLL_S)

    def _diagnostics(self, name: str) -> dict[str, str]:
        return {"HOLDFAST_DIAGNOSTICS_LISTEN": f"{self.host}:{self._ports[name]['listen']}"}

    def _supervisor(self, name: str) -> dict[str, str]:
        ports = self._ports[name]
        return {
            "HOLDFAST_SUPERVISOR_NAME": name,
            "HOLDFAST_SUPERVISOR_LISTEN": f"{self.host}:{ports['control']}",
            "HOLDFAST_API_LISTEN": f"127.0.0.1:{ports['api']}",
            "HOLDFAST_DATA_DIR": str(self.work / name),
            "HOLDFAST_DIAGNOSTICS": ",".join(f"{self.host}:{self._ports[each]['listen']}" for each in DIAGNOSTICS),
        }

    def _start_node(self, name: str) -> None:
        index = self.node_names.index(name)
        disk, memory = self.disk(name), self.shm(name)
        for path in (disk / "tier", memory):
            path.mkdir(parents=True, exist_ok=True)
        (disk / "kernel.log").touch()
        environment = {
            "HOLDFAST_NODE": name,
            "HOLDFAST_SUPERVISOR": ",".join(f"{self.host}:{self._ports[each]['control']}" for each in SUPERVISORS),
            "HOLDFAST_AGENT_DIR": str(disk),
            "HOLDFAST_MEMORY_DIR": str(memory),
            "HOLDFAST_DISK_DIR": str(disk / "tier"),
            "HOLDFAST_KERNEL_LOG": str(disk / "kernel.log"),
            "HOLDFAST_ZONE": f"zone-{index % self.zones}",
            "HOLDFAST_LINK_TESTS": "false",
            "HOLDFAST_PREFLIGHT_EVERY_S": "0",  # the nodes share one machine, so a test would slow down the others
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "holdfast.agent"]
        if self.network is not None:
            command = self.network.inside(index, command)
            environment |= {
                "HOLDFAST_ADDRESS": self.network.address(index),
                "GLOO_SOCKET_IFNAME": network.DEVICE,
            }
        self._spawn(name, command, environment)

    def _spawn(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
        clock = {} if self.clocks is None else self.clocks.environment(name)
        with (self.logs / f"{name}.log").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                tied(command, thread_lasts=True),
                env={**inherited, "PYTHONPATH": str(ROOT), MARK: self.owner, **clock, **environment},
                cwd=self.work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @contextmanager
    def _preloaded(self, name: str) -> Iterator[None]:
        """Set the library in this process's environment, which the embedded Redis inherits."""
        added = {MARK: self.owner} | ({} if self.clocks is None else self.clocks.environment(name))
        before = {key: os.environ.get(key) for key in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key)
                else:
                    os.environ[key] = value


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
