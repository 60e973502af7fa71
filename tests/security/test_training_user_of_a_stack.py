"""`holdfast up --user`: a job loses a rank and a node and goes on, while another job of the same user looks for keys."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from commands import Shell, read_until
from training_users import NOBODY, USER, needs_another_user, reachable_directory, view
from waiting import wait_until

from holdfast.cli import api_token
from holdfast.cli.client import Client
from holdfast.cli.stack_power import SOCKET_NAME, ask

pytestmark = [needs_another_user]

TIMEOUT_S = 120.0
PORTS = ["--port", "0", "--control-port", "0", "--diagnostics-port", "0"]
SAY = "print('user', os.getuid(), 'rank', run.world.rank, 'from step', step, flush=True)"
TRAIN = f"""
import os, time, torch, holdfast.train as hf
def main(run):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    state = {{"model": model}}
    step = run.restore(state)
    {SAY}
    while True:
        with run.step(step) as s:
            model(torch.randn(2, 8)).sum().backward()
            time.sleep(0.02)
            s.log(loss=1.0, tokens=1)
        step += 1
        run.checkpoint(state, step)
hf.launch(main)
"""
SEARCH = """
import json, os, socket, sys
up, result = sys.argv[1:]
found = {}
def tried(what, attempt):
    try:
        found[what] = repr(attempt())[:100]
    except OSError as error:
        found[what] = type(error).__name__
for name in ("join-token", "api-token", "stack.json"):
    tried(name, lambda: open(f"{up}/{name}").read())
for name in ("redis", "supervisor", "diagnostics", "nodes/node-0", "nodes/node-0/disk", "nodes/node-0/logs"):
    tried("list " + name, lambda: os.listdir(f"{up}/{name}"))
tried("redis", lambda: socket.socket(socket.AF_UNIX).connect(f"{up}/redis/redis.sock"))
tried("control", lambda: socket.socket(socket.AF_UNIX).connect(f"{up}/nodes/node-0/replicator.sock"))
tried("power", lambda: socket.socket(socket.AF_UNIX).connect(f"{up}/stack.sock"))
for pid in filter(str.isdigit, os.listdir("/proc")):
    if os.stat(f"/proc/{pid}").st_uid == 0:
        try:
            tried(f"environ {pid}", lambda: open(f"/proc/{pid}/environ", "rb").read(1))
        except FileNotFoundError:
            pass
with open(result + ".part", "w") as file:
    json.dump(found, file)
os.rename(result + ".part", result)
"""


@dataclass(frozen=True, slots=True)
class Running:
    root: Path
    client: Client

    @property
    def up(self) -> Path:
        return self.root / "up"

    def job(self, name: str, phase: str = "running", step: int = 0) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            view = self.client.job(name)
            assert view["phase"] != "failed" or phase == "failed", view["reason"]
            return view if view["phase"] == phase and (view["step"] or 0) >= step else None

        return wait_until(reached, description=f"{name}: {phase}, step {step}", timeout_s=TIMEOUT_S)

    def pid(self, job: str, rank: int) -> int:
        return next(int(each["pid"]) for each in self.client.job(job)["ranks"] if each["rank"] == rank)

    def submit(self, name: str, script: str, *args: object, nodes: int = 1) -> None:
        (path := self.root / f"{name}.py").write_text(script)
        checkpoint = {"interval_steps": 10, "keep": 2}
        spec = {"name": name, "script": str(path), "args": [*map(str, args)], "nodes": nodes, "mesh": {"dp": nodes}}
        self.client.submit({**spec, "checkpoint": checkpoint})

    def resolved(self, job: str, count: int) -> None:
        def closed() -> bool:
            return [each["state"] for each in self.client.incidents(job)].count("resolved") >= count

        wait_until(closed, description=f"{count} closed incidents of {job}", timeout_s=TIMEOUT_S)


@contextmanager
def stack(root: Path, *, nodes: int) -> Iterator[Running]:
    shell = Shell(root, view=view())
    with shell.start("up", "--dir", "up", "--nodes", str(nodes), *PORTS, "--user", USER) as process:
        try:
            read_until(process, "Ctrl-C stops everything")
            record: Any = json.loads((root / "up" / "stack.json").read_text())
            token = api_token.read(root / "up" / api_token.FILE)
            with Client(str(record["endpoints"]["supervisor"]["api"]), token=token) as client:
                yield Running(root, client)
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)
    shell.assert_nothing_runs()


def test_a_job_survives_a_rank_and_a_node_while_another_finds_no_key() -> None:
    with reachable_directory() as root, stack(root, nodes=4) as running:
        running.submit("train", TRAIN, nodes=2)
        running.job("train", step=30)
        assert psutil.Process(running.pid("train", 0)).uids().real == NOBODY

        (out := root / "out").mkdir()
        os.chown(out, NOBODY, NOBODY)
        running.submit("search", SEARCH, running.up, out / "found.json")
        running.job("search", phase="completed")
        found = json.loads((out / "found.json").read_text())
        assert len([what for what in found if what.startswith("environ")]) > 8, (
            "the processes of the services are there"
        )
        assert {what for what, result in found.items() if result not in ("PermissionError", "FileNotFoundError")} == {
            "stack.json"
        }, found

        os.kill(running.pid("train", 1), signal.SIGKILL)
        running.resolved("train", 1)
        after = running.job("train", step=60)
        node = next(str(each["node"]) for each in after["ranks"] if each["rank"] == 1)
        ask(running.up / SOCKET_NAME, "power_off", node)
        running.resolved("train", 2)
        last = running.job("train", step=int(after["step"]) + 30)
        assert next(str(each["node"]) for each in last["ranks"] if each["rank"] == 1) != node
        log = running.up / "nodes" / next(str(each["node"]) for each in last["ranks"] if each["rank"] == 1)
        said = (log / "logs" / "train" / f"g{last['generation']}" / "rank-1.log").read_text()
        assert f"user {NOBODY} rank 1 from step" in said
        assert "from step 0" not in said
