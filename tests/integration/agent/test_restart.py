"""A real agent is replaced by a new one in the same process: never under workers, and with everything that it keeps."""

from __future__ import annotations

from pathlib import Path

import psutil
from agent_harness import prepare_order, running_agent, script, start_job
from waiting import wait_until

from holdfast.domain import orders
from holdfast.domain.orders import RestartAgent, Stop

TRAINS = "import time\ntime.sleep(600)\n"


def test_an_idle_agent_begins_again_as_another_incarnation_of_the_same_process(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        first = agent.wait_connected().facts
        assert first.restarts
        pid = agent.process.pid
        order = RestartAgent("a new version")
        answer = agent.plane.ask(order, command_id="c-restart")
        assert (answer.ok, answer.reason) == (True, "the agent restarts")
        refused = agent.plane.ask(prepare_order("gpt", script(tmp_path, "train", TRAINS)))
        assert not refused.ok
        assert "about to be replaced" in refused.reason

        def other() -> bool:
            return agent.plane.all_of(orders.Hello)[-1].facts.incarnation != first.incarnation

        wait_until(other, description="its next life")
        second = agent.plane.all_of(orders.Hello)[-1].facts
        assert second.agent_pid == first.agent_pid
        assert psutil.Process(pid).is_running()
        assert agent.plane.ask(order, command_id="c-restart") == answer, "it was carried out once"
        start_job(agent.plane, prepare_order("gpt", script(tmp_path, "train", TRAINS)))


def test_workers_keep_their_agent(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        start_job(agent.plane, prepare_order("gpt", script(tmp_path, "train", TRAINS)))
        refused = agent.plane.ask(RestartAgent("a new version"))
        assert not refused.ok
        assert "stays while workers run on it: rank 0 of gpt (pid " in refused.reason
        assert agent.plane.ask(Stop("gpt", 1)).ok
        assert agent.plane.ask(RestartAgent("a new version")).ok
