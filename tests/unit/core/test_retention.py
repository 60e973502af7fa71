"""The step that every node has is told to every node, once, when it is a newer one."""

from __future__ import annotations

from fleet import JOB, Fleet, job, running

from holdfast.domain.findings import FindingKind
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.orders import Inventory

DP = 3


class Saving(Fleet):
    def hold(self, rank: int, *steps: int, disk: bool = True, copied: bool = True) -> None:
        """The node of `rank` has its shard of these steps, and the copies of its neighbour's."""
        generation = self.job.running
        assert generation is not None
        ranks = (rank, (rank - 1) % DP) if copied else (rank,)
        records = [
            ShardRecord(ShardKey(generation.attempt, step, each), generation.mesh, tier, 1, str(step), f"n{each}")
            for step in steps
            for each in ranks
            for tier in ("memory", "disk")
            if tier == "memory" or disk
        ]
        self.report(generation.node_of(rank), Inventory(JOB, tuple(records)))

    def told(self) -> dict[str, int]:
        """What each node heard last; and forget it."""
        heard = {tell.node: tell.message.step for tell in self.said}
        self.said.clear()
        return heard


def fleet_of_three() -> Saving:
    fleet = running(job(dp=DP), kind=Saving)
    assert isinstance(fleet, Saving)
    return fleet


def test_what_all_have_on_disk_and_with_a_peer_is_told_to_all() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10)
    assert fleet.told() == {}, "in a moment: the disks are not done when the memory is"
    fleet.wait(3)
    assert fleet.told() == {"n0": 10, "n1": 10, "n2": 10}
    fleet.wait(60)
    assert fleet.told() == {}


def test_one_that_lags_holds_the_word_back() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10)
    fleet.wait(3)
    fleet.told()
    fleet.hold(0, 10, 20)
    fleet.hold(1, 10, 20)
    fleet.hold(2, 10, 20, disk=False)
    fleet.wait(3)
    assert fleet.told() == {}
    fleet.hold(2, 10, 20)
    for rank in range(DP):
        fleet.hold(rank, 20, 30)
    fleet.wait(3)
    assert fleet.told() == {"n0": 30, "n1": 30, "n2": 30}


def test_a_step_that_would_not_survive_a_node_is_not_what_all_have() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10, copied=rank != 1)
    fleet.wait(3)
    assert fleet.told() == {}


def test_a_new_attempt_begins_anew_and_the_word_survives_a_change_of_leader() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10)
    fleet.wait(3)
    first = fleet.job.checkpoints.saved_by_all
    fleet.told()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    assert fleet.job.checkpoints.saved_by_all == first
    for rank in range(DP):
        fleet.hold(rank, 20)
    fleet.wait(3)
    assert fleet.told() == {"n0": 20, "n1": 20, "n2": 20}
    assert fleet.job.checkpoints.saved_by_all > first


def test_a_job_that_has_ended_says_nothing() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10)
    fleet.finish()
    fleet.wait(3)
    assert fleet.told() == {}
