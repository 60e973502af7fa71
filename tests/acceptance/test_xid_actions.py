"""Every class of action of the Xid catalogue in a real stack: kernel line → finding → decision → order or request → command.

Resets, whose commands can refuse, fail and take long, are in test_gpu_reset.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training import Cluster, cluster, gpt_job
from waiting import wait_until

# Slow: what a boot or another machine has to wait for is looked at every 30 s.
pytestmark = [pytest.mark.slow]

JOB = "gpt"
NOTE = "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + chr(10)); print('accepted')"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of the operator were called with, a file each."""
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, commands: Path) -> Iterator[Cluster]:
    """dp 2 on two nodes, and two spares."""
    environment = {
        "HOLDFAST_PREFLIGHT_EVERY_S": "3600",
        "HOLDFAST_REBOOT_COMMAND": f'{sys.executable} -c "{NOTE}" {commands}/reboot {{node}}',
        "HOLDFAST_REPLACE_COMMAND": f'{sys.executable} -c "{NOTE}" {commands}/replace {{node}} {{reason}}',
    }
    with cluster(tmp_path_factory.mktemp("stack"), nodes=4, environment=environment) as run:
        run.client.submit(gpt_job(JOB, tmp_path_factory.mktemp("out"), dp=2, pp=1, steps=1_000_000))
        run.wait_step(JOB, 10)
        yield run


def calls(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def test_a_line_to_be_watched_stops_nobody(run: Cluster) -> None:
    node = run.node_of(JOB, 0)
    run.inject.xid(node, 92)
    wait_until(
        lambda: [each for each in run.client.findings() if each["node"] == node and "92" in each["summary"]],
        description="the finding",
    )
    step = run.client.job(JOB)["step"]
    view = run.wait_step(JOB, step + 20)
    assert view["generation"] == 1
    assert not list(run.client.incidents(JOB))


def test_a_restart_is_of_the_processes_on_the_same_nodes(run: Cluster, commands: Path) -> None:
    node = run.node_of(JOB, 1)
    run.inject.xid(node, 94)
    incident = run.wait_resolved(JOB, 1)[-1]
    assert (incident["node"], incident["action"]["kind"]) == (node, "restart")
    assert run.node_of(JOB, 1) == node
    assert not calls(commands / "reboot")


def test_a_machine_that_must_boot_is_left_to_a_spare_and_booted(run: Cluster, commands: Path) -> None:
    node = run.node_of(JOB, 1)
    run.inject.xid(node, 78)
    incident = run.wait_resolved(JOB, 2)[-1]
    assert (incident["node"], incident["action"]["kind"]) == (node, "hot_swap")
    assert run.node_of(JOB, 1) != node
    wait_until(lambda: calls(commands / "reboot") == [node], description="the reboot")
    assert not calls(commands / "replace")


def test_a_machine_that_must_be_replaced_is_left_to_a_spare_and_asked_for(run: Cluster, commands: Path) -> None:
    node = run.node_of(JOB, 0)
    run.inject.xid(node, 64)
    incident = run.wait_resolved(JOB, 3)[-1]
    assert (incident["node"], incident["action"]["kind"]) == (node, "hot_swap")
    assert run.node_of(JOB, 0) != node
    wait_until(lambda: len(calls(commands / "replace")) == 1, description="the request")
    assert calls(commands / "replace")[0].startswith(f"{node} Xid 64")
    assert node not in calls(commands / "reboot")
    [view] = [each for each in run.client.nodes() if each["node"] == node]
    assert "another machine was requested" in view["reason"]
