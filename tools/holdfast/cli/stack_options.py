"""The options of a local stack, and which settings its parts get from the environment of the command."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from holdfast.cli import protection
from holdfast.cli.connection import ENV_API, ENV_LOCAL_API_PORT, ENV_TOKEN, ENV_TOKEN_FILE
from holdfast.cli.secret_file import secret_in
from holdfast.cli.stack_record import SERVICES
from holdfast.runtime.trust.api_tokens import TOKENS_FILE
from holdfast.runtime.trust.fleet import JOIN_OPTIONAL, JOIN_TOKEN, JOIN_TOKEN_FILE
from holdfast.runtime.trust.oidc import ISSUER
from holdfast.runtime.trust.oidc import SETTINGS as OIDC_SETTINGS

NODES_MAX = 256  # on one machine: each is an agent, a replicator and a template, half a gigabyte before any worker
# Settings that the command itself reads, or that belong to other commands.
OWN = (
    JOIN_TOKEN, JOIN_TOKEN_FILE, JOIN_OPTIONAL, ENV_API, "HOLDFAST_REDIS_URL", "HOLDFAST_GPU_RESET_COMMAND",
    "HOLDFAST_SUPERVISOR", "HOLDFAST_LAUNCHER_TOKEN", "HOLDFAST_AGENT_USER", ENV_TOKEN_FILE, ENV_LOCAL_API_PORT,
)  # fmt: skip
OF_AGENTS = ("HOLDFAST_LOG_BYTES_MAX",)  # settings of agents that the nodes of a stack take from the environment
JOIN_FILE = "join-token"
WILDCARDS = ("0.0.0.0", "[::]")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """Options of a stack. Ports: 0 = any free port. `nodes`: number of agents, 0 = control plane only.
    `nodes_on`: start the nodes with the stack; otherwise `power_on_all` starts them.

    `api_host`: where the API listens, if not at `host`. `stop_signal`: SIGINT, if the services are to ignore SIGTERM.
    `stays`: the processes outlive a killed starter, and the next stack of the directory takes them over.
    `user`: the training user of the agents (`holdfast agent --user`), empty = that of this process.
    `open_api`: if `environment` has no token, none is made for an API on loopback: every user of the machine may use it.
    """

    directory: Path
    nodes: int = 0
    workers_per_node: int = 1
    zones: int = 3  # failure domains that the nodes are spread over
    redis_url: str = ""
    fleet: str = "main"
    host: str = "127.0.0.1"
    api_host: str = ""
    stop_signal: Literal["SIGTERM", "SIGINT"] = "SIGTERM"
    api_port: int = 0
    control_port: int = 0
    diagnostics_port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    stays: bool = False
    nodes_on: bool = True
    open_api: bool = False
    user: str = ""

    @property
    def makes_token(self) -> bool:
        """Whether the stack makes a token for its API. Other machines would not find one."""
        given = any(self.environment.get(name) for name in (ENV_TOKEN, TOKENS_FILE, ISSUER))
        return not (self.open_api or given) and protection.is_loopback(self.api_host or self.host)

    @property
    def flags(self) -> dict[str, str | int]:
        """Return the options that cannot change while the processes run, by option of `holdfast up`."""
        return {
            "--nodes": self.nodes,
            "--workers-per-node": self.workers_per_node,
            "--redis-url": self.redis_url,
            "--host": self.host,
            "--port": self.api_port,
            "--control-port": self.control_port,
            "--diagnostics-port": self.diagnostics_port,
            "--fleet": self.fleet,
            "--insecure": self.open_api,
            "--user": self.user,
            **protection.shown(self.environment),
        }


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the parts of a stack inherit from the command: all except its HOLDFAST_ settings, which the
    options replace. HOLDFAST_FAULT_ settings (docs/fault-injection.md) and `OF_AGENTS` are inherited."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("HOLDFAST_") or name.startswith("HOLDFAST_FAULT_") or name in OF_AGENTS
    }


def not_passed_on(environment: Mapping[str, str]) -> list[str]:
    """Return the settings of services in the environment that a stack of `holdfast up` does not use."""
    used = {*protection.settings_for_parts(environment), *inherited(environment), *OWN}
    return sorted(
        name for name, value in environment.items() if name.startswith("HOLDFAST_") and value and name not in used
    )


def settings_of(options: StackOptions, part: str, api_token: str) -> dict[str, str]:
    """Return the settings of the options for this part. Agents and workers get no tokens of the API; only the supervisor gets
    the addresses of alerts and the settings of TLS, enrolment and OIDC."""
    others = {ENV_TOKEN, TOKENS_FILE} if part not in SERVICES else set()
    others |= (
        {*protection.ALERTS, *protection.API_TLS_SETTINGS, *protection.ENROLMENT, *OIDC_SETTINGS}
        if part != "supervisor"
        else set()
    )
    names = set(options.environment) - others
    own = {ENV_TOKEN: api_token} if api_token and part == "supervisor" else {}
    return {name: value for name, value in options.environment.items() if name in names} | own


def join_settings(directory: Path, *, taken_over: bool) -> dict[str, str]:
    """Return the join token of the environment, else that of the file in the directory, which is created if it is absent."""
    names = (JOIN_TOKEN, JOIN_TOKEN_FILE, JOIN_OPTIONAL)
    given = {name: value for name in names if (value := os.environ.get(name, ""))}
    if JOIN_TOKEN_FILE in given:
        given[JOIN_TOKEN_FILE] = str(Path(given[JOIN_TOKEN_FILE]).absolute())
    if JOIN_TOKEN in given or JOIN_TOKEN_FILE in given:
        return given
    file = directory.absolute() / JOIN_FILE
    if taken_over and not file.exists():
        return given  # the processes that were taken over are of a version without join tokens
    secret_in(file)
    return given | {JOIN_TOKEN_FILE: str(file)}


def node_name(index: int) -> str:
    return f"node-{index}"


def agent_settings(options: StackOptions, index: int, directory: Path, memory: Path) -> dict[str, str]:
    """Return the settings of the agent of node `index`, besides where the supervisor is."""
    environment = options.environment
    return {
        "HOLDFAST_NODE": node_name(index),
        "HOLDFAST_AGENT_DIR": str(directory),
        "HOLDFAST_MEMORY_DIR": str(memory),
        "HOLDFAST_DISK_DIR": str(directory / "disk"),
        "HOLDFAST_KERNEL_LOG": str(directory / "kernel.log"),
        "HOLDFAST_CAPACITY": str(options.workers_per_node),
        "HOLDFAST_AGENT_USER": options.user,
        "HOLDFAST_ZONE": f"zone-{index % options.zones}",
        "HOLDFAST_ADDRESS": outward(options.host),
        # all nodes are one machine, so tests would only slow the other nodes
        "HOLDFAST_PREFLIGHT_EVERY_S": environment.get("HOLDFAST_PREFLIGHT_EVERY_S", "0"),
        "HOLDFAST_LINK_TESTS": environment.get("HOLDFAST_LINK_TESTS", "false"),
        # all nodes share its GPUs: a GPU is reset only if the settings name a command
        "HOLDFAST_GPU_RESET_COMMAND": environment.get(
            "HOLDFAST_GPU_RESET_COMMAND", os.environ.get("HOLDFAST_GPU_RESET_COMMAND", "")
        ),
        # one reboot would end all nodes
        "HOLDFAST_REBOOT_COMMAND": environment.get("HOLDFAST_REBOOT_COMMAND", ""),
        # a stack that is stopped is stopped as a whole, so ranks would move to nodes that leave as well
        "HOLDFAST_TERMINATION_GRACE_S": environment.get("HOLDFAST_TERMINATION_GRACE_S", "0"),
        # the nodes share this machine's cores: one compute thread per worker by default
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def outward(address: str) -> str:
    """Return an address for other machines: replaces a wildcard by the host name."""
    for wildcard in WILDCARDS:
        if address == wildcard or address.startswith(f"{wildcard}:"):
            return socket.gethostname() + address.removeprefix(wildcard)
    return address
