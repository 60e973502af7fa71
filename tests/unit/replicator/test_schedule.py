"""Which steps of a plan begin together, and which wait for the next plan."""

from __future__ import annotations

from holdfast.domain.generations import ShardKey
from holdfast.replicator.schedule import Schedule
from holdfast.replicator.view import CopyToDisk, Delete, FreeImages, Push, Step, Tier, Upload

JOB = "llm"


def key(step: int, rank: int = 0) -> ShardKey:
    return ShardKey(1, step, rank)


def push(step: int, rank: int, peer: str = "b") -> Push:
    return Push(key(step, rank), peer, "")


def begun(schedule: Schedule, *steps: Step) -> list[list[Step]]:
    return list(schedule.begin(JOB, steps).values())


def test_the_copies_of_one_checkpoint_for_one_peer_begin_together() -> None:
    of_10, of_20, for_c = [push(10, 0), push(10, 1)], [push(20, 0)], [push(10, 0, "c"), push(10, 1, "c")]
    assert begun(Schedule(), *of_10, *of_20, *for_c) == [of_10, for_c]


def test_all_deletions_begin_together_and_images_are_freed_alone() -> None:
    gone: list[Step] = [Delete(Tier.DISK, key(10), ""), Delete(Tier.STAGED, key(10, 1), "")]
    assert begun(Schedule(), *gone, FreeImages("")) == [gone]
    assert begun(Schedule(), FreeImages(""), *gone) == [[FreeImages("")]]


def test_other_steps_have_a_lane_for_each_rank_and_begin_alone() -> None:
    steps: list[Step] = [
        CopyToDisk(key(20), ""),
        CopyToDisk(key(20, 1), ""),
        Upload(key(10), ""),
        Upload(key(10, 1), ""),
    ]
    older: list[Step] = [CopyToDisk(key(10), ""), Upload(key(8), "")]
    assert begun(Schedule(), *steps, *older) == [[each] for each in steps]


def test_nothing_joins_a_step_that_has_begun() -> None:
    schedule = Schedule()
    (lane,) = schedule.begin(JOB, [push(10, 0)])
    assert begun(schedule, push(10, 1), Delete(Tier.DISK, key(5), "")) == [[Delete(Tier.DISK, key(5), "")]]
    assert list(schedule.begin("another job", [push(10, 1)]).values()) == [[push(10, 1)]]
    schedule.free(lane)
    assert begun(schedule, push(10, 1)) == [[push(10, 1)]]
