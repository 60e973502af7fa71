"""Observes a soak: answers of the API, resources of the processes, slowness of the machine."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis

from benchmarks.soak.judge import Sample
from benchmarks.soak.rig import DIAGNOSTICS, REAPER, REPLICATOR, SUPERVISORS, TEMPLATE, WORKER, Rig

TIMEOUT_S = 2.0
PAGE_LIMIT = 200
QUIET_LOOP_S = 0.030  # duration of the loop of `slowness` on the quiet two-core machine for which the limits were set
LOOP = 1_000_000

Json = dict[str, Any]


class Api:
    """Queries both supervisors and returns the first answer. None = no answer."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self._clients = [httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) for url in urls]

    def get(self, path: str, **parameters: Any) -> Json | None:
        for index, client in enumerate(self._clients):
            try:
                answer = client.get(path, params=parameters)
                if answer.is_success:
                    self._clients.insert(0, self._clients.pop(index))  # a frozen supervisor costs one timeout
                    found: Json = answer.json()
                    return found
            except (httpx.HTTPError, ValueError):
                continue
        return None

    def job(self, name: str) -> Json | None:
        return self.get(f"/v1/jobs/{name}")

    def nodes(self) -> list[Json]:
        page = self.get("/v1/nodes", limit=PAGE_LIMIT)
        return [] if page is None else list(page["items"])

    def incidents(self, job: str) -> list[Json]:
        page = self.get("/v1/incidents", limit=PAGE_LIMIT, job=job)
        return [] if page is None else list(page["items"])

    def post(self, path: str, body: Mapping[str, Any]) -> bool:
        """Send a request. Returns whether a supervisor accepted it."""
        for client in self._clients:
            try:
                if client.post(path, json=dict(body)).is_success:
                    return True
            except httpx.HTTPError:
                continue
        return False

    def close(self) -> None:
        for client in self._clients:
            client.close()


def words(view: Mapping[str, Any] | None) -> str:
    """Describe the API's view of a job on one line."""
    if view is None:
        return "no answer"
    incident = view["incident"]
    doing = f"{incident['kind']} {incident['state']}" if incident else "no incident"
    return f"{view['phase']}, generation {view['generation']}, step {view['step']}, {doing}"


def leader(redis_url: str) -> str:
    """Return the name of the leader; "" if there is none. The lease contains the name and a random part."""
    try:
        with redis.Redis.from_url(redis_url, socket_timeout=TIMEOUT_S) as connection:
            raw = connection.get("holdfast:{main}:lease:supervisor")
    except redis.RedisError:
        return ""
    holder = raw.decode().partition(" ")[2] if isinstance(raw, bytes) else ""
    return next((name for name in SUPERVISORS if holder.startswith(name)), "")


def slowness() -> float:
    """Return how many times slower this machine is now than a quiet one; at least 1."""
    started = time.perf_counter()
    total = 0
    for number in range(LOOP):
        total += number
    return max(1.0, (time.perf_counter() - started) / QUIET_LOOP_S)


# ---------------------------------------------------------------- resources of the processes


def sample(rig: Rig, ranks: int) -> Sample:
    """Count resources at a calm moment. `ranks` worker processes are expected; further ones count as growth."""
    counts: dict[tuple[str, str], float] = defaultdict(float)
    for role, processes in _roles(rig).items():
        counts["processes", role] = len(processes)
        for process in processes:
            _count(counts, role, process)
    for role in ("reapers", "workers"):
        counts["processes", role] -= ranks
    for node in rig.node_names:
        in_memory, on_disk = _stats(rig.shm(node)), _stats(rig.disk(node))
        files = [entry for entry in in_memory if stat.S_ISREG(entry.st_mode)]
        counts["shm_files", node] = len(files)
        counts["shm_bytes", node] = sum(entry.st_blocks * 512 for entry in files)
        counts["disk_files", node] = sum(stat.S_ISREG(entry.st_mode) for entry in on_disk)
        counts["directory_sockets", node] = sum(stat.S_ISSOCK(entry.st_mode) for entry in on_disk)
    for name, path in rig.databases().items():
        counts["sqlite_bytes", name] = _database_bytes(path)
    with redis.Redis.from_url(rig.redis_url, socket_timeout=TIMEOUT_S) as connection:
        counts["redis_keys", "redis"] = float(_int(connection.dbsize()))
        memory: Any = connection.info("memory")
        counts["redis_bytes", "redis"] = float(memory["used_memory"])
    return Sample(time.monotonic(), dict(counts))


def _roles(rig: Rig) -> dict[str, list[psutil.Process]]:
    """Return all processes of the soak by role. Processes of nodes are counted together, because ranks move between nodes."""
    services = {rig.pid(name): name for name in ("redis", *DIAGNOSTICS, *SUPERVISORS) if rig.running(name)}
    agents = {rig.pid(name) for name in rig.node_names if rig.running(name)}
    roles: dict[str, list[psutil.Process]] = defaultdict(list)
    for process in rig.leftovers():
        try:
            command, parent, name = process.cmdline(), process.ppid(), process.name()
        except psutil.Error:
            continue
        if process.pid in services:
            role = services[process.pid]
        elif process.pid in agents:
            role = "agents"
        elif parent in agents and REPLICATOR in command:
            role = "replicators"
        elif name == REAPER:
            role = "reapers"
        elif TEMPLATE in command:
            role = "templates"
        elif command[:1] and command[0].startswith(WORKER):
            role = "workers"
        elif parent in services:
            role = f"children of {services[parent]}"
        else:
            role = "others"
        roles[role].append(process)
    return roles


def _count(counts: dict[tuple[str, str], float], role: str, process: psutil.Process) -> None:
    try:
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{process.pid}/fd")]
        rss = process.memory_info().rss
    except (OSError, psutil.Error):
        return
    # The maximum of a role, because a sum would depend on the number of processes.
    for what, value in (
        ("descriptors", len(links)),
        ("sockets", sum(link.startswith("socket:") for link in links)),
        ("rss_bytes", rss),
    ):
        counts[what, role] = max(counts[what, role], float(value))


def _stats(directory: Path) -> list[os.stat_result]:
    """Return the stats of all files below a directory. Files that are deleted in the meantime are skipped."""
    found = []
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found.append(os.lstat(os.path.join(parent, name)))
    return found


def _database_bytes(path: Path) -> float:
    """Return the bytes of the pages in use, because the file itself does not shrink."""
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=TIMEOUT_S) as database:
            pages, size = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
            return float(pages * size)
    except sqlite3.Error:
        return 0.0


def _int(value: Any) -> int:
    return int(value)
