"""A real agent tests a suspected node while it prepares: real self-test, real ports below a directory, real workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agent_harness import Agent, prepare_order, running_agent, script, start_job

from holdfast.domain import orders
from holdfast.domain.signals import NicSample, NodeTested

TRAINS = "import time\ntime.sleep(600)\n"


def port(root: Path, state: str) -> None:
    place = root / "mlx5_0" / "ports" / "1"
    place.mkdir(parents=True, exist_ok=True)
    (place / "state").write_text(f"4: {state}\n")
    (place / "phys_state").write_text("5: LinkUp\n" if state == "ACTIVE" else "2: Polling\n")
    (place / "link_layer").write_text("InfiniBand\n")


@pytest.fixture
def ports(tmp_path: Path) -> Path:
    port(tmp_path / "infiniband", "ACTIVE")
    return tmp_path / "infiniband"


@pytest.fixture
def agent(tmp_path: Path, ports: Path) -> Iterator[Agent]:
    with running_agent(tmp_path, HOLDFAST_INFINIBAND=str(ports)) as agent:
        agent.plane.wait_for_signal(NicSample)
        yield agent


def test_a_suspect_that_passes_says_so_in_its_answer(tmp_path: Path, agent: Agent) -> None:
    train = script(tmp_path, "train", TRAINS)
    start_job(agent.plane, prepare_order("gpt", train))
    order = replace(prepare_order("gpt", train, generation=2), suspect_test_s=60.0)  # of two busy cores
    prepared = start_job(agent.plane, order)
    assert prepared.tested is not None
    verdicts = {check.name: check.ok for check in prepared.tested.checks}
    assert verdicts == dict.fromkeys(("products", "memory", "links", "disk", "ports"), True)
    assert "an all-reduce between 2 processes" in next(c.detail for c in prepared.tested.checks if c.name == "links")
    assert [name for name, _ in prepared.phases_s] == ["stop", "fork", "stage", "self_test"]
    assert agent.plane.all_of(orders.Tested) == [], "it does not test itself otherwise"


def test_a_suspect_that_fails_has_no_workers_and_is_prepared_when_it_is_mended(
    tmp_path: Path, agent: Agent, ports: Path
) -> None:
    train = script(tmp_path, "train", TRAINS)
    start_job(agent.plane, prepare_order("gpt", train))
    port(ports, "DOWN")
    order = replace(prepare_order("gpt", train, generation=2), suspect_test_s=60.0)
    refused = agent.plane.ask(order, command_id="c-2")
    assert not refused.ok
    assert refused.tested is not None
    assert refused.tested.failures == "ports: mlx5_0 port 1 was active, and is DOWN (Polling)"
    assert refused.tested.failures in refused.reason
    assert agent.plane.wait_for_signal(NodeTested).preflight == refused.tested
    assert agent.plane.ask(order, command_id="c-2") == refused, "from memory"
    agent.process.kill()
    agent.process.wait()
    hello = agent.restart()
    assert hello.running == ()
    assert agent.plane.ask(order, command_id="c-2") == refused, "from its disk"

    port(ports, "ACTIVE")
    mended = agent.plane.ask(replace(order, generation=3))
    assert mended.ok, mended.reason
    assert mended.tested is not None
    assert mended.tested.failures == ""


def test_a_budget_that_is_too_small_is_kept_and_condemns_nobody(tmp_path: Path, agent: Agent) -> None:
    train = script(tmp_path, "train", TRAINS)
    start_job(agent.plane, prepare_order("gpt", train))
    order = replace(prepare_order("gpt", train, generation=2), suspect_test_s=0.01)
    prepared = agent.plane.ask(order)
    assert prepared.ok, prepared.reason
    assert prepared.tested is not None
    assert next(check.ok for check in prepared.tested.checks if check.name == "products") is None
    assert prepared.tested.duration_s < 5.0


def test_who_is_not_suspected_is_not_tested(tmp_path: Path, agent: Agent, ports: Path) -> None:
    port(ports, "DOWN")
    prepared = start_job(agent.plane, prepare_order("gpt", script(tmp_path, "train", TRAINS)))
    assert prepared.tested is None
    assert [name for name, _ in prepared.phases_s] == ["stop", "fork", "stage"]
