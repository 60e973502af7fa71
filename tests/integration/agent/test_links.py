"""Real agents with real replicators test the network between them; and never delay a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import Agent, prepare_order, running_agent, script
from slow_relay import slow_relay
from waiting import wait_until

from holdfast.domain.links import LinkLimits
from holdfast.domain.orders import CheckLink, Stop

TRAINS = "import time\ntime.sleep(600)\n"
LIMITS = LinkLimits(8 << 20, 0.5)
LONG = LinkLimits(1 << 30, 5.0)
TOKEN = "secret of this test"
SLOW = 2e6


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Agent]]:
    with (
        running_agent(tmp_path_factory.mktemp("one"), replicator=True) as one,
        running_agent(tmp_path_factory.mktemp("other"), replicator=True) as other,
    ):
        yield one, other


def waits(agent: Agent, limits: LinkLimits = LIMITS) -> str:
    """Where its replicator waits."""
    facts = agent.wait_connected().facts
    assert facts.tests_links
    answer = agent.plane.ask(CheckLink("one", TOKEN, limits, for_s=30.0))
    assert answer.ok, answer.reason
    assert answer.link is None
    return facts.replicator_endpoint


def measure(endpoint: str, limits: LinkLimits = LIMITS) -> CheckLink:
    return CheckLink("other", TOKEN, limits, endpoint)


def test_two_agents_measure_both_directions_and_a_slow_way_is_seen(pair: tuple[Agent, Agent]) -> None:
    one, other = pair
    endpoint = waits(other)
    usual = one.plane.ask(measure(endpoint)).link
    assert usual is not None
    assert not usual.failure
    with slow_relay(waits(other), SLOW) as relay:
        slowed = one.plane.ask(measure(relay.endpoint)).link
    assert slowed is not None
    for was, now in (
        (usual.out_bytes_per_s, slowed.out_bytes_per_s),
        (usual.in_bytes_per_s, slowed.in_bytes_per_s),
    ):
        assert now < 2 * SLOW < was / 5


@pytest.mark.parametrize("who", ["who measures", "who waits"])
def test_an_order_to_prepare_ends_a_test_and_does_not_wait_for_it(
    pair: tuple[Agent, Agent], tmp_path: Path, who: str
) -> None:
    """A whole test would take ten seconds, and would be answered well."""
    one, other = pair
    worker = one if who == "who measures" else other
    with slow_relay(waits(other, LONG), 1e5) as relay:
        test = one.plane.send(measure(relay.endpoint, LONG))
        wait_until(lambda: relay.passed > 1 << 16, description="bytes of the test")
        prepared = worker.plane.ask(prepare_order(who[4:], script(tmp_path, "train", TRAINS)))
        assert prepared.ok, prepared.reason
        [answer] = wait_until(lambda: one.plane.answers(test), description="the end of the test")
    assert not answer.ok
    assert answer.link is None, "its results until then are not reported"
    if worker is one:
        assert "received work, which cancelled its test of the network with other" in answer.reason
        assert one.plane.reports.index(answer) < one.plane.reports.index(prepared)
    refused = worker.plane.ask(CheckLink("x", TOKEN, LIMITS, for_s=30.0))
    assert not refused.ok
    assert "has work and does not test the network" in refused.reason
    assert worker.plane.ask(Stop(who[4:], 1)).ok
    assert one.plane.ask(measure(waits(other))).ok, "both are idle again"
