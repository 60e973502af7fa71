"""Every metric that Holdfast exports: name, unit, attributes, and the service that reports it. Metrics are declared only here.

Names follow OpenTelemetry; `prometheus_name` is the name in a Prometheus exporter. Attributes are keys of
`domain.tracing.ATTRIBUTES`. docs/telemetry.md, the dashboard and the alert rules are tested against this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

# A recovery takes from 0.1 s (a killed rank) to minutes (shards from the object store).
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

# What a Prometheus exporter appends to a name; units in braces are left out.
_UNITS = {
    "s": "_seconds", "By": "_bytes", "{step}/s": "_per_second", "{token}/s": "_per_second", "%": "_percent",
    "Cel": "_celsius", "W": "_watts",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter only grows, a gauge is the current value, a histogram counts values by size."""

    name: str
    kind: Kind
    unit: str  # UCUM: "s", "By", "{node}"
    attributes: tuple[str, ...]
    service: str
    meaning: str
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """Name in a Prometheus exporter; for a histogram without `_bucket`, `_sum` and `_count`."""
        stem = self.name.replace(".", "_") + _UNITS.get(self.unit, "")
        return f"{stem}_total" if self.kind == "counter" else stem


JOB_TIME = Metric(
    "holdfast.job.time",
    "gauge",
    "s",
    ("job", "class"),
    "supervisor",
    "wall time of the newest run by class; the classes add up to its age. A gauge, because a second may still change class",
)
STEP_RATE = Metric(
    "holdfast.job.steps", "gauge", "{step}/s", ("job",), "supervisor", "steps per second, of the last 32"
)
TOKEN_RATE = Metric(
    "holdfast.job.tokens", "gauge", "{token}/s", ("job",), "supervisor", "tokens per second, of the last 32 steps"
)
WORLD_SIZE = Metric(
    "holdfast.job.world_size",
    "gauge",
    "{rank}",
    ("job",),
    "supervisor",
    "running ranks; 0 while the job is not running",
)
NODES = Metric("holdfast.nodes", "gauge", "{node}", ("state",), "supervisor", "nodes by state")
NODE_LINKS = Metric(
    "holdfast.nodes.links",
    "gauge",
    "{node}",
    ("verdict",),
    "supervisor",
    "nodes without ranks by their newest test of the network with another one",
)
INCIDENTS = Metric(
    "holdfast.incidents", "counter", "{incident}", ("job", "kind", "action"), "supervisor", "incidents that were closed"
)
RECOVERY = Metric(
    "holdfast.recovery.duration",
    "histogram",
    "s",
    ("phase",),
    "supervisor",
    "duration of each phase of a recovery; total is from the fault to the first step of every rank",
    SECONDS,
)
COMMAND_LATENCY = Metric(
    "holdfast.command.duration",
    "histogram",
    "s",
    ("order",),
    "supervisor",
    "time from sending an order to an agent until its answer",
    SECONDS,
)
CHECKPOINT_AGE = Metric(
    "holdfast.checkpoint.age",
    "gauge",
    "s",
    ("job", "tier"),
    "supervisor",
    "age of the newest complete checkpoint in this tier: the training time that would be lost if all nearer tiers were lost",
)
CHECKPOINT_LAG = Metric(
    "holdfast.checkpoint.lag",
    "gauge",
    "{interval}",
    ("job",),
    "supervisor",
    "steps since the checkpoint that a restart would restore, in checkpoint intervals; normally at most 1",
)
LOG_PENDING = Metric(
    "holdfast.log.pending", "gauge", "{entry}", ("stream",), "supervisor", "entries delivered and not acknowledged"
)
LOG_LAG = Metric(
    "holdfast.log.lag", "gauge", "s", ("stream",), "supervisor", "age of the oldest entry that has not been delivered"
)
LOG_MEMORY = Metric("holdfast.log.memory", "gauge", "By", (), "supervisor", "memory that Redis uses, for all clients")
LOG_MEMORY_LIMIT = Metric(
    "holdfast.log.memory_limit",
    "gauge",
    "By",
    (),
    "supervisor",
    "memory limit of Redis (maxmemory); absent without a limit",
)
FINDINGS = Metric(
    "holdfast.findings", "counter", "{finding}", ("kind", "severity"), "diagnostics", "findings that were published"
)
TELEMETRY_DROPPED = Metric(
    "holdfast.telemetry.dropped",
    "counter",
    "{item}",
    ("what",),
    "agent, diagnostics",
    "signals or steps dropped because a buffer was full; findings and orders are never dropped",
)
REPLICATED = Metric(
    "holdfast.replication.io",
    "counter",
    "By",
    ("job", "tier"),
    "checkpoint-replicator",
    "bytes of shards written to a tier",
)
CHECKPOINT_TROUBLES = Metric(
    "holdfast.checkpoint.troubles",
    "counter",
    "{trouble}",
    ("job", "kind"),
    "checkpoint-replicator",
    "damaged files (renamed or left in place), tiers that accept no copies, images that are locked without a restore",
)

FROZEN = Metric(
    "holdfast.frozen",
    "counter",
    "s",
    (),
    "agent, diagnostics, supervisor, checkpoint-replicator",
    "time in which the service was frozen: it was stopped, or its machine was paused or starved",
)

CERTIFICATE_EXPIRY = Metric(
    "holdfast.certificate.expiry",
    "gauge",
    "s",
    (),
    "agent, diagnostics, supervisor",
    "time at which the certificate of the service expires, in seconds since 1970; absent without TLS",
)

# Per node, from its agent: a supervisor of 100,000 GPUs has none of them.
GPU_UTILIZATION = Metric(
    "holdfast.gpu.utilization",
    "gauge",
    "%",
    ("node", "gpu"),
    "agent",
    "duty cycle: share of the last sampling period of the driver in which a kernel ran",
)
GPU_TEMPERATURE = Metric(
    "holdfast.gpu.temperature", "gauge", "Cel", ("node", "gpu"), "agent", "temperature of the GPU's core"
)
GPU_POWER = Metric("holdfast.gpu.power", "gauge", "W", ("node", "gpu"), "agent", "power that the board draws")
GPU_MEMORY = Metric("holdfast.gpu.memory", "gauge", "By", ("node", "gpu"), "agent", "memory of the device in use")

METRICS = (
    JOB_TIME,
    STEP_RATE,
    TOKEN_RATE,
    WORLD_SIZE,
    NODES,
    NODE_LINKS,
    INCIDENTS,
    RECOVERY,
    COMMAND_LATENCY,
    CHECKPOINT_AGE,
    CHECKPOINT_LAG,
    LOG_PENDING,
    LOG_LAG,
    LOG_MEMORY,
    LOG_MEMORY_LIMIT,
    FINDINGS,
    TELEMETRY_DROPPED,
    REPLICATED,
    CHECKPOINT_TROUBLES,
    FROZEN,
    CERTIFICATE_EXPIRY,
    GPU_UTILIZATION,
    GPU_TEMPERATURE,
    GPU_POWER,
    GPU_MEMORY,
)
