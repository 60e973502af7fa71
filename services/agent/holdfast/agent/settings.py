"""The agent's settings, from the environment."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from holdfast.agent.collectors.maintenance import AUTO
from holdfast.agent.gpus.gpu_reset import ResetRules
from holdfast.agent.host.machine import BOOT_ID, PRODUCT_UUID
from holdfast.agent.injection.faults import MachineFaultRules
from holdfast.agent.workers.log_limit import LOG_BYTES_MAX, LOG_BYTES_MIN
from holdfast.domain.faults import LOSS_PERCENT_MAX, LOSS_PERCENT_MIN, OFFSET_S_MAX
from holdfast.domain.hosts import host_and_port
from holdfast.domain.nodes import AGENT_DIRECTORY_BYTES_MAX, pool_name
from holdfast.runtime.settings import ServiceSettings, require_address

NONE = "none"  # a value for "no source" or "no command", because an empty variable counts as not set


class AgentSettings(ServiceSettings):
    """One node."""

    supervisor: str  # control endpoints, host:port, comma-separated; tried in turn
    node: str = Field(default_factory=socket.gethostname, min_length=1)
    # User that training runs as: NAME or UID, with :GROUP if its group is another one. Empty = the agent's. Needs root
    agent_user: str = ""
    agent_dir: Path  # logs, stored answers, sockets
    memory_dir: Path  # the memory tier, on a tmpfs
    disk_dir: Path
    # Where `holdfast agent --invite` keeps this node's certificate, which is renewed there; None = it is not renewed here
    identity_dir: Path | None = None
    capacity: int = Field(default=1, ge=1)  # maximum number of workers
    zone: str = ""  # failure domain; empty = a separate one for this node
    # Only jobs of this pool get the node; empty = jobs without one
    pool: Annotated[str, AfterValidator(pool_name)] = ""
    address: str = "127.0.0.1"  # address of this node for workers and replicators of other nodes
    kernel_log: Path = Path("/dev/kmsg")
    gpus: int = Field(default=0, ge=0)  # number of GPUs of this node; 0 = the highest number seen
    nvml_replay: Path | None = None  # a file of recorded NVML answers, read instead of a driver
    infiniband: Path = Path("/sys/class/infiniband")
    # mlx5 ports that are not read (shell patterns, comma-separated), because restricted functions log each read
    nic_exclude: str = ""
    # Directory of nvidia-resiliency-ext and its dependencies, if not in this environment, where its pynvml would shadow
    # the agent's
    nvrx_path: Path | None = None
    maintenance_file: Path | None = None  # if this file exists, maintenance of this machine is announced
    maintenance_url: str = AUTO  # Google Cloud's metadata: a directory of an instance, or only its maintenance-event
    # Seconds from SIGTERM or SIGUSR1 to the end of the agent, in which the job saves and moves its ranks to other nodes; 0 =
    # the agent ends at once. Must be less than the sender's wait before SIGKILL (Kubernetes: 30 s, Slurm's KillWait: 30 s).
    termination_grace_s: float = Field(default=25.0, ge=0, le=86_400)
    # Seconds within the grace for which the agent stays after its last worker has ended, because other nodes may still restore
    # shards from this node, whose last save may have no other copy.
    handover_s: float = Field(default=15.0, ge=0, le=86_400)
    replicator: bool = True  # false: a node without checkpoints
    # as `metrics_listen`, of the node's checkpoint-replicator, which is a process of its own
    replicator_metrics_listen: str = ""
    replicator_port: int = Field(default=0, ge=0, le=65535)  # port of the shard data plane; 0 = any free port
    # Seconds between pre-flight tests of an idle node; 0 = no tests, also not at the start.
    preflight_every_s: float = Field(default=1800.0, ge=0)
    link_tests: bool = True  # take part in tests of the network with other idle nodes (docs/diagnostics.md)
    # Resets GPUs; {gpu} becomes their numbers, separated by commas. Run without a shell. none, or a program that does not
    # exist = this node cannot reset GPUs
    gpu_reset_command: str = "nvidia-smi --gpu-reset -i {gpu}"
    # Which GPUs are reset with the faulty one. auto: all of the node, unless NVML reports that none of them has NVLinks
    gpu_reset_together: Literal["auto", "all", "one"] = "auto"
    # Programs that the command itself stops (as in /proc/PID/comm, comma-separated): a reset does not wait for their exit
    gpu_reset_stops: str = ""
    gpu_devices: Path = Path("/dev")  # directory of the GPUs' device files
    # Boots this machine; {node} becomes the node's name. Run without a shell, on a node without workers, after a fault that
    # only a boot ends. Empty = an operator boots the machines
    reboot_command: str = ""
    machine_id_file: Path = PRODUCT_UUID  # contains the id by which another machine is recognised
    # Contains the id by which a reboot is recognised. To be set if a container masks /proc/sys
    boot_id_file: Path = BOOT_ID
    # GiB that `holdfast inject` of a full disk may fill, for jobs with `chaos: true`; refused if more space is free
    fault_fill_gib_max: float = Field(default=16.0, ge=0, le=1024)
    # Interface whose packets `holdfast inject` of a lossy link may drop, and the maximum percentage; empty = none
    fault_link: str = Field(default="", pattern=r"^([^/\s:]{1,15})?$")
    fault_loss_percent_max: float = Field(default=30.0, ge=LOSS_PERCENT_MIN, le=LOSS_PERCENT_MAX)
    # Seconds by which `holdfast inject` may change the clock of this machine, for every process on it; 0 = not allowed
    fault_clock_s_max: float = Field(default=0.0, ge=0, le=OFFSET_S_MAX)
    # Seconds after which an unmodified script counts as having made a step.
    assume_started_after_s: float = Field(default=5.0, gt=0)
    # Bytes of one rank's log, of which the middle is cut beyond that; 0 = no limit while there is room (docs/logs.md)
    log_bytes_max: int = Field(default=LOG_BYTES_MAX, ge=0)

    @field_validator("log_bytes_max")
    @classmethod
    def _logs_have_two_ends(cls, value: int) -> int:
        if 0 < value < LOG_BYTES_MIN:
            raise ValueError(f"at least {LOG_BYTES_MIN}, or 0")
        return value

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.supervisor.split(",") if part.strip())

    @field_validator("replicator_metrics_listen")
    @classmethod
    def _replicator_metrics_listen_is_an_address(cls, value: str) -> str:
        return require_address(value)

    @field_validator("supervisor")
    @classmethod
    def _endpoints_are_whole(cls, value: str) -> str:
        for part in value.split(","):
            if host_and_port(part.strip()) is None:
                raise ValueError("host:port, or several separated by commas")
        return value

    @property
    def machine_faults(self) -> MachineFaultRules:
        return MachineFaultRules(
            link=self.fault_link, loss_percent_max=self.fault_loss_percent_max, clock_s_max=self.fault_clock_s_max
        )

    @property
    def resets(self) -> ResetRules:
        stops = (part.strip() for part in self.gpu_reset_stops.split(","))
        return ResetRules(self.gpu_reset_command, self.gpu_reset_together, tuple(part for part in stops if part))

    @field_validator("gpu_reset_command", "reboot_command")
    @classmethod
    def _command_can_be_split(cls, value: str) -> str:
        try:
            shlex.split(value)
        except ValueError as error:
            raise ValueError(f"a command line ({error})") from error
        return value

    @field_validator("gpu_reset_command")
    @classmethod
    def _command_names_the_gpu(cls, value: str) -> str:
        if value == NONE:
            return ""
        if value and "{gpu}" not in value:
            raise ValueError(f"a command line that contains {{gpu}}, or {NONE}")
        return value

    @field_validator("maintenance_url")
    @classmethod
    def _metadata_is_http(cls, value: str) -> str:
        if value == NONE:
            return ""
        if value not in ("", AUTO) and not value.startswith(("http://", "https://")):
            raise ValueError(f"an http:// or https:// URL, {AUTO}, or {NONE}")
        return value

    @field_validator("agent_dir")
    @classmethod
    def _sockets_fit(cls, value: Path) -> Path:
        if len(str(value.absolute()).encode()) > AGENT_DIRECTORY_BYTES_MAX:
            raise ValueError(
                f"a path of at most {AGENT_DIRECTORY_BYTES_MAX} bytes, because Unix sockets are made in it"
            )
        return value.absolute()
