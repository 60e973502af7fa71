"""State of one job's object store as this node knows it. Used by the event loop only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey, StoredStep
from holdfast.domain.replication import Configure
from holdfast.replicator.bucket import Surveyed
from holdfast.replicator.view import Archive, Archived, Save
from holdfast.shards import Manifest

SAVES_MAX = 64
ASKED_MAX = 8  # the newest
SUSPECTS_MAX = 64
TOLD_EXTRA = 4  # complete steps told beyond those that are kept: a deletion may be under way


@dataclass(slots=True)
class JobArchive:
    """`stored` describes complete steps, `steps` all that were seen; what others change shows at the next survey."""

    saves: dict[CheckpointId, Save] = field(default_factory=dict)
    steps: dict[CheckpointId, Archived] = field(default_factory=dict)
    stored: dict[CheckpointId, StoredStep] = field(default_factory=dict)
    uploaded: set[ShardKey] = field(default_factory=set)
    asked: set[CheckpointId] = field(default_factory=set)
    suspects: list[ShardKey] = field(default_factory=list)  # arrived damaged; to be looked at in the store
    surveyed: bool = False

    def saved(self, manifest: Manifest) -> None:
        """A worker of this node has saved this step; the first rank's time counts."""
        save = Save(manifest.attempt, manifest.step, manifest.created_at)
        self.saves.setdefault(CheckpointId(save.attempt, save.step), save)
        for checkpoint_id in sorted(self.saves)[:-SAVES_MAX]:
            del self.saves[checkpoint_id]

    def configured(self, before: Configure | None, config: Configure) -> None:
        """A new generation looks anew: others may have completed or discarded steps."""
        if before is not None and before.store != config.store:
            self.steps, self.stored, self.uploaded = {}, {}, set()
        self.surveyed = False
        self.uploaded = {key for key in self.uploaded if key.attempt == config.attempt}
        self.asked = {checkpoint_id for checkpoint_id in self.asked if checkpoint_id.attempt == config.attempt}

    def ask(self, attempt: int, step: int) -> None:
        """Every node is asked alike, so that the step can become complete."""
        self.asked = set(sorted({*self.asked, CheckpointId(attempt, step)})[-ASKED_MAX:])

    def found(self, surveyed: Surveyed) -> None:
        """A listing replaces what was known."""
        self.steps = {step.id: step for step in surveyed.steps}
        self.stored = dict(surveyed.stored)
        self.uploaded |= {key for key in surveyed.uploaded if key.checkpoint in self.saves}  # ours to upload
        self.surveyed = True

    def completed(self, step: StoredStep, *, owner: bool) -> None:
        """`owner` decides what leaves the store now, and for that has to see all of it."""
        checkpoint_id = step.id
        self.steps[checkpoint_id] = Archived(*checkpoint_id, complete=True)
        self.stored[checkpoint_id] = step
        self.surveyed = self.surveyed and not owner

    def suspect(self, key: ShardKey) -> None:
        if key not in self.suspects and len(self.suspects) < SUSPECTS_MAX:
            self.suspects.append(key)

    def found_damaged(self, checkpoint_id: CheckpointId, problem: str) -> None:
        """It must not be restored from the store any more."""
        self.steps[checkpoint_id] = Archived(*checkpoint_id, complete=False, damaged=True)
        if checkpoint_id in self.stored:
            self.stored[checkpoint_id] = replace(self.stored[checkpoint_id], damage=problem)

    def is_damaged(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self.steps and self.steps[checkpoint_id].damaged

    def discarded(self, checkpoint_id: CheckpointId) -> None:
        self.steps.pop(checkpoint_id, None)
        self.stored.pop(checkpoint_id, None)

    def told(self, keep: int) -> tuple[StoredStep, ...]:
        """Newest first."""
        newest = sorted(self.stored, reverse=True)[: keep + TOLD_EXTRA]
        return tuple(self.stored[checkpoint_id] for checkpoint_id in newest)

    @property
    def newest_is_sharded(self) -> bool:
        """Whether replicas hold different tensors, as far as the newest checkpoint in the store tells."""
        return bool(self.stored) and self.stored[max(self.stored)].sharded

    def view(self, config: Configure) -> Archive | None:
        if not config.store:
            return None
        return Archive(
            interval_s=config.store_interval_s,
            keep=config.store_keep,
            surveyed=self.surveyed,
            saves=tuple(self.saves[checkpoint_id] for checkpoint_id in sorted(self.saves)),
            steps=tuple(self.steps[checkpoint_id] for checkpoint_id in sorted(self.steps, reverse=True)),
            uploaded=frozenset(self.uploaded),
            asked=frozenset(self.asked),
        )
