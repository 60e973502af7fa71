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
TOLD_EXTRA = 4  # complete checkpoints reported beyond `keep`, because a deletion may be in progress


@dataclass(slots=True)
class JobArchive:
    """`stored` describes complete checkpoints, `steps` all of the last listing. Changes by other nodes appear in the
    next one."""

    saves: dict[CheckpointId, Save] = field(default_factory=dict)
    steps: dict[CheckpointId, Archived] = field(default_factory=dict)
    stored: dict[CheckpointId, StoredStep] = field(default_factory=dict)
    uploaded: set[ShardKey] = field(default_factory=set)
    asked: set[CheckpointId] = field(default_factory=set)
    # Downloads that arrived damaged; the store's copies are to be checked.
    suspects: list[ShardKey] = field(default_factory=list)
    surveyed: bool = False

    def saved(self, manifest: Manifest) -> None:
        """Record a save of a worker of this node. The time is that of the first rank."""
        save = Save(manifest.attempt, manifest.step, manifest.created_at)
        self.saves.setdefault(CheckpointId(save.attempt, save.step), save)
        while len(self.saves) > SAVES_MAX:
            del self.saves[min(self.saves)]

    def configured(self, before: Configure | None, config: Configure) -> None:
        """Require a new listing for a new generation, because other nodes may have completed or deleted checkpoints."""
        if before is not None and before.store != config.store:
            self.steps, self.stored, self.uploaded = {}, {}, set()
        self.surveyed = False
        self.uploaded = {key for key in self.uploaded if key.attempt == config.attempt}
        self.asked = {checkpoint_id for checkpoint_id in self.asked if checkpoint_id.attempt == config.attempt}

    def ask(self, attempt: int, step: int) -> None:
        """Record a requested upload. Every node receives the same request, so that the checkpoint becomes complete."""
        self.asked = set(sorted({*self.asked, CheckpointId(attempt, step)})[-ASKED_MAX:])

    def found(self, surveyed: Surveyed) -> None:
        """Replace the known checkpoints by those of a listing."""
        self.steps = {step.id: step for step in surveyed.steps}
        self.stored = dict(surveyed.stored)
        # Of this node's workers.
        self.uploaded |= {key for key in surveyed.uploaded if key.checkpoint in self.saves}
        self.surveyed = True

    def completed(self, step: StoredStep, *, owner: bool) -> None:
        """Record a complete checkpoint. The `owner` decides about deletions next, for which it needs a new listing."""
        checkpoint_id = step.id
        self.steps[checkpoint_id] = Archived(*checkpoint_id, complete=True)
        self.stored[checkpoint_id] = step
        self.surveyed = self.surveyed and not owner

    def suspect(self, key: ShardKey) -> None:
        if key not in self.suspects and len(self.suspects) < SUSPECTS_MAX:
            self.suspects.append(key)

    def found_damaged(self, checkpoint_id: CheckpointId, problem: str) -> None:
        """Mark a checkpoint as damaged, so that it is not restored from the store."""
        self.steps[checkpoint_id] = Archived(*checkpoint_id, complete=False, damaged=True)
        if checkpoint_id in self.stored:
            self.stored[checkpoint_id] = replace(self.stored[checkpoint_id], damage=problem)

    def is_damaged(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self.steps and self.steps[checkpoint_id].damaged

    def discarded(self, checkpoint_id: CheckpointId) -> None:
        self.steps.pop(checkpoint_id, None)
        self.stored.pop(checkpoint_id, None)

    def reported_steps(self, keep: int) -> tuple[StoredStep, ...]:
        """Return the checkpoints to report, newest first."""
        newest = sorted(self.stored, reverse=True)[: keep + TOLD_EXTRA]
        return tuple(self.stored[checkpoint_id] for checkpoint_id in newest)

    @property
    def newest_is_sharded(self) -> bool:
        """Whether replicas hold different tensors, according to the newest checkpoint in the store."""
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
