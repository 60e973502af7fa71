"""A finding: what a detector concluded, about what, and on which evidence. diagnostics publishes them; the supervisor acts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from holdfast.domain.nodes import Notice

STOPPED = "process is stopped"  # in a hang's reason: SIGSTOP, or a debugger
INJECTED = "injected by holdfast inject"  # in a kernel line that `holdfast inject xid` wrote
# In a finding's evidence: what `since` rests on. An estimate says so: it begins with `ESTIMATE`.
DATED = "dated"
ESTIMATE = "estimate: "


class FindingKind(StrEnum):
    WORKER_CRASH = "worker_crash"  # a process died by signal or non-zero exit without a Python exception
    WORKER_EXCEPTION = "worker_exception"  # the script raised; evidence carries type, message, frames, step
    REPEATED_EXCEPTION = "repeated_exception"  # the same exception at the same step again: the user's bug
    NODE_LOST = "node_lost"  # the agent is not heard any more; information when it is heard again after all
    HANG = "hang"  # no rank progresses; `rank` names the one that the others wait for, None = nobody stands out
    GPU_ERROR = "gpu_error"  # an Xid or other hardware verdict; evidence carries the code and the catalogue's row
    HOST_PRESSURE = "host_pressure"  # memory, disk or load near a limit: a warning, never an eviction
    RANKS_MISSING = "ranks_missing"  # raised by the supervisor itself: a generation did not start in time
    HOST_OOM = "host_oom"  # the kernel killed a process because the machine had no memory left
    KERNEL_STALL = "kernel_stall"  # soft lockup or hung task: the kernel itself says that something does not come back
    STORAGE_FAULT = "storage_fault"  # a local disk times out, or its file system became read-only
    NETWORK_FAULT = "network_fault"  # an InfiniBand or RoCE port is down, flaps, or its adapter says that it is broken
    MAINTENANCE = "maintenance"  # the owner of the machine will take it: leave before
    STRAGGLER = "straggler"  # a rank that is slower than its peers, step after step; a warning
    IMBALANCE = "imbalance"  # data, or a stage, makes some ranks work longer: nobody is to blame
    SLOW_COLLECTIVE = "slow_collective"  # even the last rank waits longer than it used to: the network
    NUMERICAL = "numerical"  # loss or gradient norm: a spike (warning), or not a number step after step (error)
    DEGRADATION = "degradation"  # a counter of the hardware grows, a disk fills: a warning with the trend
    PREFLIGHT = "preflight"  # a node failed the tests of itself that it makes before it gets ranks: a warning
    CHECKPOINT = "checkpoint"  # a rank's saves do not happen, or a tier takes no copies: a warning
    NO_PROGRESS = "no_progress"  # a script that reports no steps: no optimizer step was observed for long; a warning
    SILENT_CORRUPTION = "silent_corruption"  # the state is wrong without an error; evidence carries verified_step


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"  # the run has stopped or will stop
    FATAL = "fatal"  # the run has stopped and this hardware must not be used again


class Remedy(StrEnum):
    """One rung of the recommended ladder, mildest first."""

    WATCH = "watch"
    RESTART_PROCESS = "restart_process"
    RESET_GPU = "reset_gpu"
    REBOOT_NODE = "reboot_node"
    REPLACE_NODE = "replace_node"
    STOP_JOB = "stop_job"


class Blamed(StrEnum):
    """Who is to blame for a failure, as far as it shows."""

    NOT_JUDGED = ""
    USER = "user"
    HARDWARE = "hardware"
    UNKNOWN = "unknown"


def blamed(text: str) -> Blamed:
    """What this word says; a word that is not known here says nothing."""
    return Blamed(text) if text in set(Blamed) else Blamed.NOT_JUDGED


@dataclass(frozen=True, slots=True)
class Attribution:
    """What a failure says about its cause, in the form in which decisions use it. The evidence says the same to people."""

    blame: Blamed = Blamed.NOT_JUDGED
    error_class: str = ""  # such as "storage" or "communication"; empty = not classified
    prior_user: float = 0.0  # 0 … 1: how probable a fault of the user was before the failure itself was looked at
    # Somebody did it: an injected fault, a signal that no broken node sends, a stopped process. None = nothing is known of that
    from_outside: bool | None = None
    tries: int = 0  # repeated exception: how often it was seen
    nodes: int = 0  # repeated exception: on how many nodes it was seen; 0 = not told

    def refined(self, newer: Attribution) -> Attribution:
        """With what a later finding of the same fault says; what it does not say stays."""
        said = {each.name: value for each in fields(self) if (value := getattr(newer, each.name)) != each.default}
        return replace(self, **said)


@dataclass(frozen=True, slots=True)
class Finding:
    """`at` is when it was concluded, `since` when the fault began (`DATED` in the evidence says by what); both Unix seconds by
    the publisher's clock.

    The supervisor dates it anew by its own clock: a finding's age is measured, never the difference of two machines' clocks.
    """

    id: str  # stable: the same physical fault found again carries the same id
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
    supersedes: str = ""  # id of an earlier finding about the same fault, of which this one knows the cause better
    contradicts: str = ""  # id of an earlier finding that was wrong
    verified_step: int | None = None  # the last step whose state passed a check: nothing newer is to be restored
    attribution: Attribution = field(default_factory=Attribution)
    notice: Notice | None = None  # the maintenance that is announced or, without an event, withdrawn
    ladder: tuple[Remedy, ...] = ()
    cost_share: float | None = None  # of the job's rate, lost while the condition lasts; None = not measured
    ttl_s: float = 300.0  # older ones are history, unless they concern the generation that runs, or a node
    traceparent: str = ""
    waited_s: float = 0.0  # from its conclusion to its publication, by the publisher's monotonic clock
    repeat: int = (
        0  # how often it was published before: a conclusion that still holds is said again, with its id and `at`
    )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that every rank of a generation finished. diagnostics publishes them; goodput is computed from them."""

    job: str
    generation: int
    step: int  # 1-based: step n is done when n optimizer steps have been applied
    world_size: int
    started_at: float  # Unix s: `ended_at` less the longest time that a rank took for it
    ended_at: float  # Unix s: latest end over the ranks
    tokens: int  # summed over the ranks
    loss: float | None  # mean over the ranks that reported one
    stall_s: float  # checkpoint stall after the step: the maximum over the ranks
