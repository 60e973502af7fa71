"""The agent's settings, from the environment."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import Field, field_validator

from holdfast.runtime.settings import ServiceSettings

SOCKET_PATH_BYTES_MAX = 90  # of the 107 that a Unix socket's path may have; the rest is for our file names


class AgentSettings(ServiceSettings):
    """One node."""

    supervisor: str  # control endpoints, host:port, comma-separated; tried in turn
    node: str = Field(default_factory=socket.gethostname, min_length=1)
    agent_dir: Path  # logs, remembered answers, sockets
    memory_dir: Path  # the memory tier, on a tmpfs
    disk_dir: Path
    capacity: int = Field(default=1, ge=1)  # workers that fit
    zone: str = ""  # failure domain; empty = the node is one by itself
    address: str = "127.0.0.1"  # where the workers and replicators of other nodes reach this one
    kernel_log: Path = Path("/dev/kmsg")
    gpus: int = Field(default=0, ge=0)  # that this node should have; 0 = as many as were ever seen
    nvml_replay: Path | None = None  # a file of recorded NVML answers, read instead of a driver
    infiniband: Path = Path("/sys/class/infiniband")
    # mlx5 ports to leave alone, shell patterns, comma-separated: reading counters of restricted functions floods the kernel log
    nic_exclude: str = ""
    # Directory of nvidia-resiliency-ext and what it needs, when it is not in this environment: its pynvml shadows ours
    nvrx_path: Path | None = None
    maintenance_file: Path | None = None  # its presence announces that this machine will be taken
    maintenance_url: str = ""  # GCE: http://metadata.google.internal/computeMetadata/v1/instance/maintenance-event
    replicator: bool = True  # false: a node without checkpoints
    replicator_port: int = Field(default=0, ge=0, le=65535)  # of the shard data plane; 0 = any free one
    # An idle node tests itself so often; 0 = never, not at its start.
    preflight_every_s: float = Field(default=1800.0, ge=0)
    blind_start_s: float = Field(default=5.0, gt=0)  # an unmodified script counts as stepping after this long

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.supervisor.split(",") if part.strip())

    @field_validator("supervisor")
    @classmethod
    def _endpoints_are_whole(cls, value: str) -> str:
        for part in value.split(","):
            host, _, port = part.strip().rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError("host:port, or several separated by commas")
        return value

    @field_validator("maintenance_url")
    @classmethod
    def _metadata_is_http(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("an http:// or https:// URL")
        return value

    @field_validator("agent_dir")
    @classmethod
    def _sockets_fit(cls, value: Path) -> Path:
        if len(str(value.absolute()).encode()) > SOCKET_PATH_BYTES_MAX:
            raise ValueError(f"a path of at most {SOCKET_PATH_BYTES_MAX} bytes, because Unix sockets are made in it")
        return value.absolute()
