"""What an agent asks of its node's checkpoint-replicator, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import RankRestore, ShardKey, ShardSource
from holdfast.domain.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Configure:
    """Which job to serve, and where copies go. Replaces the previous configuration of the job."""

    job: str
    generation: int
    attempt: int
    mesh: Mesh
    ranks: tuple[int, ...]  # on this node
    peers: tuple[ShardSource, ...]  # they get a copy of every shard committed here
    keep: int  # complete steps kept per tier
    token: str  # the job's secret: a data connection that does not present it is refused
    store: str = ""  # URL of the object store; empty = none
    store_interval_s: float = 300.0
    store_keep: int = 3
    first_attempt: int = 0  # of this submission: what older attempts saved belongs to earlier ones; 0 = not told


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
    """The newest step of which every rank's shard is on the disk of its own node and, if there are several nodes, on a peer.
    Until a newer one replaces it, no node deletes it or a step that may become the next one."""

    job: str
    attempt: int
    step: int

    @property
    def checkpoint_id(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job has ended with this generation. Its files are retained; its memory is freed when they are on disk."""

    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class PruneSteps:
    """Delete these saved steps, (attempt, step), on request."""

    job: str
    steps: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class StagedShard:
    """One shard that a rank can restore from: a local file whose checksums hold."""

    rank: int
    shard: ShardKey
    path: str
    source: str  # "memory", "disk", "object store" or the node it came from
    size: int = 0  # bytes of the shard


class TroubleKind(StrEnum):
    SET_ASIDE = "set_aside"  # what lay in a shard's place could not be read as one, and was moved out of the way
    LEFT_ALONE = "left_alone"  # the same, but it could not be moved, or belongs to another release
    TIER_FAILS = "tier_fails"  # memory, disk or a peer takes no copies
    IMAGE_LOCKED = "image_locked"  # a worker cannot save into an image that nobody reads
    SAVES_MISSED = "saves_missed"  # a rank's saves did not happen, several times in a row


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that keeps checkpoints of a job from being made, moved or kept on this node."""

    kind: TroubleKind
    place: str  # a path, a tier, "rank 3"
    reason: str
    since: float  # Unix s
