"""deploy/chaos/nodes.sh with a `docker` and a `sleep` that only write down what they were asked for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from containers.images import ROOT

# `sleep` fails at its third call: that ends the loop.
SLEEP = 'echo "sleep $*" >> "$ASKED"; [ "$(grep -c ^sleep "$ASKED")" -lt 3 ]'
DOCKER = """
echo "docker $1 $2" >> "$ASKED"
case $1 in
    inspect) echo stack ;;
    ps) echo "$RUNNING" ;;
esac
"""


def asked(tmp_path: Path, running: str) -> list[str]:
    for name, script in (("sleep", SLEEP), ("docker", DOCKER), ("hostname", "echo chaos")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    record = tmp_path / "asked"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "ASKED": str(record),
        "RUNNING": running,
        "CHAOS_EVERY_S": "120",
        "CHAOS_AWAY_S": "30",
    }
    subprocess.run(["sh", str(ROOT / "deploy/chaos/nodes.sh")], env=environment, check=False, timeout=10)
    return record.read_text().splitlines()


@pytest.mark.parametrize("node", ["node-2", "spare"])
def test_a_node_is_killed_and_comes_back_and_nothing_else_is_touched(tmp_path: Path, node: str) -> None:
    running = f"aaa redis\nbbb {node}\nccc supervisor-a\nddd job\neee chaos"
    assert asked(tmp_path, running) == [
        "docker inspect --format",
        "sleep 120",
        "docker ps --filter",
        "docker kill bbb",
        "sleep 30",
        "docker start bbb",
        "sleep 120",
    ]


def test_without_a_node_nothing_is_killed(tmp_path: Path) -> None:
    steps = asked(tmp_path, "aaa redis\neee chaos")
    assert steps == ["docker inspect --format", *["sleep 120", "docker ps --filter"] * 2, "sleep 120"]
