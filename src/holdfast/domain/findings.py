"""Findings: the conclusions of detectors, with location and evidence. Diagnostics publishes and the supervisor acts on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from holdfast.domain.nodes import Notice

STOPPED = "process is stopped"  # in the reason of a hang: stopped by SIGSTOP or a debugger
# Evidence key: the basis of `since`. The value begins with `ESTIMATE` if `since` is an estimate.
DATED = "dated"
ESTIMATE = "estimate: "


class FindingKind(StrEnum):
    """What a finding or an incident is about. A text in place of a member is equal: `incident.kind == "worker_crash"`."""

    WORKER_CRASH = "worker_crash"  # a process died by signal or non-zero exit without a Python exception
    WORKER_EXCEPTION = "worker_exception"  # the script raised an exception; evidence: type, message, frames, step
    REPEATED_EXCEPTION = "repeated_exception"  # the same exception at the same step again: a bug of the script or data
    NODE_LOST = "node_lost"  # diagnostics has lost contact with the agent; severity info: the agent has reconnected
    HANG = "hang"  # no rank makes progress; `rank`: the rank that the others wait for, None = no rank stands out
    GPU_ERROR = "gpu_error"  # an Xid or another error of a GPU; evidence: the code and the catalogue's row
    HOST_PRESSURE = "host_pressure"  # memory, disk or load near a limit: a warning, never an eviction
    RANKS_MISSING = "ranks_missing"  # reported by the supervisor itself: a generation did not start in time
    HOST_OOM = "host_oom"  # the kernel killed a process because the machine had no memory left
    KERNEL_STALL = "kernel_stall"  # the kernel reported a soft lockup, a hung task or an error of its own
    STORAGE_FAULT = "storage_fault"  # a local disk times out, or its file system became read-only
    NETWORK_FAULT = "network_fault"  # an InfiniBand or RoCE port is down or flaps, or its adapter reports a failure
    MAINTENANCE = "maintenance"  # the owner of the machine will take it: the job must leave before
    STRAGGLER = "straggler"  # a rank is slower than its comparison group, step after step; a warning
    IMBALANCE = "imbalance"  # data, or a pipeline stage, makes some ranks work longer; no rank is at fault
    SLOW_COLLECTIVE = "slow_collective"  # even the rank that waits least waits longer than before: the network
    NUMERICAL = "numerical"  # loss or gradient norm: a spike (warning), or not a number step after step (error)
    DEGRADATION = "degradation"  # a counter of the hardware grows, or a disk fills: a warning with the trend
    PREFLIGHT = "preflight"  # a node failed its pre-flight test: a warning
    CHECKPOINT = "checkpoint"  # a rank misses saves, or a tier accepts no copies: a warning
    NO_PROGRESS = "no_progress"  # a script that reports no steps: no optimizer step was observed for long; a warning
    SILENT_CORRUPTION = "silent_corruption"  # the state is wrong without an error; evidence: verified_step


class Severity(StrEnum):
    """Whether the run has stopped or will stop."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"  # the run has stopped or will stop
    FATAL = "fatal"  # the run has stopped and this hardware must not be used again


class Remedy(StrEnum):
    """A recommended action, least disruptive first."""

    WATCH = "watch"
    RESTART_PROCESS = "restart_process"
    RESET_GPU = "reset_gpu"
    REBOOT_NODE = "reboot_node"
    REPLACE_NODE = "replace_node"
    STOP_JOB = "stop_job"


class Blamed(StrEnum):
    """Failure attribution: what is responsible for a failure."""

    NOT_JUDGED = ""
    USER = "user"
    HARDWARE = "hardware"
    UNKNOWN = "unknown"


def blamed(text: str) -> Blamed:
    """Return the member with this value; NOT_JUDGED if there is none."""
    return Blamed(text) if text in set(Blamed) else Blamed.NOT_JUDGED


@dataclass(frozen=True, slots=True)
class Attribution:
    """Failure attribution in the form that decisions use. The evidence states the same for people."""

    blame: Blamed = Blamed.NOT_JUDGED
    error_class: str = ""  # such as "storage" or "communication"; empty = not classified
    prior_user: float = 0.0  # 0 … 1: probability of a fault of the user, by the time to the failure alone
    # A person or another program caused the failure: an injected fault, a signal that no broken node sends, a stopped process.
    # None = not known.
    from_outside: bool | None = None
    tries: int = 0  # repeated exception: how often it was seen
    nodes: int = 0  # repeated exception: on how many nodes it was seen; 0 = not reported
    # optimizer steps of the failed process, of a script that reports no steps; 0 = none, or not known
    observed_steps: int = 0

    def refined(self, newer: Attribution) -> Attribution:
        """Return this attribution, updated with the fields that a later finding of the same fault has set."""
        updates = {each.name: value for each in fields(self) if (value := getattr(newer, each.name)) != each.default}
        return replace(self, **updates)


@dataclass(frozen=True, slots=True)
class Finding:
    """`at`: when the detector concluded. `since`: when the fault began (`DATED` in the evidence states the basis). Both are
    Unix seconds of the publisher's clock.

    The supervisor converts both to its own clock by the age of the finding, which is measured, and not by comparing the clocks
    of two machines.
    """

    id: str  # stable: a second finding about the same physical fault has the same id
    kind: FindingKind
    severity: Severity
    at: float
    since: float
    summary: str  # one English sentence
    node: str = ""
    job: str = ""
    generation: int = 0
    rank: int | None = None
    gpu: int | None = None
    confidence: float = 1.0  # 0 … 1
    evidence: Mapping[str, str] = field(default_factory=dict)
    supersedes: str = ""  # id of an earlier finding about the same fault, for which this finding has a better cause
    contradicts: str = ""  # id of an earlier finding that this finding withdraws
    verified_step: int | None = None  # last step whose state passed a check: no newer checkpoint is to be restored
    attribution: Attribution = field(default_factory=Attribution)
    notice: Notice | None = None  # the maintenance that is announced or, without an event, withdrawn
    recommended_actions: tuple[Remedy, ...] = ()  # recommended actions, least disruptive first
    cost_share: float | None = None  # share of the job's rate lost while the condition lasts; None = not measured
    ttl_s: float = 300.0  # an older finding has expired, unless it concerns the running generation, or a node
    traceparent: str = ""
    waited_s: float = 0.0  # from the conclusion to the publication, by the publisher's monotonic clock
    # how often the finding was published before; a finding that still holds is repeated with its id and `at`
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that every rank of a generation has finished. Diagnostics publishes them; goodput is computed from them."""

    job: str
    generation: int
    step: int  # 1-based: step n is finished when n optimizer steps have been applied
    world_size: int
    started_at: float  # Unix s: `ended_at` minus the longest duration of any rank
    ended_at: float  # Unix s: latest end of any rank
    tokens: int  # summed over the ranks
    loss: float | None  # mean over the ranks that reported one
    stall_s: float  # checkpoint stall after the step: the maximum over the ranks
    flops: float = 0.0  # summed over the ranks; 0.0 = no rank reported any
