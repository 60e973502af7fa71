"""Full disks: what cannot start says so; what trains goes on training, and the tier that is full says so."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import prepare_order, running_agent, script, start_job
from commands import Shell, refused
from training import WarmStack
from waiting import wait_until

from holdfast.cli.client import Client
from holdfast.cli.demo.course import examples
from holdfast.cli.run import wait_for_nodes
from holdfast.cli.stack_options import StackOptions
from holdfast.domain.signals import WorkerExited

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can only be mounted by root")

SMALL_KIB = 64
GROWING_BYTES = 4096


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB. Mounted where a test wants it: `tmp_path/small`."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_KIB}k", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    with (place / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"\0" * GROWING_BYTES)
        except OSError:
            return


def test_a_stack_whose_directory_is_full_does_not_start(small: Path, tmp_path: Path) -> None:
    fill(small)
    shell = Shell(tmp_path)
    ports = ["--port", "0", "--control-port", "0", "--diagnostics-port", "0"]
    refused(shell("up", "--dir", str(small), *ports), "--dir", str(small), "No space left on device")
    shell.assert_nothing_runs()


def test_a_full_checkpoint_directory_stops_no_training(small: Path, tmp_path: Path) -> None:
    """The disk tier of the one node is too small for a shard: memory still holds the checkpoints."""
    pytest.importorskip("torch")
    fill(small)
    directory = tmp_path / "stack"
    node = directory / "nodes" / "node-0"
    node.mkdir(parents=True)
    (node / "disk").symlink_to(small, target_is_directory=True)
    job = {
        "name": "full",
        "script": str(examples() / "gpt" / "train.py"),
        "args": ["--steps", "30", "--layers", "2", "--width", "32", "--seq", "32", "--out", str(tmp_path / "out")],
        "nodes": 1,
        "nproc_per_node": 1,
        "checkpoint": {"interval_steps": 5, "keep": 2},
    }
    with WarmStack(StackOptions(directory=directory, nodes=1)) as stack, Client(stack.api_url) as client:
        wait_for_nodes(client, stack, 1)
        client.submit(job)
        ended = wait_until(lambda: _ended(client), description="the job to end", poll_s=0.1)
        wait_until(lambda: client.job("full")["step"] == 30, description="the last step to be counted")
        said = "\n".join(path.read_text(errors="replace") for path in node.rglob("*.log") if path.is_file())
    assert ended["phase"] == "completed", ended["reason"]
    assert ended["checkpoint_step"] == 30
    assert "no room for" in said
    assert "bytes are free there" in said


PRINTS = """
import logging, sys
for number in range(2000):
    print("step", number, "x" * 100)
    print("bar", number, file=sys.stderr)
    logging.warning("logged %d", number)
sys.stdout.buffer.write(b"bytes")
sys.stdout.flush()
open(sys.argv[1], "w").write("trained")
"""


def test_a_full_log_disk_ends_no_training(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "logs").symlink_to(small, target_is_directory=True)
    with running_agent(tmp_path) as agent:
        order = prepare_order("prints", script(tmp_path, "prints", PRINTS), args=(str(tmp_path / "trained"),))
        start_job(agent.plane, order)
        exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "prints")
        assert exited.exit_code == 0, agent.worker_log("prints", 1, 0)[-1000:]
        assert os.statvfs(small).f_bavail == 0, "the disk was full"
        assert "step 0 " in agent.worker_log("prints", 1, 0)
    assert (tmp_path / "trained").read_text() == "trained"


def _ended(client: Client) -> dict[str, object] | None:
    view = client.job("full")
    return view if view["phase"] in ("completed", "failed", "stopped") else None
