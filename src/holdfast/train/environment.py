"""Identity of this process, from the environment, which the library reads only here.

There are three ways to be started:

* `HOLDFAST_JOB` is set: by an agent (see `holdfast.domain.worker`). The mesh is that of the job.
* Only `RANK` and `WORLD_SIZE` are set: by torchrun or a similar launcher. The mesh is that of the script, default `{"dp":
  WORLD_SIZE}`. A node is a host and torchrun's `GROUP_RANK` on it.
* Neither: plain `python train.py`, a world of one.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.domain import worker
from holdfast.domain.errors import InvalidSpec
from holdfast.domain.mesh import DATA_PARALLEL, Mesh

COPY_THREADS_MAX = 16  # more threads do not copy faster


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place in the mesh of one generation."""

    mesh: Mesh
    rank: int
    generation: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return self.mesh.world_size

    @property
    def dp_size(self) -> int:
        """Number of data-parallel replicas."""
        return self.mesh.dp

    @property
    def dp_index(self) -> int:
        """Index of the replica that this rank belongs to."""
        return self.mesh.replica_of(self.rank)

    def size(self, dim: str) -> int:
        """Return the number of ranks along `dim`; 1 if the mesh has no such dimension."""
        return dict(self.mesh.dims).get(dim, 1)

    def index(self, dim: str) -> int:
        """Return this rank's index along `dim`; 0 if the mesh has no such dimension."""
        return self.mesh.coords(self.rank).get(dim, 0)


@dataclass(frozen=True, slots=True)
class RestoreTarget:
    """The shard that this rank starts from: verified by the replicator, readable at `path`.

    If the state was sharded differently, `paths` are all shards that it is assembled from, including `path`; empty =
    only `path`.
    """

    step: int
    attempt: int
    path: str
    paths: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Every shard to read from. The first one provides the plain values and the random number generators."""
        return (self.path, *(path for path in self.paths if path != self.path))


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything that the library takes from the environment."""

    world: World
    local_rank: int = 0
    node: str = ""  # ranks with equal `node` see the same files
    job: str = ""  # empty: not started by an agent
    attempt: int = 0
    first_attempt: int = 0  # of this submission; 0: not known
    master: tuple[str, int] | None = None  # host, port of the rendezvous; None = a world of one without a network
    previous_mesh: Mesh | None = None
    restore: RestoreTarget | None = None
    images: str = ""  # empty: no saves
    image_fallback_dir: str = ""  # directory for images that do not fit in memory; empty: none
    copy_threads: int = 1  # of a save
    interval_steps: int = 0  # 0: only on request
    replica_check_steps: int = 0  # 0: never
    notes: str = ""
    replicator: str = ""
    recorder: str = ""  # socket of the flight recorder; empty: none
    control_fd: int | None = None
    began_s: float | None = None  # time.monotonic() when the script began; None: not known
    # Torchelastic's; written when an exception ends the script, unless the worker template writes it.
    error_file: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str], mesh: Mapping[str, int] | None = None) -> Environment:
        """Parse `environ`. `mesh` is the script's own layout, used only if no agent sets one.

        Raises `InvalidSpec` that names the variable, its value and the accepted values.
        """
        rank = _integer(environ, "RANK", 0)
        world_size = _integer(environ, "WORLD_SIZE", 1)
        layout = _mesh(environ, worker.ENV_MESH) or _layout(mesh, world_size)
        if layout.world_size != world_size:
            raise InvalidSpec("WORLD_SIZE", world_size, f"the {layout.world_size} ranks of mesh {layout}")
        if not 0 <= rank < world_size:
            raise InvalidSpec("RANK", rank, f"0 ≤ RANK < WORLD_SIZE ({world_size})")
        restore = _json_object(environ, worker.ENV_RESTORE)
        return cls(
            world=World(layout, rank, _integer(environ, worker.ENV_GENERATION, 0)),
            local_rank=_integer(environ, "LOCAL_RANK", 0),
            node=environ.get("HOLDFAST_NODE", "") or f"{socket.gethostname()}/{environ.get('GROUP_RANK', '0')}",
            job=environ.get(worker.ENV_JOB, ""),
            attempt=_integer(environ, worker.ENV_ATTEMPT, 0),
            first_attempt=_integer(environ, worker.ENV_FIRST_ATTEMPT, 0),
            master=_master(environ),
            previous_mesh=_mesh(environ, worker.ENV_PREVIOUS_MESH),
            restore=_restore_target(restore) if restore else None,
            images=environ.get(worker.ENV_IMAGES, ""),
            copy_threads=_copy_threads(environ),
            image_fallback_dir=environ.get(worker.ENV_IMAGE_FALLBACK_DIR, ""),
            interval_steps=_integer(environ, worker.ENV_INTERVAL_STEPS, 0),
            replica_check_steps=_integer(environ, worker.ENV_REPLICA_CHECK_STEPS, 0),
            notes=environ.get(worker.ENV_NOTES, ""),
            replicator=environ.get(worker.ENV_REPLICATOR, ""),
            recorder=environ.get(worker.ENV_RECORDER, ""),
            control_fd=_integer(environ, worker.ENV_CONTROL_FD, -1) if environ.get(worker.ENV_CONTROL_FD) else None,
            began_s=_seconds(environ, worker.ENV_BEGAN_S),
            error_file=environ.get("TORCHELASTIC_ERROR_FILE", ""),
        )


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    raw = environ.get(name, "")
    if not raw:
        return default
    try:
        return int(raw)
    except ValueError:
        raise InvalidSpec(name, raw, "an integer") from None


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    raw = environ.get(name, "")
    try:
        return float(raw) if raw else None
    except ValueError:
        raise InvalidSpec(name, raw, "a number of seconds") from None


def _copy_threads(environ: Mapping[str, str]) -> int:
    """Return 2 if the node has two cores per rank. Measured: with a free core a second thread is faster (0.09 instead of 0.17
    s per gigabyte), without one it makes no difference."""
    cores_per_rank = len(os.sched_getaffinity(0)) // max(1, _integer(environ, "LOCAL_WORLD_SIZE", 1))
    threads = _integer(environ, worker.ENV_COPY_THREADS, 2 if cores_per_rank > 1 else 1)
    if not 1 <= threads <= COPY_THREADS_MAX:
        raise InvalidSpec(worker.ENV_COPY_THREADS, threads, f"1 to {COPY_THREADS_MAX}")
    return threads


def _json_object(environ: Mapping[str, str], name: str) -> dict[str, Any]:
    raw = environ.get(name, "")
    if not raw:
        return {}
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidSpec(name, raw, "a JSON object")
    return value


def _mesh(environ: Mapping[str, str], name: str) -> Mesh | None:
    sizes = _json_object(environ, name)
    if not all(type(size) is int for size in sizes.values()):
        raise InvalidSpec(name, environ[name], 'a JSON object of sizes, such as {"dp": 2, "pp": 4}')
    return Mesh.of(sizes) if sizes else None


def _master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the rendezvous endpoint. Without RANK the world is one process and needs no endpoint, even if MASTER_ADDR
    is set."""
    host = environ.get("MASTER_ADDR", "")
    if not host or "RANK" not in environ:
        return None
    return host, _integer(environ, "MASTER_PORT", 29500)


def _restore_target(raw: Mapping[str, Any]) -> RestoreTarget:
    try:
        paths = tuple(map(str, raw.get("paths") or ()))
        return RestoreTarget(step=int(raw["step"]), attempt=int(raw["attempt"]), path=str(raw["path"]), paths=paths)
    except (KeyError, TypeError, ValueError, OverflowError):
        wanted = '{"step": int, "attempt": int, "path": str, "paths": [str] or absent}'
        raise InvalidSpec(worker.ENV_RESTORE, dict(raw), wanted) from None


def _layout(mesh: Mapping[str, int] | None, world_size: int) -> Mesh:
    """Return the script's mesh for `world_size` ranks; one dimension may be -1, which takes the remaining ranks."""
    if mesh is None:
        return Mesh.of({DATA_PARALLEL: world_size})
    fixed = math.prod(size for size in mesh.values() if size != -1)
    if list(mesh.values()).count(-1) > 1 or fixed < 1 or world_size % fixed:
        raise InvalidSpec("mesh", dict(mesh), f"sizes whose product is {world_size}, at most one of them -1")
    return Mesh.of({name: world_size // fixed if size == -1 else size for name, size in mesh.items()})
