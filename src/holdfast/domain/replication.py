"""Requests of an agent to its node's checkpoint-replicator, and the replicator's reports, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import RankRestore, ShardKey, ShardSource
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Prepare


@dataclass(frozen=True, slots=True)
class Configure:
    """Configuration of a job: its ranks on this node, and where copies go. Replaces the job's previous configuration."""

    job: str
    generation: int
    attempt: int
    mesh: Mesh
    ranks: tuple[int, ...]  # on this node
    peers: tuple[ShardSource, ...]  # replicators that get a copy of every shard committed on this node
    keep: int  # complete checkpoints that each tier keeps
    token: str  # the job's secret; a data connection without it is refused
    store: str = ""  # URL of the object store; empty = none
    store_interval_s: float = 300.0
    store_keep: int = 3
    first_attempt: int = 0  # of this submission: checkpoints of older attempts belong to earlier runs; 0 = not known

    @classmethod
    def of(cls, order: Prepare) -> Configure:
        """The configuration for the generation that a node prepares."""
        return cls(
            job=order.job,
            generation=order.generation,
            attempt=order.attempt,
            mesh=order.mesh,
            ranks=tuple(order.placement.ranks),
            peers=order.peers,
            keep=order.checkpoint.keep,
            token=order.token,
            store=order.checkpoint.store,
            store_interval_s=order.checkpoint.store_interval_s,
            store_keep=order.checkpoint.store_keep,
            first_attempt=order.first_attempt,
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """Fetch and verify these shards within `timeout_s`."""

    job: str
    shards: tuple[RankRestore, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class UploadNow:
    """Upload this step of the running generation to the object store, if the job has one, regardless of its interval."""

    job: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class CommonCheckpoint:
    """The newest checkpoint whose shards are all on the disks of their own nodes and, if there are several nodes, on a peer.
    Until a newer one replaces it, no node deletes this checkpoint, or one that may become the next common checkpoint."""

    job: str
    attempt: int
    step: int

    @property
    def checkpoint_id(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job has ended with this generation. Its files are retained; its memory is freed when the files are on disk."""

    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class PruneSteps:
    """Delete these checkpoints, (attempt, step), on request."""

    job: str
    steps: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class StagedShard:
    """One shard that a rank can restore from: a local file that matches its checksums."""

    rank: int
    shard: ShardKey
    path: str
    source: str  # "memory", "disk", "object store", or the name of the node that sent the shard
    size: int = 0  # bytes of the shard


class TroubleKind(StrEnum):
    SET_ASIDE = "set_aside"  # a file in the place of a shard is not a readable shard; it was renamed
    LEFT_ALONE = "left_alone"  # such a file could not be renamed, or belongs to another release
    TIER_FAILS = "tier_fails"  # memory, disk or a peer accepts no copies
    IMAGE_LOCKED = "image_locked"  # a worker cannot save into an image that stays locked although no restore reads it
    SAVES_MISSED = "saves_missed"  # a rank missed several saves in a row


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why checkpoints of a job cannot be made, copied or kept on this node."""

    kind: TroubleKind
    place: str  # a path, a tier, "rank 3"
    reason: str
    since: float  # Unix s
