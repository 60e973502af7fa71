"""A real agent tests itself: the result comes up on both ways, and a job that wants the node does not wait for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agent_harness import prepare_order, running_agent, script, start_job
from waiting import wait_until

from holdfast.domain import orders
from holdfast.domain.signals import NodeTested
from holdfast.runtime.processes.survivors import BOOT_ID

RESULT_TIMEOUT_S = 120.0
SCRIPT = "import time\ntime.sleep(600)\n"


def test_a_node_tests_itself_before_it_gets_ranks_and_when_it_is_suspected(tmp_path: Path) -> None:
    with running_agent(tmp_path, HOLDFAST_PREFLIGHT_EVERY_S="1800") as agent:
        (hello,) = agent.plane.all_of(orders.Hello)
        assert hello.preflight is not None
        tested = agent.plane.wait_for(orders.Tested, timeout_s=RESULT_TIMEOUT_S).preflight
        assert tested.failures == ""
        checks = {check.name: check for check in tested.checks}
        assert checks["products"].ok is True
        assert "exact products on" in checks["products"].detail
        assert agent.plane.wait_for_signal(NodeTested).preflight == tested

        order = replace(prepare_order("gpt", script(tmp_path, "sleep", SCRIPT)), self_test=True)
        prepared = start_job(agent.plane, order)
        assert prepared.ok
        assert [worker.rank for worker in prepared.workers] == [0]
        assert not agent.running("self-test")


def test_a_node_that_is_not_to_test_itself_says_so(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        (hello,) = agent.plane.all_of(orders.Hello)
        assert hello.preflight is None


def test_an_agent_tells_the_boot_of_its_machine(tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"
    with running_agent(tmp_path, HOLDFAST_BOOT_ID_FILE=str(boot)) as agent:
        assert agent.wait_connected().facts.boot_id == "", "unknown"
        boot.write_text("the next one\n")
        agent.process.kill()
        agent.process.wait()
        agent.restart()
        wait_until(
            lambda: agent.plane.all_of(orders.Hello)[-1].facts.boot_id == "the next one", description="its next life"
        )


def test_an_agent_tells_one_machine_from_another_without_naming_it(tmp_path: Path) -> None:
    uuid = tmp_path / "product_uuid"
    uuid.write_text("A1B2C3D4-0000-1111-2222-333344445555\n")
    with running_agent(tmp_path, HOLDFAST_MACHINE_ID_FILE=str(uuid)) as agent:
        first = agent.wait_connected().facts.machine_id
        assert first
        assert "333344445555" not in first
        uuid.write_text("A1B2C3D4-0000-1111-2222-333344446666\n")
        agent.process.kill()
        agent.process.wait()
        agent.restart()
        wait_until(
            lambda: agent.plane.all_of(orders.Hello)[-1].facts.machine_id not in ("", first),
            description="another machine",
        )


def test_the_boot_is_the_kernels(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        assert agent.wait_connected().facts.boot_id == BOOT_ID.read_text().strip()
