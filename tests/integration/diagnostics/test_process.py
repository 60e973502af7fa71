"""The real process: starts on a real Redis, says what is wrong, dies on time, and sees a killed agent as a lost node."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from waiting import TIMEOUT_S, wait_until, wait_until_async
from warm_processes import WarmProcess, warm

from holdfast.domain.findings import Finding, FindingKind
from holdfast.log.names import FINDINGS
from holdfast.log.redis import RedisLog
from holdfast.wire.events import decode_finding

# One rank on one node: connects, starts a generation, then beats for ever. Before each tick it prints the time.
AGENT = """
import asyncio, sys, time
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, Tick, WorkerExited
from holdfast.runtime.rpc.grpc_channel import open_channel
from holdfast.v1.telemetry_pb2_grpc import TelemetryStub
from holdfast.wire.telemetry import encode_tick

async def main(endpoint, node):
    async with open_channel(endpoint) as channel:
        call = TelemetryStub(channel).Stream()
        now = time.time()
        started = GenerationStarted(node, now, "gpt", 1, Mesh.of({"dp": 2}), (0,), HangSpec())
        for seq in range(1, 10_000):
            signals = (started,) if seq == 1 else ()
            print(time.time(), flush=True)
            await call.write(encode_tick(Tick(node, "a", seq, time.time(), signals), wants_ack=True))
            await call.read()
            await asyncio.sleep(0.05)

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def diagnostics(redis_url: str, directory: Path, **environment: str) -> Iterator[tuple[WarmProcess, str]]:
    ready = directory / "ready.json"
    process = start(redis_url, directory, HOLDFAST_READY_FILE=str(ready), **environment)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, description="diagnostics to serve")
        assert process.poll() is None, (directory / "log").read_text()
        yield process, json.loads(ready.read_text())["endpoint"]
    finally:
        process.kill()
        process.wait()


def start(redis_url: str, directory: Path, **environment: str) -> WarmProcess:
    settings = {
        "HOLDFAST_REDIS_URL": redis_url,
        "HOLDFAST_FLEET": "test",
        "HOLDFAST_DIAGNOSTICS_LISTEN": "127.0.0.1:0",
    }
    with (directory / "log").open("wb") as log:
        return warm("holdfast.diagnostics").start(
            [], directory, {**os.environ, **settings, **environment}, log.fileno(), log.fileno()
        )


def refused(redis_url: str, directory: Path, **environment: str) -> str:
    """What it says when it ends at once, as it must."""
    assert start(redis_url, directory, **environment).wait(TIMEOUT_S) == 2
    said = (directory / "log").read_text()
    assert "Traceback" not in said
    return said


@contextmanager
def agent(endpoint: str, node: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", AGENT, endpoint, node], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for _ in range(2):  # the second follows the answer to the first tick
            process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


async def _first_finding(redis_url: str) -> Finding:
    log = RedisLog(redis_url, "test")
    try:
        found = await wait_until_async(lambda: log.read(FINDINGS), description="a finding")
        return decode_finding(found[0].entry.data)
    finally:
        await log.aclose()


def test_a_killed_agent_is_found_within_a_second(redis_url: str, tmp_path: Path) -> None:
    graces = {
        "HOLDFAST_RECONNECT_GRACE_S": "0.4",
        "HOLDFAST_UNWITNESSED_GRACE_S": "0.4",
    }  # nobody else is there to tell
    with diagnostics(redis_url, tmp_path, **graces) as (_, endpoint), agent(endpoint, "n0") as victim:
        killed_at = time.time()
        victim.send_signal(signal.SIGKILL)
        found = anyio.run(_first_finding, redis_url)
        assert (found.kind, found.node, found.job, found.rank) == (FindingKind.NODE_LOST, "n0", "gpt", 0)
        assert (
            0.3 < found.at - killed_at < 4.5
        )  # the grace is 0.4 s, a silent stream has 5 s; the rest is a loaded machine


def test_a_stopped_agent_is_not_lost_before_the_silence_allows(redis_url: str, tmp_path: Path) -> None:
    with (
        diagnostics(redis_url, tmp_path, HOLDFAST_SILENCE_S="1", HOLDFAST_UNWITNESSED_GRACE_S="1") as (_, endpoint),
        agent(endpoint, "n0") as victim,
    ):
        assert victim.stdout is not None
        before_ticks = [float(victim.stdout.readline()) for _ in range(2)]
        victim.send_signal(signal.SIGSTOP)
        found = anyio.run(_first_finding, redis_url)
        assert found.kind is FindingKind.NODE_LOST
        victim.kill()
        before_ticks += map(float, victim.stdout)
        assert found.at - before_ticks[-2] >= 0.9, "the last of them may not have been sent any more"
        assert "sent nothing" in found.summary


def test_sigterm_ends_it_at_once_also_with_agents_connected(redis_url: str, tmp_path: Path) -> None:
    with diagnostics(redis_url, tmp_path) as (process, endpoint), agent(endpoint, "n0"):
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HOLDFAST_XID_OVERRIDES": "/nowhere/xid.csv"}, "HOLDFAST_XID_OVERRIDES"),
        ({"HOLDFAST_SILENCE_S": "soon"}, "HOLDFAST_SILENCE_S"),
    ],
)
def test_a_wrong_setting_is_named(redis_url: str, tmp_path: Path, environment: dict[str, str], words: str) -> None:
    assert words in refused(redis_url, tmp_path, **environment)


def test_a_port_in_use_is_named(redis_url: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in refused(redis_url, tmp_path, HOLDFAST_DIAGNOSTICS_LISTEN=address)
