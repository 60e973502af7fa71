"""A real agent starts modules and programs, reads secrets on the node, and says what is not warm."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_harness import Agent, prepare_order, read_json, running_agent, script, start_job
from waiting import wait_until

from holdfast.domain.job import EnvSource, LaunchSpec
from holdfast.domain.signals import WorkerExited

REPORT = """
import json, os, sys
with open(os.environ["REPORT"] + ".new", "w") as file:
    json.dump({
        "argv": sys.argv, "name": __name__, "package": __package__, "cwd": os.getcwd(), "path": sys.path[0],
        "forked": "holdfast.train.warm.forked" in sys.modules, "key": os.environ.get("KEY"),
    }, file)
os.rename(os.environ["REPORT"] + ".new", os.environ["REPORT"])
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with running_agent(tmp_path_factory.mktemp("node")) as agent:
        yield agent


def end_of(agent: Agent, job: str) -> WorkerExited:
    return agent.plane.wait_for_signal(WorkerExited, lambda each: each.job == job)


def report_of(agent: Agent, root: Path, job: str, **launch: Any) -> dict[str, Any]:
    report = root / "report.json"
    order = prepare_order(job, "")
    spec = LaunchSpec(**{"cwd": str(root), "env": (("REPORT", str(report)),), **launch})
    start_job(agent.plane, replace(order, launch=spec))
    ended = end_of(agent, job)
    assert ended.exit_code == 0, agent.worker_log(job, 1, 0)
    return read_json(report)


def test_a_module_of_a_package(agent: Agent, tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(f"from . import __name__ as parent\nassert parent == 'pkg'\n{REPORT}")
    found = report_of(agent, tmp_path, "module", module="pkg.train", args=("--lr", "-m"))
    assert found["argv"] == [str(package / "train.py"), "--lr", "-m"]
    assert (found["name"], found["package"], found["forked"]) == ("__main__", "pkg", True)
    assert found["cwd"] == found["path"] == str(tmp_path)


def test_a_package_and_a_directory(agent: Agent, tmp_path: Path) -> None:
    package = tmp_path / "whole"
    package.mkdir()
    (package / "__main__.py").write_text(REPORT)
    found = report_of(agent, tmp_path, "package", module="whole")
    assert (found["argv"], found["package"]) == ([str(package / "__main__.py")], "whole")
    found = report_of(agent, tmp_path, "directory", script=str(package))
    assert (found["argv"], found["path"], found["name"]) == ([str(package)], str(package), "__main__")


def test_a_console_script_is_warm_and_another_program_says_that_it_is_not(agent: Agent, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\n{REPORT}")
    path = script(tmp_path, "report", REPORT)
    other = tmp_path / "other"
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{path}" "$@"\n')
    for program in (tool, other):
        program.chmod(0o755)
    found = report_of(agent, tmp_path, "tool", command=str(tool), args=("a",))
    assert (found["argv"], found["forked"]) == ([str(tool), "a"], True)
    assert agent.worker_log("tool", 1, 0) == ""
    found = report_of(agent, tmp_path, "other", command=str(other), args=("a",))
    assert (found["argv"], found["forked"]) == ([path, "a"], False)
    assert agent.worker_log("other", 1, 0).startswith(f"holdfast: {other} is not a Python program of ")


def test_a_secret_is_read_on_the_node_and_kept_nowhere(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cr3t\n")
    path = script(tmp_path, "report", REPORT)
    found = report_of(agent, tmp_path, "secret", script=path, env_from=(EnvSource("KEY", file=str(tmp_path / "key")),))
    assert found["key"] == "s3cr3t"
    kept = [path for path in agent.root.rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if b"s3cr3t" in path.read_bytes()]
    missing = LaunchSpec(script=path, env_from=(EnvSource("KEY", command="false"),))
    refused = agent.plane.ask(replace(prepare_order("refused", path), launch=missing))
    assert not refused.ok
    assert "env_from.KEY: the command `false` ended with exit code 1, on this node" in refused.reason


def test_a_module_that_is_not_there_ends_the_worker_with_its_name(agent: Agent, tmp_path: Path) -> None:
    start_job(
        agent.plane, replace(prepare_order("nothing", ""), launch=LaunchSpec(module="no.such", cwd=str(tmp_path)))
    )
    ended = end_of(agent, "nothing")
    assert ended.exit_code == 1
    assert ended.error is not None
    assert "No module named 'no'" in json.dumps(ended.error.message)


# ---------------------------------------------------------------- scripts with nvidia-resiliency-ext's client

PEERS = Path(sys.prefix) / "peers"

INSTRUMENTED = """
import sys, time
import torch.distributed as dist
sys.path.append(sys.argv[2])
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
dist.init_process_group("gloo")
client = RankMonitorClient()
client.init_workload_monitoring()
for _ in range(3):
    client.start_section("step")
    client.send_heartbeat()
    time.sleep(0.01)
    client.end_section("step")
client.calculate_and_set_section_timeouts()
if sys.argv[1] == "ends":
    client.calculate_and_set_hb_timeouts()
print(client.section_timeouts.calculated_sections, flush=True)
if sys.argv[1] == "hangs":
    client.start_section("step")
    time.sleep(600)
client.shutdown_workload_monitoring()
"""


@pytest.fixture(scope="module")
def client() -> str:
    if not (PEERS / "nvidia_resiliency_ext").is_dir():
        pytest.skip(
            f"nvidia-resiliency-ext is not installed in {PEERS} (make {PEERS}/.installed): its client was NOT tried"
        )
    return str(PEERS)


def test_its_own_client_is_served_and_a_section_that_hangs_ends_its_rank(
    agent: Agent, tmp_path: Path, client: str
) -> None:
    path = script(tmp_path, "instrumented", INSTRUMENTED)
    env = (("FT_RANK_SECTION_TIMEOUTS", "step:600"),)
    for job in ("ends", "hangs"):
        start_job(agent.plane, prepare_order(job, path, env=env, args=(job, client)))
        ended = end_of(agent, job)
        assert "{'step'}" in agent.worker_log(job, 1, 0), agent.worker_log(job, 1, 0)
        if job == "ends":
            assert (ended.exit_code, ended.signal) == (0, None)
        else:
            assert (ended.exit_code, ended.signal, ended.expected) == (None, 9, False)
            assert "rank 0 is killed: section 'step' has been open for " in ended.log_tail[-1]
            assert "(calculated by the script)" in ended.log_tail[-1]
    wait_until(lambda: not agent.running("holdfast-reaper"), description="every worker to be gone")
