"""Tests of the network between two real replicators: what is measured, how little it costs, and what says nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from replicator_node import Node, nodes
from slow_relay import slow_relay
from waiting import quickest, wait_until

from holdfast.domain.links import LinkMeasured
from holdfast.replicator.transport.links import ANSWER_S
from holdfast.wire.links import decode_measured

TOKEN = "secret of this test"
SLOW = 2e6


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with nodes(
        Path(tmp_path_factory.mktemp("links")), "here", "there", HOLDFAST_REPLICATOR_CONNECT_TIMEOUT_S="1"
    ) as made:
        yield made


def measured(node: Node, endpoint: str, token: str = TOKEN, **limits: float) -> LinkMeasured:
    return decode_measured(node.begin_link_test(endpoint, token, **limits).result())  # type: ignore[arg-type]


def refusal(node: Node, endpoint: str, token: str = TOKEN) -> str:
    with pytest.raises(grpc.RpcError) as error:
        measured(node, endpoint, token)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(error.value.details())


def test_both_directions_and_the_round_trip_are_measured(pair: list[Node]) -> None:
    here, there = pair
    found: list[LinkMeasured] = []

    def slowest_s(_: int) -> float:
        there.open_link(TOKEN)
        found.append(measured(here, there.endpoint))
        assert not found[-1].failure
        assert found[-1].round_trip_s > 0
        megabyte_s = 1e6 / min(found[-1].out_bytes_per_s, found[-1].in_bytes_per_s)
        return max(found[-1].round_trip_s, megabyte_s)

    assert quickest(slowest_s, below_s=0.1) < 0.1, found


def test_a_slow_way_is_measured_by_who_receives_and_takes_no_longer(pair: list[Node]) -> None:
    here, there = pair
    with slow_relay(there.endpoint, SLOW) as relay:
        there.open_link(TOKEN, bytes_max=1 << 30, seconds_max=0.5)
        began = time.monotonic()
        found = measured(here, relay.endpoint, bytes_max=1 << 30, seconds_max=0.5)
        assert time.monotonic() - began < 2 * (0.5 + ANSWER_S)
    assert not found.failure
    assert found.in_bytes_per_s < 2 * SLOW, "what waits in buffers does not count"
    assert found.out_bytes_per_s < 2 * SLOW


def test_little_memory_is_used(pair: list[Node]) -> None:
    here, there = pair
    before = [psutil.Process(node.pid).memory_info().rss for node in pair]
    there.open_link(TOKEN, bytes_max=256 << 20, seconds_max=2.0)
    assert not measured(here, there.endpoint, bytes_max=256 << 20, seconds_max=2.0).failure
    after = [psutil.Process(node.pid).memory_info().rss for node in pair]
    assert all(now - was < 32 << 20 for was, now in zip(before, after, strict=True))


def test_damaged_bytes_are_a_failure(pair: list[Node]) -> None:
    here, there = pair
    with slow_relay(there.endpoint, 2e9) as relay:
        relay.damages = True
        there.open_link(TOKEN)
        assert "were damaged" in measured(here, relay.endpoint).failure


def test_a_node_that_does_not_answer_is_a_failure(pair: list[Node]) -> None:
    here, there = pair
    with slow_relay(there.endpoint, 0.0) as relay:
        there.open_link(TOKEN)
        assert measured(here, relay.endpoint).failure == "it does not answer"


def test_who_is_not_expected_is_refused_and_that_is_no_failure(pair: list[Node]) -> None:
    here, there = pair
    there.close_link()
    assert "no test of the network is expected" in refusal(here, there.endpoint)
    there.open_link(TOKEN)
    assert "no test of the network is expected" in refusal(here, there.endpoint, "another secret")
    there.open_link(TOKEN, for_s=0.0)  # which is over
    assert "no test of the network is expected" in refusal(here, there.endpoint)


def test_a_replicator_that_is_not_there_is_no_failure(pair: list[Node]) -> None:
    here, there = pair
    with slow_relay(there.endpoint, SLOW) as relay:
        gone = relay.endpoint
    assert "refused" in refusal(here, gone).lower()


@pytest.mark.parametrize("side", ["there", "here"])
def test_either_side_ends_it_at_once(pair: list[Node], side: str) -> None:
    here, there = pair
    lasts_s = 5.0  # in either direction

    def next_one() -> LinkMeasured | None:
        there.open_link(TOKEN)
        try:
            return measured(here, there.endpoint)
        except grpc.RpcError as error:
            if error.details() == "a test of the network is in progress":
                return None
            raise

    with slow_relay(there.endpoint, 1e5) as relay:
        there.open_link(TOKEN, bytes_max=1 << 30, seconds_max=lasts_s)
        call = here.begin_link_test(relay.endpoint, TOKEN, bytes_max=1 << 30, seconds_max=lasts_s)
        began = time.monotonic()
        if side == "there":
            there.close_link()
            with pytest.raises(grpc.RpcError):
                call.result()
        else:
            call.cancel()
        found = wait_until(next_one, description="the next test of the network")
        assert not found.failure
        assert time.monotonic() - began < lasts_s


def test_a_test_has_a_secret(pair: list[Node]) -> None:
    here, there = pair
    with pytest.raises(grpc.RpcError) as error:
        there.open_link("")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no test of the network is expected" in refusal(here, there.endpoint, "any")
