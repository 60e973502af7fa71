"""Types of the plan: the state of one job on a node, and the steps that the plan can return."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final, assert_never

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.replicator.names import label

NO_RANKS: Final = frozenset[int]()


class Tier(StrEnum):
    """The places of shards on this node. The first two are the memory tier."""

    IMAGE = "image"  # a worker's image
    STAGED = "staged"  # a shard fetched for a restore, in memory
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Held:
    """One verified shard in one tier."""

    tier: Tier
    key: ShardKey


class Copies(Collection[Held]):
    """The shards of one job on this node, by tier and checkpoint. Immutable: a change copies the checkpoints of one tier. So
    neither a change nor a plan looks at every shard."""

    __slots__ = ("_tiers",)

    def __init__(self, tiers: Mapping[Tier, Mapping[CheckpointId, frozenset[int]]] | None = None) -> None:
        self._tiers: Mapping[Tier, Mapping[CheckpointId, frozenset[int]]] = tiers or {tier: {} for tier in Tier}

    @classmethod
    def of(cls, shards: Iterable[Held]) -> Copies:
        copies = cls()
        for held in shards:
            copies = copies.with_shard(held)
        return copies

    def in_tier(self, tier: Tier) -> Mapping[CheckpointId, frozenset[int]]:
        """Return the ranks of which the tier has a shard, by (attempt, step)."""
        return self._tiers[tier]

    def with_shard(self, held: Held) -> Copies:
        at = held.key.checkpoint
        return self._with(held.tier, at, self._tiers[held.tier].get(at, NO_RANKS) | {held.key.rank})

    def without(self, held: Held) -> Copies:
        at = held.key.checkpoint
        return self._with(held.tier, at, self._tiers[held.tier].get(at, NO_RANKS) - {held.key.rank})

    def _with(self, tier: Tier, at: CheckpointId, ranks: frozenset[int]) -> Copies:
        steps = dict(self._tiers[tier])
        if ranks:
            steps[at] = ranks
        else:
            steps.pop(at, None)
        return Copies({**self._tiers, tier: steps})

    def __contains__(self, held: object) -> bool:
        return isinstance(held, Held) and held.key.rank in self._tiers[held.tier].get(held.key.checkpoint, NO_RANKS)

    def __iter__(self) -> Iterator[Held]:
        for tier, steps in self._tiers.items():
            for at, ranks in steps.items():
                yield from (Held(tier, ShardKey(*at, rank)) for rank in ranks)

    def __len__(self) -> int:
        return sum(len(ranks) for steps in self._tiers.values() for ranks in steps.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Copies) and self._tiers == other._tiers

    def __hash__(self) -> int:
        return hash(frozenset(self))

    def __repr__(self) -> str:
        return f"Copies.of({list(self)!r})"


# ---------------------------------------------------------------- the object store


@dataclass(frozen=True, slots=True)
class Save:
    """A save of this node's workers, with its time (Unix seconds of their clock)."""

    attempt: int
    step: int
    created_at: float


@dataclass(frozen=True, slots=True)
class Archived:
    """One checkpoint in the object store. `idle_s`: age of its newest object at the last listing, by the store's clock. The age
    is relative to the newest object of the job and therefore an underestimate."""

    attempt: int
    step: int
    complete: bool
    idle_s: float = 0.0
    damaged: bool = False  # was complete, but cannot be restored

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)


@dataclass(frozen=True, slots=True)
class Archive:
    """This node's knowledge of the object store. `surveyed`: the bucket has been listed since the last change."""

    interval_s: float
    keep: int
    surveyed: bool
    saves: tuple[Save, ...] = ()  # oldest first
    steps: tuple[Archived, ...] = ()  # newest first
    uploaded: frozenset[ShardKey] = frozenset()  # uploaded shards of this node's ranks
    # (attempt, step) with a requested upload, regardless of the interval.
    asked: frozenset[CheckpointId] = frozenset()


# ---------------------------------------------------------------- everything


@dataclass(frozen=True)
class View:
    """The input of the plan. `attempt` 0 without `ranks` = the job has not been configured yet."""

    attempt: int
    ranks: tuple[int, ...]  # this node's ranks in the current generation
    world_size: int
    keep: int
    peers: tuple[str, ...]  # node names
    held: Copies
    restored: CheckpointId | None = None  # (attempt, step) from which the current attempt started
    pushed: frozenset[tuple[ShardKey, str]] = frozenset()  # (shard, peer) that has it on disk
    sent: frozenset[tuple[ShardKey, str]] = frozenset()  # (newest shard of a rank, peer) that has it in memory at least
    pinned: frozenset[Held] = frozenset()  # returned for a restore
    disk_full: bool = False
    disk_fails: bool = False  # returns errors; the plan neither copies to the disk nor relies on it
    archive: Archive | None = None  # None = the job has no object store
    fresh: tuple[ShardKey, ...] = ()  # images that are being committed and can be copied already
    saved_by_all: CheckpointId | None = None  # newest (attempt, step) on every node; None = unknown
    first_attempt: int = 0  # of this run; older attempts belong to earlier runs
    expired_before: int = 0  # attempts before this one are older than the retention period
    ended: bool = False  # the job has ended
    images_left: bool = False  # the ended job's images have not been freed yet

    @cached_property
    def on_lineage(self) -> Mapping[Tier, list[CheckpointId]]:
        """The checkpoints of each tier that are not abandoned, oldest first."""
        return {tier: sorted(at for at in self.held.in_tier(tier) if not is_abandoned(self, at)) for tier in Tier}

    @cached_property
    def whole(self) -> dict[tuple[Tier, ...], list[CheckpointId]]:
        """The results of `whole_steps`, by tiers."""
        return {}

    @cached_property
    def newest(self) -> dict[tuple[Tier, ...], dict[int, CheckpointId]]:
        """The newest checkpoint of each rank, by tiers."""
        return {}

    @property
    def common(self) -> CheckpointId | None:
        """The newest checkpoint on the lineage that every node is known to have. Not of a state that is known to be corrupt."""
        return None if self.saved_by_all is None or is_abandoned(self, self.saved_by_all) else self.saved_by_all

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
    tier: Tier
    key: ShardKey
    reason: str


@dataclass(frozen=True, slots=True)
class FreeImages:
    """Free the memory of the workers' images."""

    reason: str


@dataclass(frozen=True, slots=True)
class Survey:
    """List the job's checkpoints in the object store."""

    reason: str


@dataclass(frozen=True, slots=True)
class Upload:
    """Upload one rank's shard."""

    key: ShardKey
    reason: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Check whether all shards of these steps are uploaded, and if so write the checkpoint's manifest."""

    ages: tuple[CheckpointId, ...]  # (attempt, step), newest first
    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete a checkpoint from the object store."""

    checkpoint_id: CheckpointId  # (attempt, step)
    reason: str


ArchiveStep = Survey | Upload | Complete | Discard
Step = CopyToDisk | Push | Delete | FreeImages | ArchiveStep


def what(step: Step) -> str:
    """Return the object of a step, for logs."""
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
    """Sort key for shards of one rank, oldest first."""
    return key.checkpoint


def is_abandoned(view: View, key: CheckpointId) -> bool:
    """Whether an older attempt saved (attempt, step) beyond the step from which the current attempt started."""
    if key.attempt >= view.attempt:
        return False
    return view.restored is None or key > view.restored


def is_kept(view: View, key: CheckpointId) -> bool:
    """Whether (attempt, step) belongs to an earlier run of this name. It is deleted on request or after the retention
    period."""
    return view.expired_before <= key.attempt < view.first_attempt


def whole_steps(view: View, tiers: tuple[Tier, ...]) -> list[CheckpointId]:
    """Return the steps on the lineage for which these tiers have the shards of all local ranks, oldest first."""
    if (known := view.whole.get(tiers)) is not None:
        return known
    mine = frozenset(view.ranks)
    ranks_at: dict[CheckpointId, frozenset[int]] = {}
    for tier in tiers:
        there = view.held.in_tier(tier)
        for at in view.on_lineage[tier]:
            ranks_at[at] = ranks_at.get(at, NO_RANKS) | there[at]
    found = view.whole[tiers] = sorted(at for at, ranks in ranks_at.items() if mine and mine <= ranks)
    return found
