"""What this node knows of one job's object store. Touched by the event loop only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from holdfast.domain.generations import ShardKey, StoredStep
from holdfast.domain.replication import Configure
from holdfast.replicator.bucket import Surveyed
from holdfast.replicator.view import Archive, Archived, Save
from holdfast.shards import Manifest

SAVES_MAX = 64
ASKED_MAX = 8  # the newest
SUSPECTS_MAX = 64
TOLD_EXTRA = 4  # complete steps told beyond those that are kept: a deletion may be under way

_Age = tuple[int, int]


@dataclass(slots=True)
class JobArchive:
    """`stored` describes complete steps, `steps` all that were seen; what others change shows at the next survey."""

    saves: dict[_Age, Save] = field(default_factory=dict)
    steps: dict[_Age, Archived] = field(default_factory=dict)
    stored: dict[_Age, StoredStep] = field(default_factory=dict)
    uploaded: set[ShardKey] = field(default_factory=set)
    asked: set[_Age] = field(default_factory=set)
    suspects: list[ShardKey] = field(default_factory=list)  # arrived damaged; to be looked at in the store
    surveyed: bool = False

    def saved(self, manifest: Manifest) -> None:
        """A worker of this node has saved this step; the first rank's time counts."""
        save = Save(manifest.attempt, manifest.step, manifest.created_at)
        self.saves.setdefault((save.attempt, save.step), save)
        for age in sorted(self.saves)[:-SAVES_MAX]:
            del self.saves[age]

    def configured(self, before: Configure | None, config: Configure) -> None:
        """A new generation looks anew: others may have completed or discarded steps."""
        if before is not None and before.store != config.store:
            self.steps, self.stored, self.uploaded = {}, {}, set()
        self.surveyed = False
        self.uploaded = {key for key in self.uploaded if key.attempt == config.attempt}
        self.asked = {age for age in self.asked if age[0] == config.attempt}

    def ask(self, attempt: int, step: int) -> None:
        """Every node is asked alike, so that the step can become complete."""
        self.asked = set(sorted({*self.asked, (attempt, step)})[-ASKED_MAX:])

    def found(self, surveyed: Surveyed) -> None:
        """A listing replaces what was known."""
        self.steps = {step.age: step for step in surveyed.steps}
        self.stored = dict(surveyed.stored)
        self.uploaded |= {key for key in surveyed.uploaded if (key.attempt, key.step) in self.saves}  # ours to upload
        self.surveyed = True

    def completed(self, step: StoredStep, *, owner: bool) -> None:
        """`owner` decides what leaves the store now, and for that has to see all of it."""
        age = (step.attempt, step.step)
        self.steps[age] = Archived(*age, complete=True)
        self.stored[age] = step
        self.surveyed = self.surveyed and not owner

    def suspect(self, key: ShardKey) -> None:
        if key not in self.suspects and len(self.suspects) < SUSPECTS_MAX:
            self.suspects.append(key)

    def found_damaged(self, age: _Age, problem: str) -> None:
        """It must not be restored from the store any more."""
        self.steps[age] = Archived(*age, complete=False, damaged=True)
        if age in self.stored:
            self.stored[age] = replace(self.stored[age], damage=problem)

    def is_damaged(self, age: _Age) -> bool:
        return age in self.steps and self.steps[age].damaged

    def discarded(self, age: _Age) -> None:
        self.steps.pop(age, None)
        self.stored.pop(age, None)

    def told(self, keep: int) -> tuple[StoredStep, ...]:
        """Newest first."""
        newest = sorted(self.stored, reverse=True)[: keep + TOLD_EXTRA]
        return tuple(self.stored[age] for age in newest)

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
            saves=tuple(self.saves[age] for age in sorted(self.saves)),
            steps=tuple(self.steps[age] for age in sorted(self.steps, reverse=True)),
            uploaded=frozenset(self.uploaded),
            asked=frozenset(self.asked),
        )
