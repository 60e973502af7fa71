"""A real agent boots its machine with a command in its place: once, never under workers, and it starts nothing from then on."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from agent_harness import prepare_order, running_agent, script, start_job

from holdfast.domain.orders import RebootNode, Stop

TRAINS = "import time\ntime.sleep(600)\n"
COMMAND = (
    "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + '\\n'); print('going down'); sys.exit(int(sys.argv[3]))"
)


def command(tmp_path: Path, code: int = 0) -> str:
    return shlex.join([sys.executable, "-c", COMMAND, str(tmp_path / "boots"), "{node}", str(code)])


def boots(tmp_path: Path) -> list[str]:
    path = tmp_path / "boots"
    return path.read_text().split() if path.exists() else []


def test_a_machine_is_ordered_to_boot_once_and_starts_nothing_then(tmp_path: Path) -> None:
    with running_agent(tmp_path, HOLDFAST_REBOOT_COMMAND=command(tmp_path)) as agent:
        assert agent.wait_connected().facts.reboots
        order = RebootNode("Xid 79 on GPU 3", 30.0)
        first = agent.plane.ask(order, command_id="c-reboot")
        assert (first.ok, first.reason) == (True, "going down")
        assert agent.plane.ask(order, command_id="c-reboot") == first
        refused = agent.plane.ask(prepare_order("gpt", script(tmp_path, "train", TRAINS)))
        assert not refused.ok
        assert "is about to boot" in refused.reason
        agent.process.kill()
        agent.process.wait()
        agent.restart()
        assert agent.plane.ask(order, command_id="c-reboot") == first
        assert boots(tmp_path) == ["node-0"]


def test_workers_are_named_and_keep_their_machine(tmp_path: Path) -> None:
    with running_agent(tmp_path, HOLDFAST_REBOOT_COMMAND=command(tmp_path)) as agent:
        start_job(agent.plane, prepare_order("gpt", script(tmp_path, "train", TRAINS)))
        refused = agent.plane.ask(RebootNode("Xid 79 on GPU 3", 30.0))
        assert not refused.ok
        assert "is not booted while workers run on it: rank 0 of gpt (pid " in refused.reason
        assert boots(tmp_path) == []
        assert agent.plane.ask(Stop("gpt", 1)).ok
        assert agent.plane.ask(RebootNode("Xid 79 on GPU 3", 30.0)).ok


def test_a_command_that_fails_says_why_and_the_node_is_as_before(tmp_path: Path) -> None:
    with running_agent(tmp_path, HOLDFAST_REBOOT_COMMAND=command(tmp_path, 3)) as agent:
        answer = agent.plane.ask(RebootNode("Xid 79 on GPU 3", 30.0))
        assert not answer.ok
        assert answer.reason.endswith("ended with exit code 3: going down")
        start_job(agent.plane, prepare_order("gpt", script(tmp_path, "train", TRAINS)))


@pytest.mark.parametrize("line", ["", "no-such-program --now"])
def test_an_agent_without_a_command_says_so(tmp_path: Path, line: str) -> None:
    with running_agent(tmp_path, HOLDFAST_REBOOT_COMMAND=line) as agent:
        assert not agent.wait_connected().facts.reboots
        assert "no command boots this node" in agent.plane.ask(RebootNode("Xid 79", 30.0)).reason
