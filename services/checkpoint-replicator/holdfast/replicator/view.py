"""Types of the plan: the state of one job on a node, and the steps that the plan can return."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.replicator.names import label


class Store(StrEnum):
    """Where on this node: two of them are the memory tier."""

    IMAGE = "image"  # a worker's own image
    STAGED = "staged"  # a shard fetched for a restore, in memory
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Held:
    """One verified shard in one store."""

    store: Store
    key: ShardKey


# ---------------------------------------------------------------- the object store


@dataclass(frozen=True, slots=True)
class Save:
    """This node's workers saved this step, at this time (Unix s, by their clock)."""

    attempt: int
    step: int
    created_at: float


@dataclass(frozen=True, slots=True)
class Archived:
    """One step in the object store. `idle_s`: for how long nothing had been added to it when the bucket was last listed, by
    the store's own clock (against the newest object of the job, so rather less than more)."""

    attempt: int
    step: int
    complete: bool
    idle_s: float = 0.0
    damaged: bool = False  # was complete, and cannot be restored any more

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)


@dataclass(frozen=True, slots=True)
class Archive:
    """The object store as it is known here; `surveyed` = the bucket has been listed since the last change."""

    interval_s: float
    keep: int
    surveyed: bool
    saves: tuple[Save, ...] = ()  # oldest first
    steps: tuple[Archived, ...] = ()  # newest first
    uploaded: frozenset[ShardKey] = frozenset()  # shards of this node's ranks that are there
    # (attempt, step) that somebody wants there whatever the interval says.
    asked: frozenset[CheckpointId] = frozenset()

    def is_complete(self, checkpoint_id: CheckpointId) -> bool:
        return any(step.complete and step.id == checkpoint_id for step in self.steps)


# ---------------------------------------------------------------- everything


@dataclass(frozen=True, slots=True)
class View:
    """All that a plan depends on. `attempt` 0 with no `ranks` = nobody has configured this job yet."""

    attempt: int
    ranks: tuple[int, ...]  # this node's, in the current generation
    world_size: int
    keep: int
    peers: tuple[str, ...]  # node names
    held: tuple[Held, ...]
    restored: CheckpointId | None = None  # (attempt, step) that the current attempt started from
    pushed: frozenset[tuple[ShardKey, str]] = frozenset()  # (shard, peer) known to be there
    pinned: frozenset[Held] = frozenset()  # handed out for a restore
    disk_full: bool = False
    disk_fails: bool = False  # it answers with errors: nothing is copied there, and nothing is deleted for it
    archive: Archive | None = None  # None = the job has no object store
    fresh: tuple[ShardKey, ...] = ()  # images that are being committed: as good as held for whoever copies them
    saved_by_all: CheckpointId | None = None  # newest (attempt, step) known to be safe on every node; None = not told
    first_attempt: int = 0  # of this submission; what older attempts saved is an earlier one's
    expired_before: int = 0  # what attempts before it saved has been kept for as long as it was to be
    ended: bool = False  # the job is over
    images_left: bool = False  # … and its workers' images have not been given back yet

    @property
    def disk_takes_nothing(self) -> bool:
        return self.disk_full or self.disk_fails


@dataclass(frozen=True, slots=True)
class CopyToDisk:
    key: ShardKey
    reason: str


@dataclass(frozen=True, slots=True)
class Push:
    key: ShardKey
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Delete:
    store: Store
    key: ShardKey
    reason: str


@dataclass(frozen=True, slots=True)
class FreeImages:
    """Give back the memory of the workers' images."""

    reason: str


@dataclass(frozen=True, slots=True)
class Survey:
    """List what the object store holds of the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class Upload:
    """Have one rank's share of a step in the object store."""

    key: ShardKey
    reason: str


@dataclass(frozen=True, slots=True)
class Complete:
    """See whether every rank's share of these steps is there, and if so write the manifest that makes it a checkpoint."""

    ages: tuple[CheckpointId, ...]  # (attempt, step), newest first
    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove a step from the object store."""

    checkpoint_id: CheckpointId  # (attempt, step)
    reason: str


ArchiveStep = Survey | Upload | Complete | Discard
Step = CopyToDisk | Push | Delete | FreeImages | ArchiveStep


def what(step: Step) -> str:
    """What a step is about, for logs."""
    match step:
        case CopyToDisk(key) | Push(key) | Delete(_, key) | Upload(key):
            return label(key)
        case Complete(ages):
            return ", ".join(f"step {number} (attempt {attempt})" for attempt, number in ages)
        case Discard(checkpoint_id):
            return f"step {checkpoint_id.step} (attempt {checkpoint_id.attempt})"
        case Survey():
            return "all steps"
        case FreeImages():
            return "all images"
        case _:
            assert_never(step)


def id_of(key: ShardKey) -> CheckpointId:
    """Sorts shards of one rank, oldest first."""
    return key.checkpoint


def is_abandoned(view: View, key: CheckpointId) -> bool:
    """Whether (attempt, step) was saved by an older attempt, beyond the step that the current one started from."""
    if key.attempt >= view.attempt:
        return False
    return view.restored is None or key > view.restored


def is_kept(view: View, key: CheckpointId) -> bool:
    """Whether (attempt, step) was saved by an earlier submission under this name: it is deleted when somebody asks for it, or
    when it has been kept for as long as it was to be."""
    return view.expired_before <= key.attempt < view.first_attempt


def whole_steps(view: View, stores: tuple[Store, ...]) -> list[CheckpointId]:
    """Live steps of which every rank of this node is in these stores, oldest first."""
    ranks_at: dict[CheckpointId, set[int]] = {}
    for held in view.held:
        if held.store in stores and not is_abandoned(view, id_of(held.key)):
            ranks_at.setdefault(id_of(held.key), set()).add(held.key.rank)
    mine = set(view.ranks)
    return sorted(step for step, ranks in ranks_at.items() if mine and mine <= ranks)
