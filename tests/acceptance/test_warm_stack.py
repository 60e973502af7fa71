"""The stacks of these tests, whose processes are forks, have the processes and the modules of one that a user starts."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import psutil
from leftovers import gone
from training import cluster
from waiting import wait_until

SCRIPT = """
import json, sys, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
out = Path(sys.argv[1])
(out / "new").write_text(json.dumps(sorted(sys.modules)))
(out / "new").replace(out / "modules")
while True:
    time.sleep(0.05)
"""
OF_SERVICES = ("grpc", "pydantic", "redis", "structlog", "anyio", "fastapi", "holdfast.agent", "holdfast.supervisor")


def words(process: psutil.Process) -> str:
    """Empty for a process that has ended meanwhile."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()[1:3])
    return ""


def test_processes_belong_to_the_agent_end_with_it_and_workers_have_no_modules_of_services(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with cluster(tmp_path / "stack", nodes=1) as run:
        run.client.submit(
            {"name": "idle", "script": str(script), "args": [str(tmp_path)], "nodes": 1, "mesh": {"dp": 1}}
        )
        wait_until((tmp_path / "modules").exists, description="what a worker has imported")
        agent = psutil.Process(run.stack.service_pids()["node-0"])
        children = {words(child): child for child in agent.children()}
        family = agent.children(recursive=True)
        assert words(agent) == "-m holdfast.agent"
        assert {"-m holdfast.replicator", "-m holdfast.train.warm.template"} <= set(children)
        for name in ("-m holdfast.replicator", "-m holdfast.train.warm.template"):
            assert children[name].ppid() == agent.pid
        worker = next(each for each in family if each.pid == run.client.job("idle")["ranks"][0]["pid"])
        assert worker.cmdline()[0] == "holdfast: idle rank 0"
        modules = set(json.loads((tmp_path / "modules").read_text()))
        assert "torch.distributed.fsdp" in modules
        assert not modules & set(OF_SERVICES)
        agent.kill()
        wait_until(lambda: all(gone(each.pid) for each in family), description="its processes to end with it")
