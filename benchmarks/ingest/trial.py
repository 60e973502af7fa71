"""One trial: a fleet sends to one diagnostics process, which has a separate Redis, for a given time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import anyio
import numpy as np
import psutil

from benchmarks.ingest.client import CONNECT_TIMEOUT_S, Share
from holdfast.domain.findings import FindingKind
from holdfast.log.embedded import EmbeddedRedis
from holdfast.log.names import FINDINGS
from holdfast.log.redis import RedisLog
from holdfast.runtime.processes.children import tied
from holdfast.wire.events import decode_finding

FLEET = "ingest"
START_TIMEOUT_S = 60.0
CLIENT_TIMEOUT_S = 60.0  # in addition to the duration of the trial
SETTLE_S = 2.0  # after the last tick, until its findings are in Redis
FINDINGS_A_SECOND = 20.0
FINDINGS_MAX = 100_000
LATE_SHARE_MAX = 0.01  # fraction of the ticks
P99_MAX_S = 1.0


@dataclass(slots=True)
class Outcome:
    nodes: int
    seconds: float
    ticks: int = 0
    late: int = 0  # ticks that clients could not send in their second
    bare: int = 0  # ticks without telemetry, because too many earlier ones were unacknowledged
    dropped: int = 0  # signals that diagnostics dropped
    findings: int = 0
    expected: int = 0
    unexpected: dict[str, int] = field(default_factory=dict)
    latency_s: list[float] = field(default_factory=list)  # kernel line → finding in Redis
    written_s: list[float] = field(default_factory=list)  # gRPC has accepted the client's report → finding in Redis
    service_cores: float = 0.0
    clients_cores: float = 0.0
    memory_bytes: int = 0
    memory_idle_bytes: int = 0
    not_connected: str = ""
    ended: dict[str, int] = field(default_factory=dict)  # reason → number of streams that ended early

    @property
    def p99_s(self) -> float:
        return float(np.quantile(self.latency_s, 0.99)) if self.latency_s else float("inf")

    @property
    def ticks_s(self) -> float:
        return self.ticks / self.seconds

    @property
    def nodes_per_core(self) -> float:
        """The number of nodes, at one tick per second, that one core can serve, from the CPU time of the service."""
        return self.ticks_s / self.service_cores if self.service_cores else 0.0

    @property
    def missed(self) -> tuple[str, ...]:
        """The reasons why this fleet was not sustained: late ticks, dropped signals, missing or late findings."""
        if self.not_connected:
            return (self.not_connected,)
        asked, missed = self.nodes * self.seconds, list[str]()
        if (unsent := asked - self.ticks + self.bare) > LATE_SHARE_MAX * asked:
            missed.append(f"{unsent / asked:.1%} of the ticks not sent in their second with all that belongs to them")
        if self.dropped:
            missed.append(f"{self.dropped} signals dropped")
        if self.findings < self.expected:
            missed.append(f"{self.expected - self.findings} findings missing")
        if self.p99_s > P99_MAX_S:
            missed.append(f"p99 {self.p99_s:.2f} s is more than {P99_MAX_S:g}")
        missed += [f"{count} streams ended early ({reason})" for reason, count in self.ended.items()]
        return tuple(missed)

    @property
    def sustained(self) -> bool:
        return not self.missed

    def as_json(self) -> dict[str, object]:
        values = asdict(self)
        return values | {
            "latency_s": _spread(self.latency_s),
            "written_s": _spread(self.written_s),
            "sustained": self.sustained,
            "missed": self.missed,
            "ticks_s": self.ticks_s,
            "nodes_per_core": self.nodes_per_core,
        }


def _spread(values: list[float]) -> dict[str, float]:
    """Seconds."""
    names = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: float(np.quantile(values, q)) for name, q in names.items()} if values else {}


def run(
    nodes: int, *, seconds: float, step_s: float, clients: int, streams_per_connection: int, directory: Path
) -> Outcome:
    """Run the trial. Raises `RuntimeError` if the service does not start. A fleet that cannot connect in time is an outcome."""
    outcome = Outcome(nodes, seconds)
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        log_path = directory / f"diagnostics-{nodes}.log"
        service, endpoint = stack.enter_context(_diagnostics(redis.url, directory, log_path))
        shares = _shares(endpoint, nodes, seconds, step_s, clients, streams_per_connection)
        running = [stack.enter_context(_client(share)) for share in shares]
        for client in running:
            if (line := _line(client)) != "connected":
                reached = f"{line or 'none'} of a client's"
                outcome.not_connected = f"not all {nodes} nodes connected within {CONNECT_TIMEOUT_S:.0f} s: {reached}"
                return outcome
        outcome.memory_idle_bytes = service.memory_info().rss
        started_at = time.time() + 0.5
        for client in running:
            assert client.stdin is not None
            client.stdin.write(f"{started_at}\n")
            client.stdin.flush()
        outcome.service_cores = _watch(service, started_at, seconds, outcome)
        written_at = dict[str, float]()
        for client in running:
            written_at |= _add(outcome, client, seconds)
        time.sleep(SETTLE_S)
        anyio.run(_read_findings, redis.url, outcome, written_at)
        outcome.expected = sum(int(min(share.count, (seconds - 1.0) / share.broken_every_s)) for share in shares)
        service.send_signal(signal.SIGTERM)
        service.wait(timeout=START_TIMEOUT_S)
        outcome.dropped = _dropped(log_path)
    return outcome


def _shares(
    endpoint: str, nodes: int, seconds: float, step_s: float, clients: int, streams_per_connection: int
) -> list[Share]:
    each = [nodes // clients + (i < nodes % clients) for i in range(clients)]
    return [
        Share(
            endpoint=endpoint,
            first=sum(each[:i]),
            count=count,
            nodes=nodes,
            seconds=seconds,
            step_s=step_s,
            broken_every_s=clients / FINDINGS_A_SECOND,
            streams_per_connection=streams_per_connection,
        )
        for i, count in enumerate(each)
    ]


def _watch(service: psutil.Process, started_at: float, seconds: float, outcome: Outcome) -> float:
    """Return the cores that the service used while the fleet sent, and record its peak memory."""
    time.sleep(max(0.0, started_at - time.time()))
    before, began = service.cpu_times(), time.monotonic()
    while (left := started_at + seconds - time.time()) > 0:
        outcome.memory_bytes = max(outcome.memory_bytes, service.memory_info().rss)
        time.sleep(min(0.25, left))
    after, took = service.cpu_times(), time.monotonic() - began
    return (after.user + after.system - before.user - before.system) / took


def _add(outcome: Outcome, client: subprocess.Popen[str], seconds: float) -> dict[str, float]:
    """Add the results of a client. Returns node → time at which gRPC accepted its report of a broken GPU."""
    out, _ = client.communicate(timeout=seconds + CLIENT_TIMEOUT_S)
    sent = json.loads(out)
    outcome.ticks += sent["ticks"]
    outcome.late += sent["late"]
    outcome.bare += sent["bare"]
    outcome.clients_cores += sent["cpu_s"] / seconds
    for reason in sent["ended"].values():
        outcome.ended[reason] = outcome.ended.get(reason, 0) + 1
    written_at: dict[str, float] = sent["written_at"]
    return written_at


async def _read_findings(url: str, outcome: Outcome, written_at: dict[str, float]) -> None:
    """Read the findings with the times of their entries: the position of an entry is the time of the write by Redis's clock, in
    milliseconds."""
    log = RedisLog(url, FLEET)
    try:
        deliveries = await log.read(FINDINGS, count=FINDINGS_MAX)
    finally:
        await log.aclose()
    for delivery in deliveries:
        finding = decode_finding(delivery.entry.data)
        if finding.kind is FindingKind.GPU_ERROR:
            at = int(delivery.position.partition("-")[0]) / 1e3
            outcome.findings += 1
            outcome.latency_s.append(at - finding.since)
            # A busy client may learn that its write was accepted only after the finding is in Redis.
            outcome.written_s.append(max(0.0, at - written_at.get(finding.node, finding.since)))
        else:
            outcome.unexpected[finding.kind.value] = outcome.unexpected.get(finding.kind.value, 0) + 1


def _dropped(path: Path) -> int:
    """Return the number that the service logs at its end."""
    said = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return max((int(line["signals_so_far"]) for line in said if "signals_so_far" in line), default=0)


@contextmanager
def _diagnostics(redis_url: str, directory: Path, log_path: Path) -> Iterator[tuple[psutil.Process, str]]:
    ready = directory / "ready.json"
    ready.unlink(missing_ok=True)
    settings = {
        "HOLDFAST_REDIS_URL": redis_url,
        "HOLDFAST_FLEET": FLEET,
        "HOLDFAST_DIAGNOSTICS_LISTEN": "127.0.0.1:0",
        "HOLDFAST_READY_FILE": str(ready),
        "HOLDFAST_LOG_FORMAT": "json",
    }
    with log_path.open("w") as log:
        process = subprocess.Popen(
            tied([sys.executable, "-m", "holdfast.diagnostics"]),
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"diagnostics did not start: {log_path.read_text()[-2000:]}")
                time.sleep(0.02)
            yield psutil.Process(process.pid), json.loads(ready.read_text())["endpoint"]
        finally:
            process.kill()
            process.wait()


@contextmanager
def _client(share: Share) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        tied([sys.executable, "-m", "benchmarks.ingest.client", json.dumps(asdict(share))]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline().strip()
