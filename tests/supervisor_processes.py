"""Supervisors as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
from supervising import Running
from waiting import wait_until_async


@dataclass
class Supervisor:
    process: subprocess.Popen[bytes]
    running: Running
    log: Path


def spawn(log: Path, environment: dict[str, str], module: str = "supervisor") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"holdfast.{module}"]
    with log.open("wb") as output:
        return subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)


@asynccontextmanager
async def supervisor(directory: Path, redis_url: str, **settings: str) -> AsyncIterator[Supervisor]:
    await anyio.Path(directory).mkdir(exist_ok=True)
    ready, log = directory / "ready.json", directory / "supervisor.log"
    environment = {
        "HOLDFAST_REDIS_URL": redis_url,
        "HOLDFAST_DATA_DIR": str(directory),
        "HOLDFAST_READY_FILE": str(ready),
        "HOLDFAST_SUPERVISOR_LISTEN": "127.0.0.1:0",
        "HOLDFAST_API_LISTEN": "127.0.0.1:0",
        "HOLDFAST_SUPERVISOR_NAME": directory.name,
        "HOLDFAST_LOG_FORMAT": "json",
        **settings,
    }
    process = spawn(log, environment)
    try:
        await wait_until_async(ready.exists, description=f"{directory.name} to serve")
        endpoints = json.loads(ready.read_text())
        yield Supervisor(process, Running(endpoints["control"], endpoints["api"], anyio.CancelScope()), log)
    finally:
        process.kill()
        process.wait()
