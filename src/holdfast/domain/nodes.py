"""Nodes: state, facts that agents report, pre-flight tests, maintenance notices and workers, as the supervisor keeps them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

PROTOCOL_VERSION = 1
# Longest pause between two attempts of an agent to open its telemetry stream. Diagnostics derives from it how long an agent may
# take to reconnect (`Liveness.reconnect_grace_s`).
TELEMETRY_RETRY_S_MAX = 1.0


class NodeState(StrEnum):
    SPARE = "spare"  # healthy, connected, no ranks
    ACTIVE = "active"  # runs ranks of a job
    CORDONED = "cordoned"  # connected, must not get ranks: because of an operator or a fatal finding
    LEFT = "left"  # not connected: its agent was asked to end, and has ended
    LOST = "lost"  # not connected


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts that an agent reports about its node when it connects."""

    node: str
    incarnation: str  # new at every start of the agent: after a change, the workers of the old incarnation have ended
    hostname: str
    address: str  # address at which workers of other nodes reach this node
    zone: str  # failure domain; peers are chosen in other zones
    capacity: int  # largest number of workers
    replicator_endpoint: str  # host:port of the shard data plane; empty = no replicator
    agent_pid: int
    directory: str  # the agent's own directory on its machine
    kernel_log: str  # the file that its kernel-log collector reads
    disk_dir: str = ""  # directory in which its replicator keeps shards, one subdirectory per job; empty = not reported
    version: str = ""
    protocol_version: int = PROTOCOL_VERSION
    restore_runs: bool = False  # the agent accepts the shards that a slot restores as runs of ranks (`RestoreRun`)
    resets_gpus: bool = False  # the agent accepts `ResetGpu`, and has a command for it
    boot_id: str = ""  # of the machine, new after each boot; empty = unknown
    reboots: bool = False  # the agent accepts `RebootNode`, and has a command for it
    machine_id: str = ""  # of the machine itself, the same after each boot; empty = unknown
    restarts: bool = False  # the agent accepts `RestartAgent`
    tests_links: bool = False  # the agent accepts `CheckLink`, and has a replicator
    pool: str = ""  # only jobs of this pool run on the node; empty = only jobs without a pool
    agrees_on_saves: bool = False  # the agent accepts a `CheckpointNow` with a stage


PEERS = "peers"  # the check whether replicators of other nodes answer


@dataclass(frozen=True, slots=True)
class ServiceVersions:
    """Versions of the services that a node's agent talks to; empty = not known."""

    diagnostics: str = ""
    replicator: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check of a pre-flight test."""

    name: str  # "gpus", "products", "memory", "disk", PEERS
    ok: bool | None  # None = the check could not run: the node is neither healthy nor faulty because of it
    detail: str  # the measured value, or the failure


@dataclass(frozen=True, slots=True)
class Preflight:
    """The results of a node's pre-flight test."""

    at: float = 0.0  # end of the test, Unix seconds; 0 = the test is running
    duration_s: float = 0.0
    checks: tuple[Check, ...] = ()

    @property
    def failures(self) -> str:
        """The failed checks as text; empty if none has failed."""
        return "; ".join(f"{check.name}: {check.detail}" for check in self.checks if check.ok is False)

    def has_failed(self, name: str) -> bool:
        return any(check.name == name and check.ok is False for check in self.checks)


_POOL = re.compile("([a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?)?")  # the value of a Kubernetes label


def pool_name(text: str) -> str:
    """Return `text` if it is a valid pool name; empty = no pool. Raises `ValueError` that states the valid form."""
    if _POOL.fullmatch(text) is None:
        raise ValueError("1 to 63 letters, digits, '-', '_' and '.', a letter or digit first and last")
    return text


AGENT_DIRECTORY_BYTES_MAX = 90  # of the 107 bytes of a Unix socket's path; the other bytes are for the file name

# source of a notice: the agent, which was asked to end. The notice ends when an agent starts there
TERMINATION = "termination"


@dataclass(frozen=True, slots=True)
class Notice:
    """A maintenance notice: the owner of a machine has announced that the machine will be taken away, or (`event` empty) has
    withdrawn the announcement."""

    source: str  # "file", "gce", TERMINATION, or the name of the user of the API
    event: str  # as announced
    at: float  # when the finding was concluded, Unix seconds
    starts_at: float | None = None  # Unix seconds; None = not announced: maintenance may start at any moment
    # Of the agent that was asked to end; the notice does not apply to the next agent. Empty: the notice is about the machine.
    incarnation: str = ""

    def left_s(self, at: float) -> float:
        """Seconds from `at` to the start of the maintenance; 0 if it has started or the start is not known."""
        return max(0.0, self.starts_at - at) if self.starts_at is not None else 0.0


@dataclass(frozen=True, slots=True)
class RunningWorker:
    job: str
    generation: int
    rank: int
    pid: int
    since: float = 0.0  # when the worker was forked, Unix seconds of the node's clock; 0 = not reported


@dataclass(frozen=True, slots=True)
class TemplateState:
    """State of a node's worker template."""

    jobs: tuple[str, ...] = ()  # jobs known to the node whose workers the template can fork
    ready: bool = False
    failure: str = ""  # why there is no template, if it has ended several times in a row


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A rank that was started and has ended. One of `exit_code` and `signal` is set, unless neither is known."""

    job: str
    generation: int
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    ago_s: float = 0.0  # seconds from the end of the rank to the report, by the node's monotonic clock

    @property
    def well(self) -> bool:
        return self.exit_code == 0

    @property
    def how(self) -> str:
        """How the rank ended, as text."""
        if self.signal is not None:
            return f"was ended by signal {self.signal}"
        return "has ended" if self.exit_code is None else f"ended with exit code {self.exit_code}"
