"""Nodes without ranks test the network between them: who with whom, who is blamed, and how a node comes back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from fleet import JOB, job
from idle_links import UNREACHED, USUAL, Idle

from holdfast.domain.links import LinkMeasured
from holdfast.domain.nodes import Notice
from holdfast.domain.orders import CheckLink, OrderDone, Prepare, Stop
from holdfast.supervisor.core.fleet import returns
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import link_tests
from holdfast.supervisor.core.rules import links
from holdfast.supervisor.core.rules.holddown import Cure
from holdfast.supervisor.core.rules.links import LinkTest, Verdict
from holdfast.supervisor.link_rules import LinkRules
from holdfast.supervisor.protocol import (
    BreakerResetRequested,
    JobPhase,
    LeaderStarted,
    NodeCordonRequested,
    NodeRepaired,
)
from holdfast.supervisor.timers import LinkTestsDue, LinkTestTimeout

EVERY_S = LinkRules().every_s
HOLD_S = 600.0


def settled(fleet: Idle, rounds: float = 6) -> Idle:
    """Long enough for several tests of each node, all of them good."""
    fleet.play(rounds * EVERY_S)
    return fleet


# ---------------------------------------------------------------- who with whom


def test_each_idle_node_is_tested_about_once_per_interval_with_ever_other_partners() -> None:
    fleet = Idle(8, snapshots=True)
    fleet.play(10 * EVERY_S)
    tests = Counter(name for pair in fleet.met for name in pair)
    assert all(7 <= tests[f"n{index}"] <= 15 for index in range(8)), tests
    for index in range(8):
        partners = [*({one, other} - {f"n{index}"} for one, other in fleet.met if f"n{index}" in (one, other))]
        assert len({name for each in partners for name in each}) == 7, "it has met everybody"
    assert not fleet.out()


def test_a_node_is_in_one_test_at_a_time_and_few_are_in_any() -> None:
    fleet = Idle(30)
    fleet.silent = {f"n{index}" for index in range(30)}
    fleet.wait(60.0)
    busy = Counter(name for send in fleet.tests() for name in (send.node, send.order.partner))  # type: ignore[union-attr]
    assert busy
    assert max(busy.values()) == 1
    assert len(busy) == 2, "one pair of 30 idle nodes"


@pytest.mark.parametrize("every_s", [60.0, EVERY_S])
def test_a_large_fleet_is_tested_within_the_interval(every_s: float) -> None:
    fleet = Idle(120)
    fleet.fold(LeaderStarted(fleet.now, 1, "s", links=LinkRules(every_s=every_s)))
    for index in range(120):
        fleet.hello(f"n{index}")
    fleet.play(1.25 * every_s)
    assert len({name for pair in fleet.met for name in pair}) == 120


def test_no_tests_are_made_when_they_are_switched_off_and_none_of_agents_that_do_not_know_them() -> None:
    fleet = Idle(4)
    fleet.fold(LeaderStarted(fleet.now, 1, "s", links=LinkRules(every_s=0.0)))
    for index in range(4):
        fleet.hello(f"n{index}")
    fleet.play(3 * EVERY_S)
    assert not fleet.met
    assert LinkTestsDue() not in fleet.state.timers
    older = Idle(0)
    older.facts = lambda *of: replace(Idle.facts(older, *of), tests_links=False)  # type: ignore[method-assign]
    for index in range(4):
        older.connect(f"n{index}")
    older.play(3 * EVERY_S)
    assert not older.met
    assert LinkTestsDue() not in older.state.timers, "nothing is looked at for nobody"


def test_nodes_with_ranks_announced_cordoned_or_reset_nodes_are_left_alone() -> None:
    fleet = Idle(7)
    fleet.submit(job(dp=2))
    fleet.run()
    members = set(fleet.nodes())
    others = sorted({f"n{index}" for index in range(7)} - members)
    fleet.fold(NodeCordonRequested(fleet.now, others[0], True, "mine"))
    turn = Turn(fleet.state, fleet.now)
    turn.put_node(others[1], notices=(Notice("file", "taken", fleet.now, fleet.now + 1e6),))
    fleet.state = turn.finish()
    fleet.play(4 * EVERY_S)
    left_alone = members | set(others[:2])
    met = {name for pair in fleet.met for name in pair}
    assert met == set(others[2:])
    assert not met & left_alone
    fleet.expect(JobPhase.RUNNING)


def test_the_partner_waits_before_the_other_node_gets_its_address() -> None:
    fleet = Idle(2)
    fleet.wait(15.0)
    [waits] = fleet.tests()
    assert isinstance(waits.order, CheckLink)
    assert waits.order.endpoint == ""
    assert waits.order.for_s > 0
    fleet.answer_test(waits)
    [measures] = fleet.tests()
    assert isinstance(measures.order, CheckLink)
    assert (measures.node, measures.order.partner) == (waits.order.partner, waits.node)
    assert measures.order.endpoint == f"{waits.node}:1"
    assert measures.order.token == waits.order.token
    fleet.answer_test(measures)
    rows = [fleet.state.nodes[name].links for name in ("n0", "n1")]
    assert [len(row) for row in rows] == [1, 1]
    assert rows[0][0].measured == links.mirrored(rows[1][0].measured)
    assert not [timer for timer in fleet.state.timers if isinstance(timer, LinkTestTimeout)]


def test_tokens_differ_and_what_is_remembered_is_bounded() -> None:
    fleet = Idle(3)
    tokens = []
    for _ in range(40):
        tokens += [send.order.token for send in fleet.until_tests() if isinstance(send.order, CheckLink)]
        fleet.answer_tests()
    assert len(set(tokens)) == len(tokens) > links.KEPT_MAX
    assert max(len(node.links) for node in fleet.state.nodes.values()) == links.KEPT_MAX


# ---------------------------------------------------------------- work comes first


def test_a_job_takes_both_nodes_at_once_and_what_the_test_found_is_dropped() -> None:
    fleet = Idle(2)
    fleet.wait(15.0)
    fleet.answer_test(fleet.tests()[0])
    [measures] = fleet.tests()
    fleet.submit(job(dp=2))
    assert set(fleet.orders(Prepare)) == {"n0", "n1"}, "ordered in the same moment"
    fleet.report(measures.node, OrderDone(measures.command_id, True, link=LinkMeasured(failure=UNREACHED)))
    assert not any(node.links for node in fleet.state.nodes.values())
    assert not [timer for timer in fleet.state.timers if isinstance(timer, LinkTestTimeout)]
    assert not fleet.tests()


def test_a_refusal_or_silence_says_nothing_and_has_an_end() -> None:
    fleet = Idle(4)
    settled(fleet)
    before = {name: node.links for name, node in fleet.state.nodes.items()}
    first = fleet.until_tests()
    fleet.wait(link_tests.TEST_S + 1.0)
    assert first[0].command_id not in fleet.state.outbox, "it was withdrawn"
    for send in fleet.tests():
        fleet.answer_test(send, ok=False)
    fleet.answer_test(first[0])  # late
    assert {name: node.links for name, node in fleet.state.nodes.items()} == before
    fleet.answer_test(fleet.until_tests()[0], ok=False)
    assert {name: node.links for name, node in fleet.state.nodes.items()} == before
    assert not fleet.tests()


def test_a_new_leader_withdraws_what_is_under_way_and_goes_on() -> None:
    fleet = Idle(4)
    fleet.wait(15.0)
    [waits] = fleet.tests()
    fleet.fold(LeaderStarted(fleet.now, 2, "another secret"))
    assert not fleet.tests()
    assert not fleet.state.outbox
    fleet.answer_test(waits)
    assert not fleet.tests(), "an answer to the last leader begins nothing"
    for index in range(4):
        fleet.hello(f"n{index}")
    fleet.play(2 * EVERY_S)
    assert fleet.met


def test_an_answer_that_comes_twice_counts_once() -> None:
    fleet = Idle(2)
    fleet.wait(15.0)
    [waits] = fleet.tests()
    fleet.answer_test(waits)
    [measures] = fleet.tests()
    fleet.answer_test(waits)
    assert fleet.tests() == [measures]
    fleet.answer_test(measures)
    fleet.answer_test(measures)
    assert [len(node.links) for node in fleet.state.nodes.values()] == [1, 1]


def test_an_agent_that_restarts_ends_its_test() -> None:
    fleet = Idle(2)
    fleet.wait(15.0)
    [waits] = fleet.tests()
    fleet.connect(waits.node)
    assert not fleet.tests()
    fleet.play(2 * EVERY_S)
    assert fleet.met


# ---------------------------------------------------------------- who is blamed


@pytest.mark.parametrize("speed", [0.0, USUAL / 10, USUAL / 3])
def test_a_node_that_is_bad_with_two_partners_is_out_with_reasons(speed: float) -> None:
    fleet = settled(Idle(6))
    fleet.bad["n2"] = speed
    fleet.play(3 * EVERY_S)
    assert fleet.out() == {"n2"}
    node = fleet.state.nodes["n2"]
    assert node.removal is not None
    assert node.removal.cure is Cure.LINKS
    partners = [test.partner for test in node.links if test.bad]
    assert sum(partner in node.unschedulable_reason for partner in set(partners)) >= 2
    if speed:
        assert "is slow with 2 nodes" in node.unschedulable_reason
        assert f"{links.rate(0.97 * speed)}, 0.1 ms, where 1.94 GB/s, 0.1 ms are usual" in node.unschedulable_reason
    else:
        assert "fails with 2 nodes that are well with others (" in node.unschedulable_reason
        assert node.unschedulable_reason.count(UNREACHED) == 2
    assert "after 2 good tests of its network in a row" in returns.standing(node, fleet.now, 7200.0)


def test_a_bad_node_is_reported_soon_after_its_first_bad_test() -> None:
    fleet = settled(Idle(6))
    fleet.bad["n2"] = USUAL / 10
    began = fleet.now
    while "n2" not in fleet.out():
        fleet.play(5.0)
    first = next(test.at for test in fleet.state.nodes["n2"].links if test.bad)
    # Its second test, with another partner, and what that one measures with somebody else.
    assert fleet.now - first <= 2 * (link_tests.DOUBT_SHARE * EVERY_S * 1.25 + 2 * link_tests.LOOK_S)
    assert fleet.now - began <= 1.5 * EVERY_S


@pytest.mark.parametrize("nodes", [2, 3])
def test_of_two_or_three_nodes_nobody_is_blamed_and_it_is_shown(nodes: int) -> None:
    fleet = settled(Idle(nodes))
    fleet.bad["n1"] = 0.0
    fleet.play(10 * EVERY_S)
    assert not fleet.out()
    assert fleet.state.nodes["n1"].links[-1].verdict is Verdict.FAILED


def test_of_four_nodes_the_bad_one_is_blamed() -> None:
    fleet = settled(Idle(4))
    fleet.bad["n1"] = 0.0
    fleet.play(4 * EVERY_S)
    assert fleet.out() == {"n1"}


def test_a_healthy_node_that_meets_two_that_fail_at_once_is_not_blamed() -> None:
    """Both were good with others, until they failed."""
    fleet = settled(Idle(24))
    tests = {"n1": "n0", "n2": "n0"}
    fleet.bad |= dict.fromkeys(tests, 0.0)
    for other in tests:
        turn = Turn(fleet.state, fleet.now)
        nodes = turn.nodes["n0"], turn.nodes[other]
        link_tests._record(turn, *nodes, fleet.measured("n0", other))
        fleet.state = turn.finish()
        fleet.now += 60.0
    assert [test.bad for test in fleet.state.nodes["n0"].links[-2:]] == [True, True]
    assert not fleet.out()
    fleet.play(4 * EVERY_S)
    assert fleet.out() == {"n1", "n2"}


def test_one_bad_pair_blames_nobody() -> None:
    fleet = settled(Idle(6))
    measured = fleet.measured

    def one_pair(one: str, other: str) -> LinkMeasured:
        return LinkMeasured(failure=UNREACHED) if {one, other} == {"n1", "n2"} else measured(one, other)

    fleet.measured = one_pair  # type: ignore[method-assign]
    fleet.play(30 * EVERY_S)
    assert any({"n1", "n2"} == set(pair) for pair in fleet.met)
    assert not fleet.out()


def test_a_slow_way_between_zones_blames_no_node() -> None:
    fleet = settled(Idle(8, zones="aaaabbbb"))
    fleet.between_zones = 0.0
    fleet.play(20 * EVERY_S)
    assert not fleet.out()


def test_a_bad_pair_within_a_zone_and_a_cut_way_to_another_blame_no_node() -> None:
    """Both partners are well with others of their own zone. Two neighbours would be other witnesses."""

    def test(at: float, partner: str, *, in_zone: bool, good: bool = False) -> LinkTest:
        verdict = Verdict.GOOD if good else Verdict.FAILED
        return LinkTest(at, partner, "alike", in_zone, LinkMeasured(), verdict)

    found = {
        "n1": (test(1.0, "n2", in_zone=True), test(2.0, "m1", in_zone=False)),
        "n2": (test(1.0, "n1", in_zone=True), test(3.0, "n3", in_zone=True, good=True)),
        "n3": (test(3.0, "n2", in_zone=True, good=True),),
        "m1": (test(2.0, "n1", in_zone=False), test(4.0, "m2", in_zone=True, good=True)),
        "m2": (test(4.0, "m1", in_zone=True, good=True),),
    }
    assert links.blame("n1", found, ["n2", "n3"], 0.0, 0.0) is None
    assert links.blame("n1", found, ["n2"], 0.0, 0.0) is not None
    found["n1"] = (found["n1"][0], test(2.0, "n3", in_zone=True))
    found["n3"] = (test(2.0, "n1", in_zone=True), *found["n3"])
    assert links.blame("n1", found, ["n2", "n3"], 0.0, 0.0) is not None


def test_what_was_found_before_a_node_had_ranks_puts_it_out_no_more() -> None:
    """Seed 3000200 of the simulator: a bad network, ranks before there was a verdict, a good network when they ended."""
    fleet = settled(Idle(8))
    before = fleet.now
    fleet.wait(10.0)
    fleet.submit(job(dp=1))
    fleet.run()
    [name] = fleet.nodes()
    one, other, *_ = sorted(set(fleet.state.nodes) - {name})
    turn = Turn(fleet.state, fleet.now)
    failed = [
        LinkTest(before + seconds, partner, "alike", False, LinkMeasured(failure=UNREACHED), Verdict.FAILED)
        for seconds, partner in ((1.0, one), (2.0, other))
    ]
    turn.put_node(name, links=(*turn.nodes[name].links, *failed))
    fleet.state = turn.finish()
    fleet.play(4 * EVERY_S)  # its partners are well with others, which makes witnesses of them
    assert fleet.state.nodes[name].links[-2:] == tuple(failed)
    under_way = fleet.until_tests()
    fleet.finish()
    for kind in (Stop, Prepare):
        for send in [send for send in fleet.sent if isinstance(send.order, kind)]:
            fleet.done(send.node, kind)
    assert not fleet.state.live_on(fleet.state.nodes[name])
    assert fleet.tests() == under_way  # of two others; what it finds is the first that is known after the ranks
    fleet.answer_tests()
    assert not fleet.out()
    assert not fleet.state.nodes[name].faults


def test_a_node_that_is_still_bad_after_its_ranks_is_blamed_again() -> None:
    fleet = settled(Idle(8))
    fleet.submit(job(dp=1))
    fleet.run()
    [name] = fleet.nodes()
    fleet.bad[name] = 0.0
    fleet.finish()
    fleet.answer_orders()
    assert not fleet.state.live_on(fleet.state.nodes[name])
    fleet.play(4 * EVERY_S)
    assert fleet.out() == {name}


def test_in_a_zone_a_node_is_blamed_by_two_neighbours() -> None:
    fleet = settled(Idle(8, zones="aaaabbbb"))
    fleet.bad["n1"] = USUAL / 10
    fleet.play(4 * EVERY_S)
    assert fleet.out() == {"n1"}
    witnesses = {test.partner for test in fleet.state.nodes["n1"].links if test.bad and test.in_zone}
    assert len(witnesses & {"n0", "n2", "n3"}) >= 2
    assert sum(f"{name}: " in fleet.state.nodes["n1"].unschedulable_reason for name in ("n0", "n2", "n3")) >= 2


def test_with_one_neighbour_it_is_one_of_the_two() -> None:
    fleet = settled(Idle(6, zones="aabbbb"))
    fleet.bad["n1"] = 0.0
    fleet.play(6 * EVERY_S)
    assert fleet.out() == {"n1"}
    assert "n0: " in fleet.state.nodes["n1"].unschedulable_reason


def test_pairs_between_zones_are_compared_with_pairs_between_zones() -> None:
    fleet = Idle(8, zones="aaaabbbb")
    fleet.between_zones = USUAL / 20
    fleet.play(20 * EVERY_S)
    verdicts = {test.verdict for node in fleet.state.nodes.values() for test in node.links[-4:]}
    assert verdicts == {Verdict.GOOD}


def test_a_slow_fleet_is_no_slow_node_and_a_network_that_varies_condemns_nobody() -> None:
    fleet = settled(Idle(6))
    measured, count = fleet.measured, 0

    def varies(one: str, other: str) -> LinkMeasured:
        nonlocal count
        count += 1
        share = (1.0, 0.35, 0.6, 0.2, 0.8)[count % 5]
        return replace(measured(one, other), out_bytes_per_s=share * USUAL, in_bytes_per_s=share * USUAL)

    fleet.measured = varies  # type: ignore[method-assign]
    settled(fleet, 4)  # it is known to vary
    for name in list(fleet.state.nodes):
        fleet.fold(NodeRepaired(fleet.now, name))
    fleet.play(30 * EVERY_S)
    assert not fleet.out()


def test_no_more_than_a_tenth_of_the_idle_nodes_is_out() -> None:
    fleet = settled(Idle(20))
    for index in range(4):
        fleet.bad[f"n{index}"] = USUAL / 50
    fleet.play(12 * EVERY_S)
    assert len(fleet.out()) == 2
    assert fleet.out() <= set(fleet.bad)
    assert (
        "stays in service because 2 of 20 idle nodes are out of service for the same reason: its network is slow"
        in fleet.notes()
    )


def test_nobody_is_put_out_while_the_breaker_is_open() -> None:
    fleet = settled(Idle(6))
    turn = Turn(fleet.state, fleet.now)
    turn.set(breaker=replace(turn.breaker, open_until=fleet.now + 1e6, reason="a test"))
    fleet.state = turn.finish()
    fleet.bad["n2"] = 0.0
    fleet.play(4 * EVERY_S)
    assert not fleet.out()
    assert "stays in service while the circuit breaker is open" in fleet.notes()
    fleet.fold(BreakerResetRequested(fleet.now, "an operator looked"))
    fleet.play(2 * EVERY_S)
    assert fleet.out() == {"n2"}


def test_a_node_that_is_out_gets_no_ranks_and_others_do() -> None:
    fleet = settled(Idle(6))
    fleet.bad["n0"] = 0.0
    fleet.play(3 * EVERY_S)
    fleet.submit(job(dp=5, min_dp=1))
    fleet.run()
    assert set(fleet.nodes()) == {"n1", "n2", "n3", "n4", "n5"}


def test_a_job_that_cannot_run_otherwise_gets_a_slow_node_but_none_that_is_not_reached() -> None:
    for speed, gets in ((USUAL / 10, True), (0.0, False)):
        fleet = settled(Idle(6))
        fleet.bad["n0"] = speed
        fleet.play(3 * EVERY_S)
        assert fleet.out() == {"n0"}
        fleet.submit(job(dp=6, min_dp=6))
        assert (JOB in fleet.state.jobs and fleet.job.phase is JobPhase.PREPARING) is gets


# ---------------------------------------------------------------- the way back


@pytest.mark.parametrize("speed", [0.0, USUAL / 10])
def test_a_node_comes_back_by_itself_held_down_and_on_probation(speed: float) -> None:
    fleet = settled(Idle(6, snapshots=True))
    fleet.bad["n2"] = speed
    fleet.play(3 * EVERY_S)
    fleet.play(6 * HOLD_S)
    assert fleet.out() == {"n2"}, "as long as it is bad"
    fleet.bad.clear()
    mended = fleet.now
    while fleet.out():
        fleet.play(20.0)
        assert fleet.now < mended + 10 * EVERY_S
    node = fleet.state.nodes["n2"]
    assert fleet.now >= mended + HOLD_S
    assert node.removal is None
    assert node.probation is not None
    good = [test for test in node.links if test.at > mended]
    assert [test.verdict for test in good[:2]] == [Verdict.GOOD] * 2
    assert good[1].at - good[0].at <= 2 * link_tests.DOUBT_SHARE * EVERY_S, "the second test follows soon"


def test_one_good_test_does_not_bring_it_back_and_a_bad_one_in_the_hold_down_keeps_it_out() -> None:
    fleet = settled(Idle(6))
    fleet.bad["n2"] = USUAL / 10
    fleet.play(3 * EVERY_S)
    fleet.bad.clear()
    while (removal := fleet.state.nodes["n2"].removal) is not None and removal.back_at is None:
        fleet.play(10.0)
        good = [test for test in fleet.state.nodes["n2"].links if test.verdict is Verdict.GOOD]
    assert removal is not None
    assert len([test for test in good if test.at > removal.at]) == 2
    fleet.bad["n2"] = USUAL / 10
    fleet.play(HOLD_S + 2 * EVERY_S)
    assert fleet.out() == {"n2"}
    fleet.bad.clear()
    fleet.play(2 * EVERY_S)
    assert not fleet.out()


def test_with_few_idle_nodes_left_it_comes_back_by_what_was_usual_when_it_was_blamed() -> None:
    fleet = settled(Idle(5))
    fleet.bad["n4"] = USUAL / 10
    fleet.play(3 * EVERY_S)
    assert fleet.out() == {"n4"}
    fleet.submit(job(dp=3))
    fleet.run()
    fleet.play(20 * EVERY_S)
    assert fleet.out() == {"n4"}
    fleet.bad.clear()
    fleet.play(4 * EVERY_S)
    assert not fleet.out()


def test_an_operator_who_has_repaired_it_begins_anew() -> None:
    fleet = settled(Idle(6))
    fleet.bad["n2"] = 0.0
    fleet.play(3 * EVERY_S)
    fleet.fold(NodeRepaired(fleet.now, "n2"))
    assert not fleet.out()
    assert fleet.state.nodes["n2"].links == ()


# ---------------------------------------------------------------- one test


def rows(*speeds: float) -> dict[str, tuple[LinkTest, ...]]:
    found: dict[str, tuple[LinkTest, ...]] = {}
    for index, speed in enumerate(speeds):
        test = LinkTest(float(index + 1), f"q{index}", "alike", True, LinkMeasured(speed, speed, 0.001))
        found[f"p{index}"] = (test,)
        found[f"q{index}"] = (replace(test, partner=f"p{index}"),)
    return found


def test_what_is_expected_is_the_median_of_others_and_half_of_it_where_they_agree() -> None:
    than = links.expected("n0", "alike", rows(90.0, 100.0, 110.0), 0.0)
    assert than is not None
    assert than.bytes_per_s == pytest.approx(100.0)
    assert than.results == 3
    assert than.bytes_per_s_min == pytest.approx(50.0)
    wide = links.expected("n0", "alike", rows(50.0, 100.0, 200.0), 0.0)
    assert wide is not None
    assert wide.bytes_per_s_min == pytest.approx(100.0 / 2**links.SPREAD_MAX), "speeds that vary by factors of two"
    assert links.expected("p1", "alike", rows(90.0, 100.0, 110.0), 0.0) is None, "without its own results"
    assert links.expected("n0", "others", rows(90.0, 100.0, 110.0), 0.0) is None
    assert links.expected("n0", "alike", rows(90.0, 100.0, 110.0), 2.5) is None, "what is older does not count"


def test_a_long_round_trip_is_slow_too() -> None:
    than = links.expected("n0", "alike", rows(100.0, 100.0, 100.0), 0.0)
    assert than is not None
    test = LinkTest(9.0, "n1", "alike", True, LinkMeasured(100.0, 100.0, 0.0049))
    assert links.verdict(test, than) is Verdict.GOOD
    assert links.verdict(replace(test, measured=LinkMeasured(100.0, 100.0, 0.0051)), than) is Verdict.SLOW
