"""The launchers side by side: each can start the same script, be hurt, and be ended. One class each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.ports import free_port
from holdfast.cli.client import Client
from holdfast.cli.processes import kill_tree
from holdfast.cli.run import wait_for_nodes
from holdfast.cli.stack import LocalStack
from holdfast.cli.stack_options import StackOptions
from holdfast.runtime.files import write_private
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.identities import ANY_NAME, Identity, Role

SCRIPT = Path(__file__).with_name("train.py")
LIBRARY_SCRIPT = Path(__file__).with_name("train_library.py")  # the same training with holdfast.train
RANKS = 2
PORT_TIMEOUT_S = 60.0
MAX_RESTARTS = "100"


@dataclass(frozen=True, slots=True)
class Layout:
    """Two ranks: on one node, or on two nodes with a third one standing by."""

    nodes: int
    spares: int = 0

    @property
    def per_node(self) -> int:
        return RANKS // self.nodes


ONE_NODE = Layout(nodes=1)
TWO_NODES_AND_SPARE = Layout(nodes=2, spares=1)

MARKS = ("fault", "detected", "decided", "prepared")


class Running(Protocol):
    """A started job."""

    def lose_node(self, pid: int) -> None:
        """Kill the node that runs the worker `pid` whole, as a power failure would, and provide what replaces it."""

    def marks(self) -> dict[str, float]:
        """When the last recovery reached each of `MARKS`, Unix seconds, as far as the launcher knows them."""

    def parts(self) -> dict[str, float]:
        """Seconds of what the launcher tells apart within a phase."""

    def closed(self) -> bool:
        """Whether `marks` is final; a launcher that keeps no books has nothing to wait for."""


Start = Callable[[Layout, Path, Sequence[str], ExitStack], Running]


@dataclass(slots=True)
class TorchElastic:
    """torchrun, and NVRx ft_launcher, which is built on it: one agent process per node, rendezvous over c10d."""

    command: Sequence[str]
    environment: dict[str, str]
    layout: Layout
    out: Path
    script_arguments: Sequence[str]
    port: int
    spare_waits: bool
    agents: list[subprocess.Popen[bytes]]
    script: Path = SCRIPT

    def start_agent(self) -> None:
        with (self.out / f"agent-{len(self.agents)}.log").open("wb") as log:
            self.agents.append(
                subprocess.Popen(
                    [
                        *self.command,
                        f"--nnodes={self.layout.nodes}",
                        f"--nproc-per-node={self.layout.per_node}",
                        f"--max-restarts={MAX_RESTARTS}",
                        "--rdzv-backend=c10d",
                        "--rdzv-id=bench",
                        f"--rdzv-endpoint=127.0.0.1:{self.port}",
                        str(self.script),
                        *self.script_arguments,
                    ],
                    env={**os.environ, **self.environment},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def lose_node(self, pid: int) -> None:
        agent = next(agent for agent in self.agents if agent.pid == _parent(pid))
        kill_tree(agent.pid)
        if not self.spare_waits:
            self.start_agent()  # the replacement starts in the same instant: no scheduler is in between

    def marks(self) -> dict[str, float]:
        return {}

    def parts(self) -> dict[str, float]:
        return {}

    def closed(self) -> bool:
        return True

    def end(self) -> None:
        for agent in self.agents:
            kill_tree(agent.pid)
            agent.wait()


def _elastic(command: Sequence[str], environment: dict[str, str], *, spare_waits: bool, script: Path = SCRIPT) -> Start:
    def start(layout: Layout, out: Path, script_arguments: Sequence[str], cleanup: ExitStack) -> Running:
        running = TorchElastic(
            command, environment, layout, out, script_arguments, free_port(), spare_waits, [], script
        )
        cleanup.callback(running.end)
        running.start_agent()
        _wait_for_port(running.port, running.agents[0])  # the first agent hosts the store, and is never the victim
        for _ in range(layout.nodes - 1 + (layout.spares if spare_waits else 0)):
            running.start_agent()
        return running

    return start


def torchrun(script: Path = SCRIPT) -> Start:
    """The option makes restarts work at all on torch 2.13 (a rendezvous store without an attempt prefix is reused)."""
    # A third agent that waits as a spare is not picked up within a minute; a replacement started at once is its best case.
    return _elastic(
        [sys.executable, "-m", "torch.distributed.run"],
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
        spare_waits=False,
        script=script,
    )


def ft_launcher(peers: Path) -> Start:
    """NVRx 0.4.1 from its own directory; heartbeats off, so that only exits are judged, as with torchrun."""
    return _elastic(
        [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"],
        {"PYTHONPATH": str(peers), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
        spare_waits=True,
    )


@dataclass(slots=True)
class HoldfastRunning:
    client: Client
    job: str

    def lose_node(self, pid: int) -> None:
        kill_tree(_parent(_parent(pid)))  # worker ← template ← agent

    def closed(self) -> bool:
        return all(incident["state"] == "resolved" for incident in self.client.incidents(self.job))

    def marks(self) -> dict[str, float]:
        last = self._last_incident()
        return {name: at for name in MARKS if (at := last.get(f"{name}_at")) is not None}

    def parts(self) -> dict[str, float]:
        return dict(self._last_incident().get("phases_s") or {})

    def _last_incident(self) -> dict[str, Any]:
        return max(self.client.incidents(self.job), key=lambda incident: incident["fault_at"], default={})


def holdfast(script: Path = SCRIPT, preload: Sequence[str] = (), user: str = "", *, tls: bool = False) -> Start:
    """`preload`: modules that the worker template imports, as in a job file. `user`: that of training, if root measures.
    `tls`: agents, services and replicators present certificates, and accept no others; digests are on anyway."""

    def start(layout: Layout, out: Path, script_arguments: Sequence[str], cleanup: ExitStack) -> Running:
        nodes = layout.nodes + layout.spares
        if user:
            out.chmod(0o777)  # the ranks write their progress there
        stack = cleanup.enter_context(
            LocalStack(
                StackOptions(
                    directory=out / "stack",
                    nodes=nodes,
                    workers_per_node=layout.per_node,
                    user=user,
                    environment=_certificate(out / "ca") if tls else {},
                )
            )
        )
        client = cleanup.enter_context(Client(stack.api_url))
        wait_for_nodes(client, stack, nodes)
        client.submit(
            {
                "name": "bench",
                "script": str(script),
                "args": list(script_arguments),
                "nodes": layout.nodes,
                "nproc_per_node": layout.per_node,
                "mesh": {"dp": RANKS},
                "checkpoint": {"interval_steps": 10, "keep": 2},
                "preload": list(preload),
            }
        )
        return HoldfastRunning(client, "bench")

    return start


def _certificate(directory: Path) -> Mapping[str, str]:
    """Return the settings of a certificate that stands for all parts of a stack. On loopback the API remains without TLS."""
    fleet = StackOptions(directory=directory).fleet
    roles = [Identity(fleet, Role.SUPERVISOR), Identity(fleet, Role.DIAGNOSTICS), Identity(fleet, Role.AGENT, ANY_NAME)]
    authority = Authority.create(directory, fleet, days=2)
    pair = authority.issue(roles, ["127.0.0.1", "localhost"], days=1)
    settings = {}
    for kind, content in (("CERT", pair.certificate), ("KEY", pair.key), ("CA", authority.certificate)):
        path = directory / f"stack.{kind.lower()}"
        write_private(path, content)
        settings[f"HOLDFAST_TLS_{kind}"] = str(path)
    return settings


def _parent(pid: int) -> int:
    """Parent's pid, from /proc/PID/stat: the fourth field, after a command name that may hold anything."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PORT_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the first agent (pid {process.pid}) does not listen on port {port}")
