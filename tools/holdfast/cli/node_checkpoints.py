"""Checkpoints on the nodes of a job: selection, download from the replicators, deletion."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli.client import Client
from holdfast.cli.connection import Json
from holdfast.domain.errors import HoldfastError, NotFound, Unavailable
from holdfast.domain.generations import ShardKey, ShardSource
from holdfast.domain.mesh import Mesh
from holdfast.domain.tiers import NEARNESS
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.transport.client import Client as DataClient
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.transport.secure import MODE, Secure
from holdfast.replicator.wanted import Wanted
from holdfast.runtime.settings import ServiceSettings

LIMITS = Limits(connect_timeout_s=5.0, io_timeout_s=30.0)


@dataclass(frozen=True, slots=True)
class OnNodes:
    """One complete checkpoint on connected nodes."""

    job: str
    attempt: int
    step: int
    mesh: dict[str, int]

    @property
    def ranks(self) -> range:
        count = 1
        for size in self.mesh.values():
            count *= size
        return range(count)


def choose(client: Client, job: str, step: int | None, attempt: int | None) -> OnNodes:
    """Return the checkpoint that a restart would restore, or that of `step` and `attempt`. Raises `NotFound`."""
    rows = [row for row in client.checkpoints(job) if _is_complete(row)]
    rows.sort(key=lambda row: (row["newest"], row["attempt"], row["step"]), reverse=True)
    for row in rows:
        if step in (None, row["step"]) and attempt in (None, row["attempt"]):
            return OnNodes(job, row["attempt"], row["step"], dict(row["mesh"]))
    present = ", ".join(f"{row['step']} (attempt {row['attempt']})" for row in rows) or "none"
    wanted = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
    raise NotFound(f"no {wanted} of {job} on the connected nodes; complete ones: {present}")


def described(client: Client, job: str, step: int | None, attempt: int | None) -> Json:
    """Return one checkpoint with the connected nodes that hold the shard of each rank. A step that is named may be incomplete.
    Raises `NotFound`."""
    rows = [row for row in client.checkpoints(job) if row["step"] == step and attempt in (None, row["attempt"])]
    if step is None or not any(any(_ranks(row)) for row in rows):
        meant = choose(client, job, step, attempt)
    else:
        row = max(rows, key=lambda row: (row["newest"], row["complete"], row["attempt"]))
        meant = OnNodes(job, row["attempt"], row["step"], dict(row["mesh"]))
    holders, mesh = client.checkpoint_holders(job, meant.attempt, meant.step), Mesh.of(meant.mesh)
    return {
        "job": job,
        "step": meant.step,
        "attempt": meant.attempt,
        "mesh": meant.mesh,
        "complete": all(holders.get(rank) for rank in meant.ranks),
        "ranks": [{"rank": rank, **mesh.coords(rank), "nodes": holders.get(rank, [])} for rank in meant.ranks],
    }


def fetch(client: Client, meant: OnNodes, ranks: Sequence[int], to: Path, advance: Callable[[int], None]) -> list[Path]:
    """Download and verify the shards of these ranks with their manifests into `to`, from any node that holds them.

    Uses the certificate that the environment names, as a service does. Raises InvalidSpec for one that cannot be used."""
    sources = client.checkpoint_sources(meant.job, meant.attempt, meant.step)
    secure = Secure(ServiceSettings().tls, optional=os.environ.get(MODE) == "optional")
    into, data = FileTier("disk", to), DataClient(LIMITS, OpenSockets(), secure)
    paths = []
    for rank in ranks:
        key = ShardKey(meant.attempt, meant.step, rank)
        paths.append(_fetch(data, meant.job, str(sources["token"]), key, sources["ranks"].get(str(rank), {}), into))
        advance(1)
    return paths


def prunable(client: Client, job: str, keep: int) -> tuple[list[Json], list[Json]]:
    """Return (rows to delete, rows to retain), newest first. Retains the newest `keep` complete ones, newer incomplete
    ones, and those that are needed."""
    go: list[Json] = []
    stay: list[Json] = []
    whole = 0
    for row in (row for row in client.checkpoints(job) if any(_ranks(row))):
        if row["needed"] or whole < keep:
            stay.append(row)
        else:
            go.append(row)
        whole += _is_complete(row)
    return go, stay


def _ranks(row: Json) -> list[int]:
    """Return the number of ranks whose shard is in a tier, for each tier of the nodes."""
    return [row["tiers"].get(tier, 0) for tier in NEARNESS]


def _is_complete(row: Json) -> bool:
    """Return whether a checkpoint is complete on the nodes, regardless of the object store."""
    count = 1
    for size in row["mesh"].values():
        count *= size
    return bool(max(_ranks(row)) == count)


def _fetch(data: DataClient, job: str, token: str, key: ShardKey, nodes: dict[str, str], into: FileTier) -> Path:
    reasons = []
    for node, endpoint in sorted(nodes.items()):
        try:
            return data.fetch(ShardSource(node, endpoint), job, token, Wanted(key), into)
        except HoldfastError as error:
            reasons.append(str(error))
    raise Unavailable(
        f"cannot fetch the shard of rank {key.rank} at step {key.step}: {'; '.join(reasons) or 'no connected node holds it'}"
    )
