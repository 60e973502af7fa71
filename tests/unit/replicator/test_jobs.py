"""What a job on a node records about copies on its peers."""

from __future__ import annotations

from holdfast.domain.generations import ShardKey
from holdfast.replicator.jobs import Job

OLD, NEW = ShardKey(1, 10, 0), ShardKey(1, 20, 0)


def test_a_copy_counts_as_on_the_peers_disk_when_the_peer_says_so() -> None:
    job = Job("train")
    assert job.has_sent(OLD, "n1", None)  # at first, other shards of the step may be waiting
    assert not job.has_sent(OLD, "n1", None)
    assert not job.pushed
    assert job.has_sent(OLD, "n1", OLD)
    assert job.has_sent(NEW, "n1", OLD)
    assert job.pushed == {(0, "n1"): OLD}


def test_a_peer_that_has_lost_its_disk_does_not_count_as_holding_the_copy() -> None:
    job = Job("train")
    job.has_sent(OLD, "n1", OLD)
    job.has_sent(OLD, "n2", OLD)
    job.has_sent(NEW, "n1", None)
    assert job.pushed == {(0, "n2"): OLD}
