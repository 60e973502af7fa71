"""Every metric that Holdfast exports: name, unit, attributes, and who reports it. Declared here and nowhere else.

Names are OpenTelemetry's; `prometheus_name` is what a collector's Prometheus exporter makes of one. Attributes are keys of
`domain.tracing.ATTRIBUTES`. docs/telemetry.md, the dashboard and the alert rules are tested against this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

# A recovery takes from 0.1 s (a killed rank) to minutes (shards from the object store).
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

# What a Prometheus exporter appends to a name; units in braces are left out.
_UNITS = {"s": "_seconds", "By": "_bytes", "{step}/s": "_per_second", "{token}/s": "_per_second"}


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter only grows, a gauge is what is the case now, a histogram counts by size."""

    name: str
    kind: Kind
    unit: str  # UCUM: "s", "By", "{node}"
    attributes: tuple[str, ...]
    service: str
    meaning: str
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """Of a histogram, the stem that `_bucket`, `_sum` and `_count` are appended to."""
        stem = self.name.replace(".", "_") + _UNITS.get(self.unit, "")
        return f"{stem}_total" if self.kind == "counter" else stem


JOB_TIME = Metric(
    "holdfast.job.time",
    "gauge",
    "s",
    ("job", "class"),
    "supervisor",
    "wall time of the newest run by class; the classes add up to its age. A second may still change class, so no counter",
)
STEP_RATE = Metric(
    "holdfast.job.steps", "gauge", "{step}/s", ("job",), "supervisor", "steps per second, of the last 32"
)
TOKEN_RATE = Metric(
    "holdfast.job.tokens", "gauge", "{token}/s", ("job",), "supervisor", "tokens per second, of the last 32 steps"
)
WORLD_SIZE = Metric(
    "holdfast.job.world_size", "gauge", "{rank}", ("job",), "supervisor", "ranks that run; 0 while the job does not run"
)
NODES = Metric("holdfast.nodes", "gauge", "{node}", ("state",), "supervisor", "nodes by state")
INCIDENTS = Metric(
    "holdfast.incidents", "counter", "{incident}", ("job", "kind", "action"), "supervisor", "incidents that have closed"
)
RECOVERY = Metric(
    "holdfast.recovery.duration",
    "histogram",
    "s",
    ("phase",),
    "supervisor",
    "how long each phase of a recovery took; total is fault to first step of every rank",
    SECONDS,
)
COMMAND_LATENCY = Metric(
    "holdfast.command.duration",
    "histogram",
    "s",
    ("order",),
    "supervisor",
    "from sending an order to an agent until its answer",
    SECONDS,
)
CHECKPOINT_AGE = Metric(
    "holdfast.checkpoint.age",
    "gauge",
    "s",
    ("job", "tier"),
    "supervisor",
    "time since the newest step that is complete in this tier was finished: what a loss of everything nearer would cost",
)
CHECKPOINT_LAG = Metric(
    "holdfast.checkpoint.lag",
    "gauge",
    "{interval}",
    ("job",),
    "supervisor",
    "steps since the one that a restart would take, in checkpoint intervals: 1 is as it should be",
)
LOG_PENDING = Metric(
    "holdfast.log.pending", "gauge", "{entry}", ("stream",), "supervisor", "entries handed out and not acknowledged"
)
LOG_LAG = Metric(
    "holdfast.log.lag", "gauge", "s", ("stream",), "supervisor", "age of the oldest entry that has not been handed out"
)
LOG_MEMORY = Metric(
    "holdfast.log.memory", "gauge", "By", (), "supervisor", "memory that Redis uses, whoever has put it there"
)
LOG_MEMORY_LIMIT = Metric(
    "holdfast.log.memory_limit",
    "gauge",
    "By",
    (),
    "supervisor",
    "what Redis may use (maxmemory); absent without a limit",
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
    "signals or steps dropped because a buffer was full; findings and orders never are",
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
    "damaged files set aside or left alone, tiers that take no copies, images that are locked without a reader",
)

FROZEN = Metric(
    "holdfast.frozen",
    "counter",
    "s",
    (),
    "agent, diagnostics, supervisor, checkpoint-replicator",
    "time in which the service did not run: it was stopped, its machine was paused, or starved",
)

METRICS = (
    JOB_TIME,
    STEP_RATE,
    TOKEN_RATE,
    WORLD_SIZE,
    NODES,
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
)
