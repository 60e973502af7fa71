"""Which steps of the plan are carried out now: one at a time per lane (each rank's way to disk, each peer, deletions, each kind
of work for the object store). A step that fails makes its lane pause, each time for longer, and the plan is computed again.

Steps that need no plan between them are begun together, because the time of a plan is not to depend on how many ranks a node
has: the copies of one checkpoint for one peer, and all deletions, of which one plan names those that are safe together."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import assert_never

from holdfast.replicator.view import Complete, CopyToDisk, Delete, Discard, FreeImages, Push, Step, Survey, Upload
from holdfast.runtime.rpc.backoff import Backoff

PAUSE_MAX_S = 5.0
ARCHIVE_PAUSE_MAX_S = 30.0  # checkpoints in the object store are minutes apart, and requests cost money

_ARCHIVE = "store: "  # prefix of the object store's lanes
# Prefix of the disk's lanes, one per rank, because each copy runs in parallel with the checksums of its image.
_DISK = "disk: "

Lane = tuple[str, str]  # (job, "disk: rank <rank>" | "delete" | "peer <name>" | "store: <what>")


class Schedule:
    """The steps in progress of all jobs. `chance` draws the pauses."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = chance
        self._busy: set[Lane] = set()
        self._pauses: dict[Lane, Backoff] = {}

    def begin(self, job: str, steps: Iterable[Step]) -> dict[Lane, list[Step]]:
        """Return those of the planned steps whose lane is free, of each lane the first one and those that go with it. Occupies
        these lanes."""
        begun: dict[Lane, list[Step]] = {}
        for step in steps:
            lane = lane_of(job, step)
            if lane not in self._busy:
                self._busy.add(lane)
                begun[lane] = [step]
            elif lane in begun and _goes_with(begun[lane][0], step):
                begun[lane].append(step)
        return begun

    def pause_s(self, lane: Lane) -> float:
        """Record that the lane's step has failed. Returns for how long the lane stays occupied, in seconds."""
        if lane not in self._pauses:
            first_s, max_s = (0.25, ARCHIVE_PAUSE_MAX_S) if lane[1].startswith(_ARCHIVE) else (0.05, PAUSE_MAX_S)
            self._pauses[lane] = Backoff(first_s=first_s, max_s=max_s, chance=self._chance)
        return self._pauses[lane].next_s()

    def succeeded(self, lane: Lane) -> None:
        """Record that the lane's step has succeeded: its next pause is a short one."""
        self._pauses.pop(lane, None)

    def free(self, lane: Lane) -> None:
        self._busy.discard(lane)

    def moves_shards_of(self, job: str) -> bool:
        """Whether a shard of this job is being copied or deleted. Uploads do not count, because they only read."""
        return any(name == job and not what.startswith(_ARCHIVE) for name, what in self._busy)


def _goes_with(first: Step, step: Step) -> bool:
    match first, step:
        case Push(), Push():
            return first.key.checkpoint == step.key.checkpoint
        case Delete(), Delete():
            return True
        case _:
            return False


def is_disk(lane: Lane) -> bool:
    """Whether the lane's steps write to this node's disk."""
    return lane[1].startswith(_DISK)


def lane_of(job: str, step: Step) -> Lane:
    match step:
        case CopyToDisk(key):
            return (job, f"{_DISK}rank {key.rank}")
        case Push(_, peer):
            return (job, f"peer {peer}")
        case Delete() | FreeImages():
            return (job, "delete")
        case Upload(key):
            return (job, f"{_ARCHIVE}rank {key.rank}")
        case Survey() | Complete() | Discard():
            return (job, f"{_ARCHIVE}{type(step).__name__}")
        case _:
            assert_never(step)
