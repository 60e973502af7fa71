"""How many more nodes the jobs of a pool could use."""

from __future__ import annotations

from dataclasses import replace

from fleet import JOB, Fleet, asked_to_end, job, running

from holdfast.domain import orders
from holdfast.domain.findings import FindingKind, Remedy, Severity
from holdfast.domain.nodes import NodeFacts
from holdfast.supervisor.core.repair.capacity import Lack, lacking
from holdfast.supervisor.protocol import (
    JobPhase,
    JobStopRequested,
    LeaderStarted,
    MoreNodesRequested,
    NodeCordonRequested,
    ProviderAnswered,
)
from holdfast.supervisor.return_rules import ReplacementRules

POOLS = {"n0": "a", "n1": "a", "n2": "b", "n3": ""}


class Pools(Fleet):
    def facts(self, node: str, zone: str = "", capacity: int = 1) -> NodeFacts:
        return replace(super().facts(node, zone, capacity), pool=POOLS[node])


def test_a_job_that_has_all_its_nodes_lacks_none() -> None:
    fleet = running(job(dp=3))
    assert lacking(fleet.state) == ()
    assert lacking(Fleet(2).state) == ()


def test_a_job_that_cannot_start_lacks_what_is_missing() -> None:
    fleet = Fleet(2)
    fleet.submit(job(dp=5))
    assert lacking(fleet.state) == (Lack("", 2, 3, (JOB,)),)


def test_reserved_spares_are_wanted_too() -> None:
    fleet = running(replace(job(dp=2), spares=2), spares=1)
    assert lacking(fleet.state) == (Lack("", 3, 1, (JOB,)),)


def test_a_job_that_lost_a_replica_lacks_its_node_until_it_is_back() -> None:
    fleet = running(job(dp=3), saved=10)
    fleet.lose("n2")
    fleet.run()
    assert fleet.job.phase is JobPhase.STARTING or fleet.job.phase is JobPhase.RUNNING
    assert lacking(fleet.state) == (Lack("", 2, 1, (JOB,)),)
    fleet.connect("n2")
    assert lacking(fleet.state) == ()


def test_a_node_that_an_operator_keeps_out_is_not_there() -> None:
    fleet = running(job(dp=2), spares=1)
    fleet.fold(NodeCordonRequested(fleet.now, "n2", True, "disk"))
    assert lacking(fleet.state) == (), "it was not needed"
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "disk"))
    assert lacking(fleet.state) == (Lack("", 1, 1, (JOB,)),)


def test_a_node_that_is_about_to_be_taken_away_is_not_there() -> None:
    fleet = running(job(dp=2))
    asked_to_end(fleet, "n1")
    assert lacking(fleet.state) == (Lack("", 1, 1, (JOB,)),)


def test_a_machine_that_is_being_replaced_is_as_good_as_there() -> None:
    fleet = Fleet(0)
    fleet.fold(LeaderStarted(fleet.now, 1, "secret", None, ReplacementRules(provider="command")))
    for node in ("n0", "n1"):
        fleet.life[node] = 0
        fleet.machines[node] = f"machine of {node}"
        fleet.boot(node)
        fleet.report(node, orders.Inventory(JOB, ()))
    fleet.submit(job(dp=2))
    fleet.run()
    fleet.find(FindingKind.SILENT_CORRUPTION, "n1", severity=Severity.FATAL, recommended_actions=(Remedy.REPLACE_NODE,))
    fleet.run()
    fleet.wait(120)
    assert lacking(fleet.state) == (Lack("", 1, 1, (JOB,)),)
    wanted = fleet.requested.pop(0)
    fleet.fold(ProviderAnswered(fleet.now, wanted.node, wanted.request, True, "recreated"))
    assert lacking(fleet.state) == ()


def test_a_node_that_is_held_down_comes_back_by_itself() -> None:
    fleet = running(job(dp=2), saved=10)
    for _ in range(2):  # the first loss costs nothing
        fleet.lose("n1")
        fleet.run()
        fleet.connect("n1")
    assert lacking(fleet.state) == ()


def test_each_pool_has_its_own_lack_and_smaller_nodes_are_no_help() -> None:
    fleet = Pools(4)
    fleet.submit(replace(job(dp=3), pool="a"))
    fleet.submit(replace(job(dp=1, name="small"), pool="b"))
    fleet.submit(replace(job(dp=2, nproc=2, name="wide"), pool=""))
    assert lacking(fleet.state) == (Lack("", 1, 1, ("wide",)), Lack("a", 2, 1, (JOB,)))


def test_a_job_that_is_stopped_wants_nothing() -> None:
    fleet = Fleet(1)
    fleet.submit(job(dp=2))
    assert lacking(fleet.state) == (Lack("", 1, 1, (JOB,)),)
    fleet.fold(JobStopRequested(fleet.now, JOB, "by an operator"))
    assert lacking(fleet.state) == ()


def test_a_request_is_recorded_with_its_answer() -> None:
    fleet = running(job(dp=2))
    reason = "1 node missing for job; 1 there"
    fleet.fold(MoreNodesRequested(fleet.now, (JOB, "gone"), 2, reason, True, "resizing"))
    fleet.fold(MoreNodesRequested(fleet.now, (JOB,), 2, reason, False, "no quota"))
    assert f"more nodes are requested, 2 in all, because of {reason}: agreed (resizing)" in fleet.notes()
    assert "refused: no quota" in fleet.notes()


def test_faults_of_hardware_that_only_an_operator_ends_are_missing_nodes() -> None:
    fleet = running(job(dp=2), spares=1)
    recommended_actions = (Remedy.REPLACE_NODE,)
    fleet.find(FindingKind.SILENT_CORRUPTION, "n1", severity=Severity.FATAL, recommended_actions=recommended_actions)
    fleet.run()
    assert lacking(fleet.state) == (), "the spare has its ranks"
    fleet.find(FindingKind.SILENT_CORRUPTION, "n0", severity=Severity.FATAL, recommended_actions=recommended_actions)
    assert lacking(fleet.state) == (Lack("", 1, 1, (JOB,)),)
