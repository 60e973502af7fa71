"""The two-phase change: who must answer what before anything starts, and what happens when somebody does not."""

from __future__ import annotations

import json

import pytest
from fleet import JOB, Fleet, job, running
from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain import spans
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import ActionKind, IncidentState
from holdfast.domain.orders import Prepare, PrepareTemplate, RanksFinished, RanksStepping, Start, Stop
from holdfast.supervisor.core import Config, Job
from holdfast.supervisor.core.changes import handover
from holdfast.supervisor.core.changes.change import RETRY_RUN_S, RETRY_RUN_S_MAX, RETRY_S
from holdfast.supervisor.core.changes.handover import SHARES_MAX
from holdfast.supervisor.core.model.indexing import index_of
from holdfast.supervisor.core.model.lifecycle import Starting
from holdfast.supervisor.core.progress import start_patience_s
from holdfast.supervisor.leader import snapshot, upgrades
from holdfast.supervisor.protocol import GenerationChanged, JobPhase, Send
from holdfast.wire import records


def test_a_job_starts_when_there_are_nodes_and_warms_the_spare() -> None:
    fleet = Fleet(2)
    fleet.submit(job(dp=3))
    assert fleet.job.phase is JobPhase.PENDING
    assert "needs 3 nodes" in fleet.job.reason
    fleet.connect("n2")
    fleet.connect("n3")
    fleet.expect(JobPhase.PREPARING)
    assert set(fleet.orders(Prepare)) == {"n0", "n1", "n2"}
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert set(fleet.orders(PrepareTemplate)) == {"n3"}


def test_a_spare_is_warmed_for_every_job_and_forgets_those_that_are_over() -> None:
    fleet = Fleet(3)
    for name in ("one", "two", "three", "four"):  # more than there are nodes: one of them is the spare twice
        fleet.submit(job(dp=2, name=name))
        fleet.answer_orders()
        generation = fleet.state.jobs[name].generation
        assert generation is not None
        ranks = [(placement.node, tuple(placement.ranks)) for placement in generation.placements]
        for node, those in ranks:
            fleet.report(node, RanksStepping(name, generation.number, those, 1, fleet.now))
        (spare,) = fleet.orders(PrepareTemplate)
        assert fleet.state.nodes[spare].warmed == (name,)
        fleet.answer_orders()
        for node, those in ranks:
            fleet.report(node, RanksFinished(name, generation.number, those, fleet.now))


def test_a_change_writes_nothing_of_the_nodes_that_stay() -> None:
    fleet = running(job(dp=3), spares=1)
    before, began = fleet.state, fleet.state.nodes["n0"].ranks_at
    assert began > 0
    fleet.wait(10.0)
    fleet.lose("n1")
    fleet.expect(JobPhase.PREPARING)
    assert fleet.nodes() == ("n0", "n3", "n2")
    written = snapshot.changes(before, fleet.state)
    assert not [name for name in written if name.startswith(("nodes/n0", "nodes/n2"))]
    assert fleet.state.live_on(fleet.state.nodes["n0"]) == {JOB: (1, 2)}
    parts = snapshot.changes(None, before) | written
    assert snapshot.load({name: raw for name, raw in parts.items() if raw is not None}) == fleet.state
    assert [fleet.state.nodes[node].ranks_at for node in ("n0", "n2")] == [began, began]
    assert fleet.state.nodes["n3"].ranks_at > began


def test_a_node_whose_ranks_began_at_an_unknown_time_has_them_from_the_next_change_on() -> None:
    """As an earlier version left it."""
    fleet = running(job(dp=3), spares=1)
    nodes = {name: evolve(node, ranks_at=0.0) for name, node in fleet.state.nodes.items()}
    state = evolve(fleet.state, nodes=nodes)
    fleet.state = state.indexed(index_of(state))
    fleet.lose("n1")
    assert fleet.state.nodes["n0"].ranks_at == fleet.now


def test_a_job_starts_with_fewer_replicas_after_waiting_for_its_full_mesh() -> None:
    fleet = Fleet(2)
    fleet.submit(job(dp=3, min_dp=2))
    fleet.wait(61)
    assert fleet.job.phase is JobPhase.PREPARING
    assert len(fleet.nodes()) == 2


def test_start_goes_out_only_after_every_prepare_and_stop_is_answered() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    # The second on one node: the spare takes over, n1 leaves connected.
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.HOT_SWAP
    assert set(fleet.orders(Prepare)) == {"n0", "n3", "n2"}
    assert set(fleet.orders(Stop)) == {"n1"}
    for node in ("n0", "n2", "n3"):
        fleet.done(node, Prepare)
    assert not fleet.orders(Start), "n1 may still run the old generation"
    fleet.done("n1", Stop)
    assert set(fleet.orders(Start)) == {"n0", "n2", "n3"}


def test_kept_nodes_keep_their_ranks() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.lose("n1")
    assert fleet.nodes() == ("n0", "n3", "n2")
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 10


def test_a_node_that_cannot_prepare_is_planned_around() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.done("n0", Prepare, ok=False, reason="disk full: /var/holdfast")
    assert fleet.nodes() == ("n3", "n1", "n2")
    assert fleet.job.number == 3
    assert "disk full" in fleet.notes()
    fleet.run()
    assert fleet.incident.state is IncidentState.RESOLVED
    assert fleet.incident.new_generation == 3


def test_a_node_that_does_not_answer_in_time_is_planned_around() -> None:
    fleet = running(job(dp=3, prepare_timeout_s=5.0), spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer_orders("n2")
    fleet.wait(5.1)
    assert fleet.nodes() == ("n0", "n1", "n3")


def test_a_leaver_that_does_not_stop_in_time_is_out_of_service() -> None:
    fleet = running(job(dp=3, prepare_timeout_s=5.0), spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer_orders("n1")
    assert not isinstance(fleet.job.doing, Starting)
    fleet.wait(5.1)
    assert "did not stop" in fleet.state.nodes["n1"].unschedulable_reason
    fleet.run("n1")
    assert fleet.job.phase is JobPhase.RUNNING


def test_a_node_that_connects_late_in_a_change_has_the_whole_time_to_stop() -> None:
    fleet = running(job(dp=3, prepare_timeout_s=5.0), spares=1)
    fleet.lose("n1")
    fleet.answer_orders("n3")
    fleet.wait(4.0)
    fleet.hello("n1", running=1)
    fleet.done("n3", Prepare)
    fleet.wait(4.9)
    assert fleet.job.phase is JobPhase.PREPARING
    assert not fleet.state.nodes["n1"].unschedulable_reason
    fleet.wait(0.2)
    assert "did not stop" in fleet.state.nodes["n1"].unschedulable_reason
    fleet.expect(JobPhase.STARTING)


def test_a_node_that_connects_when_the_wait_for_it_is_nearly_over_has_the_whole_time_to_stop() -> None:
    """Found by the simulator: it was given up in the millisecond in which it came, and the next generation was started."""
    fleet = running(job(dp=1, prepare_timeout_s=3.0), spares=1)
    fleet.lose("n0")
    fleet.answer_orders("n0")
    fleet.wait(fleet.state.config.fence_s - 0.01)
    fleet.expect(JobPhase.PREPARING)
    fleet.hello("n0", running=1)
    fleet.wait(2.9)
    fleet.expect(JobPhase.PREPARING)
    assert not fleet.state.nodes["n0"].unschedulable_reason
    fleet.answer_orders()
    fleet.expect(JobPhase.STARTING)


def test_a_node_that_comes_and_goes_does_not_hold_up_a_start_for_ever() -> None:
    fleet = running(job(dp=3, prepare_timeout_s=5.0), spares=1)
    fleet.lose("n1")
    fleet.answer_orders("n3")
    fleet.hello("n1", running=1)
    fleet.done("n3", Prepare)
    for _ in range(10):
        fleet.gone("n1")
        if fleet.job.phase is not JobPhase.PREPARING:
            break
        fleet.hello("n1", running=1)
        fleet.wait(2.0)
    assert fleet.job.phase is JobPhase.STARTING


def test_a_node_that_vanishes_while_it_prepares_is_planned_around_within_a_second() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.gone("n2")
    assert fleet.nodes() == ("n0", "n1", "n2"), "its session may come back at once"
    fleet.wait(0.6)
    assert fleet.nodes() == ("n0", "n1", "n3")


def test_a_node_that_vanishes_between_its_answer_and_the_start_is_planned_around_before_anything_starts() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.done("n2", Prepare)
    fleet.gone("n2")
    fleet.answer_orders("n2")
    assert fleet.job.phase is JobPhase.PREPARING
    fleet.wait(0.6)
    assert fleet.nodes() == ("n0", "n1", "n3")


def test_the_start_waits_for_a_member_that_comes_back_at_once() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.done("n2", Prepare)
    fleet.gone("n2")
    fleet.answer_orders("n2")
    fleet.hello("n2", running=2)
    assert set(fleet.orders(Start)) == {"n0", "n1", "n2"}
    fleet.run()
    assert fleet.job.number == 2


def _started_without_an_answer(node: str) -> Fleet:
    """Every member was sent its Start, `node` said nothing, and its session has ended."""
    fleet = running(job(dp=3), spares=1)
    fleet.all_live()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for member in fleet.nodes():
        fleet.done(member, Prepare)
    for member in set(fleet.nodes()) - {node}:
        fleet.done(member, Start)
    fleet.all_live()
    fleet.gone(node)
    assert fleet.job.phase is JobPhase.STARTING
    return fleet


def test_a_member_that_vanishes_after_the_start_may_have_started_and_interrupts_nothing() -> None:
    fleet = _started_without_an_answer("n2")
    fleet.wait(5.0)
    fleet.report("n0", RanksStepping(JOB, 2, (0,), 1, fleet.now))
    fleet.wait(120.0)
    assert (fleet.job.number, fleet.job.phase) == (2, JobPhase.STARTING)
    fleet.hello("n2", running=2)
    fleet.answer_orders()
    fleet.step_all()
    assert fleet.job.phase is JobPhase.RUNNING


def test_a_member_that_vanished_after_the_start_is_planned_around_when_no_node_reports_a_step() -> None:
    fleet = _started_without_an_answer("n2")
    fleet.wait(Config().away_s - 1.0)
    assert fleet.job.number == 2
    fleet.wait(2.0)
    assert fleet.nodes() == ("n0", "n1", "n3")
    assert "before it reported that its ranks had started, and no node reports a step" in fleet.notes()


def test_a_member_that_is_lost_after_the_start_is_replaced_at_once() -> None:
    fleet = _started_without_an_answer("n2")
    fleet.wait(0.2)
    fleet.find(FindingKind.NODE_LOST, "n2")
    assert fleet.nodes() == ("n0", "n1", "n3")


def test_when_no_node_can_say_whether_a_run_steps_the_time_for_the_first_step_decides() -> None:
    fleet = _started_without_an_answer("n2")
    fleet.gone("n0", "n1")
    fleet.wait(start_patience_s(fleet.job) - 1.0)
    assert fleet.job.number == 2
    fleet.wait(2.0)
    assert fleet.incident.kind == FindingKind.RANKS_MISSING


def test_a_session_that_comes_back_at_once_gets_its_orders_again() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    before = fleet.orders(Prepare)["n2"]
    fleet.gone("n2")
    fleet.hello("n2", running=1)
    fleet.wait(0.6)
    assert fleet.orders(Prepare)["n2"] == before
    fleet.run()
    assert fleet.job.number == 2


def test_an_agent_that_restarts_while_it_prepares_gets_new_orders() -> None:
    fleet = running(job(dp=3))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.done("n2", Prepare)
    fleet.gone("n2")
    fleet.connect("n2")
    assert fleet.job.number == 3
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING


def test_ranks_that_never_step_are_an_incident() -> None:
    fleet = running(job(dp=3, first_step_timeout_s=30.0))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer_orders()
    assert fleet.job.phase is JobPhase.STARTING
    fleet.wait(31)
    assert fleet.incident.kind == FindingKind.RANKS_MISSING
    assert fleet.job.number == 3


def test_the_incident_carries_every_time_and_the_rework() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.train(14)
    fleet.now += 1
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    incident = fleet.incident
    assert incident.state is IncidentState.RESOLVED
    assert incident.decided_at is not None
    assert incident.prepared_at is not None
    assert incident.first_step_at is not None
    assert (
        incident.fault_at < incident.detected_at <= incident.decided_at < incident.prepared_at <= incident.first_step_at
    )
    assert (incident.last_step, incident.restored_step, incident.rework_steps) == (14, 10, 4)
    assert len(incident.trace_id) == 32


def test_the_incident_keeps_what_each_node_did_and_the_orders_carry_its_trace() -> None:
    fleet = running(job(dp=3), saved=10)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    change = spans.change_below(fleet.incident)
    assert {order.traceparent for order in fleet.orders(Prepare).values() if isinstance(order, Prepare)} == {change}
    fleet.run()
    assert [share.node for share in fleet.incident.shares if not share.ranks] == ["n0", "n1", "n2"]
    assert {share.node: share.ranks for share in fleet.incident.shares if share.ranks} == {
        "n0": (0,),
        "n1": (1,),
        "n2": (2,),
    }
    names = [span.name for span in spans.of_trace(fleet.incident)]
    assert names.count("prepare") == names.count("first step") == 3


def test_a_large_change_keeps_the_nodes_that_the_others_waited_for() -> None:
    fleet = running(job(dp=SHARES_MAX + 4))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    assert len(fleet.incident.shares) == 2 * SHARES_MAX


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=3 * SHARES_MAX))
def test_the_last_nodes_are_the_same_in_any_order_of_the_reports(times: list[float]) -> None:
    reports = [(f"n{place}", at) for place, at in enumerate(times)]
    last = sorted(reports, key=lambda each: (each[1], each[0]), reverse=True)[:SHARES_MAX]
    for arrived in (reports, reports[::-1]):
        assert handover._last(arrived, [at for _, at in arrived], lambda each: each[0]) == last


def test_when_all_nodes_of_a_generation_vanish_the_next_one_waits_for_a_witness() -> None:
    fleet = running(job(dp=1), spares=1)
    fleet.lose("n0")
    fleet.answer_orders()
    assert not fleet.orders(Start)
    assert "vanished at once" in fleet.notes()
    fleet.wait(10.1)
    assert set(fleet.orders(Start)) == {"n1"}


def test_a_vanished_node_that_comes_back_stops_its_workers_before_the_others_start() -> None:
    fleet = running(job(dp=1), spares=1)
    fleet.lose("n0")
    fleet.answer_orders()
    fleet.hello("n0", running=1)
    assert set(fleet.orders(Stop)) == {"n0"}
    fleet.done("n0", Stop)
    assert set(fleet.orders(Start)) == {"n1"}


def test_a_lost_node_that_comes_back_later_stops_its_workers() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.lose("n1")
    fleet.run()
    fleet.hello("n1", running=1)
    stop = fleet.orders(Stop)["n1"]
    assert isinstance(stop, Stop)
    assert stop.generation == 1
    fleet.done("n1", Stop)
    assert fleet.view.spares == ("n1",)


def test_a_change_that_no_node_can_prepare_is_not_tried_in_a_tight_loop() -> None:
    """Say that the shards' only holder is being restarted: trying at once, again and again, would open the breaker."""
    fleet = running(job(dp=2, min_dp=2), spares=1, saved=10)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for node in ("n0", "n2"):
        fleet.done(node, Prepare, ok=False, reason="the shard is not held here")
    number = fleet.job.number
    fleet.answer_orders()
    assert fleet.job.phase is JobPhase.WAITING
    assert fleet.job.number == number
    fleet.wait(RETRY_RUN_S + 0.1)
    assert fleet.job.number == number + 1


def test_a_change_that_no_node_can_prepare_for_long_leaves_the_breaker_closed_and_is_made_when_one_can() -> None:
    """Say that the disks of the nodes are full, so that no agent can record an order."""
    fleet = running(job(dp=2, min_dp=2), saved=10)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for _ in range(600):
        while asked := sorted(fleet.orders(Prepare)):
            fleet.done(asked[0], Prepare, ok=False, reason="the disk is full")
        fleet.wait(1.0)
        assert fleet.state.breaker.open_until is None
    fleet.answer_orders()
    fleet.wait(RETRY_RUN_S_MAX + 1.0)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_nodes_that_do_not_prepare_in_time_one_after_the_other_do_not_fail_a_first_start() -> None:
    """Found by the simulator: the others have prepared, so it is not the script that cannot."""
    fleet = Fleet(nodes=3)
    fleet.submit(job(dp=3, min_dp=3))
    for node in ("n0", "n1", "n2", "n0", "n1"):
        fleet.answer_orders(node)
        fleet.wait(fleet.job.spec.limits.prepare_timeout_s + 0.1)
        fleet.expect(JobPhase.PENDING)
        assert f"{node} did not prepare within 60 s" in fleet.job.reason
        fleet.answer_orders()
        fleet.wait(RETRY_S + 0.1)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_generations_are_published_in_order() -> None:
    fleet = running(job(dp=2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    stages = [(r.generation.number, r.stage) for r in fleet.records if isinstance(r, GenerationChanged)]
    first = [(1, stage) for stage in ("planned", "prepared", "started", "stepping")]
    second = [(2, "planned"), (1, "ended"), (2, "prepared"), (2, "started"), (2, "stepping")]
    assert stages == [*first, *second]


def test_a_report_that_was_seen_before_changes_nothing() -> None:
    fleet = running(job(dp=2))
    before = fleet.state
    for node in fleet.nodes():
        fleet.seq[node] -= 1
    fleet.step_all()
    assert fleet.state == before


@pytest.mark.parametrize("started", [False, True])
def test_a_change_that_an_earlier_version_began_is_finished(started: bool) -> None:
    """Its snapshot names the orders that are not answered by their ids, members' too, and the ranks that step in a list."""
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.done("n1", Prepare)
    if started:
        fleet.answer_orders()
        fleet.report("n0", RanksStepping(JOB, fleet.job.number, (0,), 1, fleet.now))
    parts = {name: raw for name, raw in snapshot.changes(None, fleet.state).items() if raw is not None}
    old = json.loads(records.dumps(evolve(fleet.job, generation=None, running=None), Job))
    doing = old.pop("doing")
    change = {**doing.pop("change"), **doing}
    unprepared = {send.command_id: send.node for send in fleet.sent if isinstance(send.order, Prepare)}
    change.pop("unprepared", None)
    change |= {"generation": old["generation"], "unstarted": {}, "stepping": [0] if started else []}
    change["waiting"] = change.pop("stops", {}) | unprepared
    for group, names in upgrades.JOB_GROUPS.items():
        # A field that is newer than that format was not in it.
        old |= {names[name]: value for name, value in old.pop(group).items() if name in names}
    old |= {"phase": fleet.job.phase, "change": change, "planned": None, "blocked": None, "stopping": None}
    parts |= {f"jobs/{JOB}": json.dumps(old).encode(), "format": b"2"}
    parts |= {
        f"nodes/{name}:generations": json.dumps(fleet.state.live_on(node)).encode()
        for name, node in fleet.state.nodes.items()
    }
    sends = {send.command_id: send for send in fleet.state.sends()}  # each order was a row
    parts |= {f"outbox/{name}": records.dumps(send, Send) for name, send in sends.items()}
    parts = {name: raw for name, raw in parts.items() if name.partition("/")[0] not in ("broadcasts", "unanswered")}
    # Nobody had recorded how long the starts of the job take.
    jobs = {JOB: evolve(fleet.job, progress=evolve(fleet.job.progress, longest_start_s=None))}
    assert snapshot.load(parts) == evolve(fleet.state, jobs=jobs, broadcasts={}, unanswered={}, outbox=sends)
    fleet.state = snapshot.load(parts)
    fleet.answer_orders()
    assert fleet.job.phase is JobPhase.STARTING
    for slot, node in enumerate(fleet.nodes()):
        fleet.report(node, RanksStepping(JOB, fleet.job.number, (slot,), 1, fleet.now))
    fleet.expect(JobPhase.RUNNING)
