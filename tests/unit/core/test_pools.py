"""Pools: a job runs on nodes of its own pool, and no others exist for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import JOB, Fleet, job
from idle_links import Idle

from holdfast.domain.nodes import NodeFacts, pool_name
from holdfast.supervisor.core import waits_for
from holdfast.supervisor.protocol import JobPhase

POOLS = {"n0": "a", "n1": "a", "n2": "b", "n3": "b", "n4": ""}


class Pools(Fleet):
    def facts(self, node: str, zone: str = "", capacity: int = 1) -> NodeFacts:
        return replace(super().facts(node, zone, capacity), pool=POOLS[node])


class IdlePools(Pools, Idle):
    """Its idle nodes test the network."""


def nodes_of(fleet: Fleet, name: str) -> set[str]:
    generation = fleet.state.jobs[name].generation
    return set(generation.nodes) if generation is not None else set()


@pytest.mark.parametrize(("pool", "dp"), [("a", 2), ("b", 2), ("", 1)])
def test_a_job_gets_nodes_of_its_pool_and_a_job_without_one_gets_those_without(pool: str, dp: int) -> None:
    fleet = Pools(5)
    fleet.submit(replace(job(dp, min_dp=dp), pool=pool))
    fleet.run()
    assert {POOLS[node] for node in nodes_of(fleet, JOB)} == {pool}


def test_free_nodes_of_another_pool_are_neither_waited_for_nor_taken() -> None:
    fleet = Pools(5)
    fleet.submit(replace(job(3, min_dp=3), pool="a"))
    fleet.wait(120)
    waiting = fleet.state.jobs[JOB]
    assert waiting.phase is JobPhase.PENDING
    assert "job needs 3 nodes of pool a with room for 1 worker; 2 are there, 1 missing" in waiting.reason
    assert waits_for(fleet.state, waiting) == ""


def test_a_spare_of_another_pool_does_not_replace_a_lost_node() -> None:
    fleet = Pools(5)
    fleet.submit(replace(job(2, min_dp=1), pool="a"))
    fleet.run()
    fleet.train(20, save=True)
    fleet.lose("n1")
    fleet.run()
    assert nodes_of(fleet, JOB) == {"n0"}, "with a replica less, while two nodes of pool b are free"


def test_a_replica_is_lent_within_a_pool_only() -> None:
    fleet = Pools(5)
    fleet.submit(replace(job(2, min_dp=1, name="low"), pool="a"))
    fleet.about = "low"
    fleet.run()
    fleet.train(20, save=True)
    fleet.submit(replace(job(3, min_dp=3, name="high"), pool="b", priority=5))
    fleet.wait(60)
    assert not fleet.state.incidents, "the nodes of pool a are of no use to it"
    assert nodes_of(fleet, "low") == {"n0", "n1"}


def test_idle_nodes_test_their_network_within_their_pool() -> None:
    fleet = IdlePools(5)
    fleet.play(86_400)
    assert fleet.met
    assert {tuple(sorted(pair)) for pair in fleet.met} == {("n0", "n1"), ("n2", "n3")}


@pytest.mark.parametrize("name", ["", "a", "gpt-2", "A.b_c-9", "x" * 63])
def test_names(name: str) -> None:
    assert pool_name(name) == name


@pytest.mark.parametrize("name", ["-a", "a-", "a b", "a/b", "x" * 64, "a\n", "ü"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 63 letters"):
        pool_name(name)
