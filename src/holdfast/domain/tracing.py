"""One trace per incident: its spans, their tree, and how span ids are derived. Pure.

    worker exited | kernel line      agent         the signal; without a signal, the trace begins with the finding
    └ finding                        diagnostics
      └ incident                     supervisor    a planned change begins here
        ├ decision                   supervisor    policy, action, reason
        └ generation change          supervisor
          ├ prepare                  agent         per node
          │ ├ stop, fork, stage      agent
          │ └        └ fetch         replicator    per shard from another node or the object store
          └ first step               agent         per rank: from START to the end of its first step
            └ process group, build, restore, step  as the rank measured them

Ids are not random but derived from the parent's id and the span's name. A span is written when its end is known, by the process
that knows it then (another process, the standby that took over, or the API from the record). All of them derive the same id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.domain.tiers import TIERS

Value = str | int | float | bool

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.ASCII)

# In a finding's evidence: traceparent of the signal that the finding follows from. Records of earlier versions have it as
# `EARLIER_SIGNAL`, which is also the Unix signal of a crash.
SIGNAL = "signal_traceparent"
EARLIER_SIGNAL = "signal"
TRACEPARENT = "traceparent"  # in an incident's evidence: traceparent of its root finding

FINDING = "finding"
INCIDENT = "incident"
DECISION = "decision"
CHANGE = "generation change"
PREPARE = "prepare"
FIRST_STEP = "first step"
FETCH = "fetch"

# Every attribute of a span or metric, without its prefix. docs/telemetry.md repeats this table; a test compares them, and
# fails on any other name.
ATTRIBUTE_PREFIX = "holdfast."
ATTRIBUTES: Mapping[str, str] = {
    "action": "the policy's action: restart, hot_swap, scale_down …",
    "cause": "one English sentence: what failed",
    "class": "class of wall time: useful, or a class of badput",
    "decided_by": "the default policy, a script's path, or an operator",
    "generation": "number of the generation; of an incident, the generation in which the fault occurred",
    "gpu": "index of the GPU on its node",
    "incident": "id of the incident",
    "job": "name of the job",
    "kind": "of a finding, incident or signal: worker_crash, node_lost, xid …",
    "new_generation": "number of the generation that replaced it",
    "node": "name of the node",
    "order": "kind of the order to an agent: Prepare, Start, Stop …",
    "outcome": "one English sentence: how the incident ended",
    "phase": "part of a recovery: detect, decide, prepare, stop, fork, stage, restore, first_step, total …",
    "rank": "number of the rank",
    "reason": "one English sentence: the reason for the action",
    "restored_step": "step of the checkpoint that was restored",
    "severity": "of a finding: info, warning, error, fatal",
    "shard": "attempt, step and rank of the shard",
    "source": "source of a shard: a node, or the object store",
    "state": "of a node: spare, active, cordoned, left (its agent was asked to end), lost",
    "stream": "name of the stream of the event log",
    "summary": "one English sentence: what the detector found",
    "tier": ", ".join(TIERS),
    "verdict": "of a node's network: good, slow, failed, unjudged, or out: out of service for it",
    "what": "kind of the dropped items: signals or steps",
}


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A trace and a span in it. `trace_id`: 32 lower-case hex digits. `span_id`: 16."""

    trace_id: str
    span_id: str
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self, *names: object) -> TraceContext:
        """The child span with this name. Every process derives the same id."""
        key = "/".join((self.trace_id, self.span_id, *map(str, names)))
        return TraceContext(self.trace_id, hashlib.blake2b(key.encode(), digest_size=8).hexdigest(), self.sampled)


@dataclass(frozen=True, slots=True)
class Span:
    """A timed operation. `start` and `end` are Unix seconds; `parent` is a span id, empty for the root."""

    name: str
    service: str  # the service that writes the span: agent, diagnostics, supervisor, checkpoint-replicator
    context: TraceContext
    parent: str
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""  # why the operation failed; empty = it did not fail


def new_trace(seed: str) -> TraceContext:
    """The root of the trace that is derived from `seed`."""
    digest = hashlib.blake2b(seed.encode(), digest_size=24).hexdigest()
    return TraceContext(digest[:32], digest[32:])


def parse(traceparent: str) -> TraceContext | None:
    """Parse a W3C traceparent. Returns None if it is not valid, because a broken trace must not break an incident."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or traceparent.startswith("ff") or (traceparent.startswith("00") and len(traceparent) != 55):
        return None
    trace_id, span_id, flags = match.groups()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, sampled=bool(int(flags, 16) & 1))


def trace_id_of(traceparent: str) -> str:
    """The trace id; empty if `traceparent` is not valid."""
    context = parse(traceparent)
    return context.trace_id if context else ""


def below(traceparent: str, *names: object) -> str:
    """Traceparent of the child span with this name; empty if `traceparent` is not valid."""
    context = parse(traceparent)
    return context.child(*names).traceparent if context else ""
