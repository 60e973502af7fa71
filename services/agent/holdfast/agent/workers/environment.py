"""The environment of a worker: torchrun's variables, so that an unmodified script runs, and Holdfast's own. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.domain import tracing, worker
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Prepare
from holdfast.domain.replication import StagedShard
from holdfast.runtime.processes.training_user import TrainingUser

ENV_RANK_MONITOR = "FT_RANK_MONITOR_IPC_SOCKET"  # as nvidia-resiliency-ext's launcher sets it
PRIVATE_PREFIX = "HOLDFAST_"  # of the agent's own settings, which workers must not inherit


@dataclass(frozen=True, slots=True)
class Site:
    """Paths on this node."""

    agent_dir: Path
    memory_dir: Path
    disk_dir: Path
    notes: Path  # the agent's datagram socket
    replicator_notes: str  # the replicator's datagram socket; empty = no replicator
    user: TrainingUser | None = None  # of the workers; None = the agent's (`apart`)

    @property
    def apart(self) -> Path:
        """Directory in which workers create files and sockets: the agent's own if they run as its user."""
        return self.agent_dir if self.user is None else self.agent_dir / "w"

    @property
    def home(self) -> Path:
        """Home directory of a training user that has none."""
        return self.agent_dir / "home"

    @property
    def workers_replicator(self) -> str:
        """The replicator's socket, as workers get it: of another user's workers, the agent passes notes on."""
        return self.replicator_notes if self.user is None else ""

    @property
    def rank_monitor(self) -> Path:
        """Socket for scripts with nvidia-resiliency-ext's client (`ft_server`)."""
        return self.agent_dir / "ft.sock"

    @property
    def learned(self) -> Path:
        """Directory of the lists of modules that scripts import (`learned`)."""
        return self.agent_dir / "learned"

    def recorder(self, job: str, generation: int, rank: int) -> Path:
        """Socket of a worker's flight recorder. The name is short because a socket's path has at most 107 bytes."""
        return self.apart / f"fr-{_digest(job)}-{generation}-{rank}.sock"

    def error_file(self, job: str, generation: int, rank: int, log_directory: Path) -> Path:
        """Error file of a worker: with its log, or in a directory that its user can write."""
        if self.user is None:
            return log_directory / f"rank-{rank}.error.json"
        return self.apart / f"{_digest(job)}-{generation}-{rank}.error.json"

    def recorders(self) -> list[Path]:
        """Return all recorder sockets, including those of ended generations."""
        return list(self.apart.glob("fr-*.sock"))

    def images(self, job: str, local_rank: int) -> Path:
        return self.memory_dir / job / f"w{local_rank}"

    def overflow(self, job: str, local_rank: int) -> Path:
        """Directory for images if memory has no room."""
        return self.disk_dir / job / "overflow" / f"w{local_rank}"


def inherited_environment(environ: Mapping[str, str], site: Site | None = None) -> dict[str, str]:
    """Return the agent's environment without the agent's own settings, for templates and workers: of the user that they run
    as."""
    inherited = {name: value for name, value in environ.items() if not name.startswith(PRIVATE_PREFIX)}
    return inherited if site is None or site.user is None else site.user.environment(inherited, site.home)


def worker_environment(
    order: Prepare,
    local_rank: int,
    site: Site,
    error_path: Path,
    inherited: Mapping[str, str],
    secrets: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return all variables that are known before `start`. Variables of torchrun take precedence over those of the job.
    `secrets`: the values of `env_from`."""
    rank, world_size = order.placement.first_rank + local_rank, order.mesh.world_size
    environment = {**inherited, **dict(order.launch.env), **(secrets or {})}
    if order.placement.nproc > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(order.placement.nproc),
        "GROUP_RANK": str(order.placement.slot),
        "GROUP_WORLD_SIZE": str(order.nnodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": order.job,
        "TORCHELASTIC_RESTART_COUNT": str(order.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(order.generation),  # not a limit of Holdfast; torch only logs it
        "TORCHELASTIC_ERROR_FILE": str(error_path),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        ENV_RANK_MONITOR: str(site.rank_monitor),
        worker.ENV_NOTES: str(site.notes),
        worker.ENV_RECORDER: str(site.recorder(order.job, order.generation, rank)),
        worker.ENV_REPLICATOR: site.workers_replicator,
        worker.ENV_JOB: order.job,
        worker.ENV_GENERATION: str(order.generation),
        worker.ENV_ATTEMPT: str(order.attempt),
        worker.ENV_FIRST_ATTEMPT: str(order.first_attempt),
        worker.ENV_MESH: _mesh(order.mesh),
        worker.ENV_IMAGES: str(site.images(order.job, local_rank)),
        worker.ENV_IMAGE_FALLBACK_DIR: str(site.overflow(order.job, local_rank)),
        worker.ENV_INTERVAL_STEPS: str(order.checkpoint.interval_steps),
        worker.ENV_REPLICA_CHECK_STEPS: str(order.checks.replica_every_steps),
    }
    if order.restore_step and order.restore_mesh is not None:
        environment[worker.ENV_PREVIOUS_MESH] = _mesh(order.restore_mesh)
    if own := tracing.below(order.traceparent, tracing.FIRST_STEP, order.generation, rank):
        environment[worker.ENV_TRACEPARENT] = own
    return environment


def start_environment(order: Prepare, master: tuple[str, int], parts: Sequence[StagedShard]) -> dict[str, str]:
    """Return the variables that one worker receives with `start`: the rendezvous endpoint, and the shards to restore.

    If there are several shards, `path` is the one that was saved at this rank's coordinates, because it contains the rank's
    random numbers. For a new rank, `path` is the first shard.
    """
    host, port = master
    environment = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    if parts:
        saved_by = order.mesh.counterpart(parts[0].rank, order.restore_mesh or order.mesh)
        own = next((part for part in parts if part.shard.rank == saved_by), parts[0])
        target: dict[str, object] = {"step": own.shard.step, "attempt": own.shard.attempt, "path": own.path}
        if len(parts) > 1:
            target["paths"] = [part.path for part in parts]
        environment[worker.ENV_RESTORE] = json.dumps(target)
    return environment


def _digest(job: str) -> str:
    return f"{zlib.crc32(job.encode()):08x}"


def _mesh(mesh: Mesh) -> str:
    return json.dumps(dict(mesh.dims))
