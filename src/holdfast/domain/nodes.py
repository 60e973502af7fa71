"""Nodes as the supervisor knows them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

PROTOCOL_VERSION = 1
# An agent without a telemetry stream tries again at least this often. Diagnostics derives from it how long a node whose stream
# broke may stay away (`Liveness.reconnect_grace_s`).
TELEMETRY_RETRY_S_MAX = 1.0


class NodeState(StrEnum):
    SPARE = "spare"  # healthy, connected, no ranks
    ACTIVE = "active"  # runs ranks of a job
    CORDONED = "cordoned"  # connected, must not get ranks: an operator or a fatal finding said so
    LEFT = "left"  # not connected: its agent was told to end, and has ended
    LOST = "lost"  # not connected


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What an agent says of its node when it connects."""

    node: str
    incarnation: str  # new at every start of the agent: a change means that its workers are gone
    hostname: str
    address: str  # where workers of other nodes reach this one
    zone: str  # failure domain; peers are chosen across zones
    capacity: int  # workers that fit
    replicator_endpoint: str  # host:port of the shard data plane; empty = no replicator
    agent_pid: int
    directory: str  # the agent's own directory on its machine
    kernel_log: str  # the file that its kernel-log collector reads
    disk_dir: str = ""  # where its replicator keeps shards, each job in a directory of its name; empty = not told
    version: str = ""
    protocol_version: int = PROTOCOL_VERSION
    restore_runs: bool = False  # whether its agent takes what a slot restores in runs of ranks
    resets_gpus: bool = False  # whether its agent takes `ResetGpu`, and has a command for it
    boot_id: str = ""  # of its machine, another one after each boot; empty = unknown
    reboots: bool = False  # whether its agent takes `RebootNode`, and has a command for it
    machine_id: str = ""  # of the machine itself, the same after each boot; empty = unknown
    restarts: bool = False  # whether its agent takes `RestartAgent`
    tests_links: bool = False  # whether its agent takes `CheckLink`, and has a replicator
    pool: str = ""  # only jobs of this pool get its node; empty = jobs without one


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a node tested on itself."""

    name: str  # "gpus", "products", "memory", "disk", "peers"
    ok: bool | None  # None = it could not be tested: that says nothing of the node
    detail: str  # what was measured, or what is wrong


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a node's tests of itself found, before it gets ranks."""

    at: float = 0.0  # Unix seconds, when they ended; 0 = they are under way
    took_s: float = 0.0
    checks: tuple[Check, ...] = ()

    @property
    def failures(self) -> str:
        """What is wrong, in words; empty when nothing is."""
        return "; ".join(f"{check.name}: {check.detail}" for check in self.checks if check.ok is False)


_POOL = re.compile("([a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?)?")  # the value of a Kubernetes label


def pool_name(text: str) -> str:
    """Return it; empty = no pool. Raises `ValueError` with what would be right."""
    if _POOL.fullmatch(text) is None:
        raise ValueError("1 to 63 letters, digits, '-', '_' and '.', a letter or digit first and last")
    return text


AGENT_DIRECTORY_BYTES_MAX = 90  # of the 107 bytes of a Unix socket's path; the rest is for file names

TERMINATION = (
    "termination"  # source of a notice: the agent itself, which was told to end. Over when an agent starts there
)


@dataclass(frozen=True, slots=True)
class Notice:
    """The owner of a machine has announced that it will be taken, or (`event` empty) that it will not after all."""

    source: str  # who says so: "file", "gce", TERMINATION, or the name under which somebody uses the API
    event: str  # as announced
    at: float  # when it was concluded, Unix seconds
    starts_at: float | None = None  # Unix seconds; None = not told: it may be any moment
    incarnation: str = ""  # of the agent that was told to end, and says nothing of its successor; empty: of the machine

    def left_s(self, at: float) -> float:
        """Seconds until it starts; 0 when it has, or when that is not known."""
        return max(0.0, self.starts_at - at) if self.starts_at is not None else 0.0


@dataclass(frozen=True, slots=True)
class RunningWorker:
    job: str
    generation: int
    rank: int
    pid: int
    since: float = 0.0  # Unix seconds by the node's clock, when it was forked; 0 = not reported


@dataclass(frozen=True, slots=True)
class TemplateState:
    """The process that a node forks its workers from, with their modules imported."""

    jobs: tuple[str, ...] = ()  # whose workers it can fork, as far as this node has been told of them
    ready: bool = False
    failure: str = ""  # why there is none, when it has ended several times in a row


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A rank that had been told to start and has ended. One of `exit_code` and `signal` is set, unless neither is known."""

    job: str
    generation: int
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    ago_s: float = 0.0  # when the report was made, by the node's monotonic clock

    @property
    def well(self) -> bool:
        return self.exit_code == 0

    @property
    def how(self) -> str:
        """In words."""
        if self.signal is not None:
            return f"was ended by signal {self.signal}"
        return "has ended" if self.exit_code is None else f"ended with exit code {self.exit_code}"
