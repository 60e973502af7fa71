"""What a user asks for: one job, as submitted. Built from YAML or REST by `holdfast.wire.jobfile`, never by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.mesh import Mesh


@dataclass(frozen=True, slots=True)
class EnvSource:
    """Where each node finds the value of an environment variable that is stored and shown nowhere. One of the two is set."""

    name: str
    file: str = ""  # path on the node; the value is its text, without the newline at its end
    command: str = ""  # command line that the node runs, without a shell; the value is what it prints, likewise


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What each worker runs: exactly one of script, module and command is set. What is Python is forked from the node's warm
    template and started as `__main__`."""

    script: str = (
        ""  # absolute path on every node: of a Python script, or of a directory or archive with a `__main__.py`
    )
    args: tuple[str, ...] = ()
    cwd: str = ""  # working directory; empty = the script's own directory, otherwise the agent's
    env: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()  # modules that the template imports besides torch and holdfast.train
    module: str = ""  # as `python -m`
    command: str = ""  # a program: an absolute path on every node, or a name that is looked for in PATH
    env_from: tuple[EnvSource, ...] = ()

    @property
    def target(self) -> str:
        """What is run, in the user's words."""
        return self.script or self.module or self.command


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """How often a job saves, and where to. A tier's own interval is a minimum: it takes the newest step when it is due."""

    interval_steps: int = 50  # run.checkpoint saves when step is a multiple of it; 0 = auto: the supervisor chooses
    keep: int = 2  # complete steps kept per node-local tier
    interval_min_s: float = 1.0  # bounds of what the supervisor chooses
    interval_max_s: float = 600.0
    store: str = ""  # object store that takes copies: gs://bucket/prefix or file:///directory; empty = none
    store_interval_s: float = 300.0  # no more than one step per so long goes to the object store
    store_keep: int = 3  # complete steps kept in the object store


@dataclass(frozen=True, slots=True)
class ResumeSpec:
    """The checkpoint that a new job starts from: one of another job's, or of an earlier run's, in an object store."""

    store: str  # its URL
    job: str
    attempt: int | None = None  # None = the newest that has such a step
    step: int | None = None  # None = the newest complete one

    def __str__(self) -> str:
        """As in a job file."""
        attempt = "" if self.attempt is None else f"{self.attempt}/"
        at = "" if self.step is None else f"@{attempt}{self.step}"
        return f"{self.store}/{self.job}{at}"


@dataclass(frozen=True, slots=True)
class HangSpec:
    """A job hangs when no rank finishes a step for max(floor_s, factor × p99 step time)."""

    floor_s: float = 10.0
    factor: float = 3.0
    init_s: float = 600.0  # allowance while a rank is in init, restore, compile, eval or checkpoint


@dataclass(frozen=True, slots=True)
class ChecksSpec:
    """Checks of the state itself, which cost time: off unless asked for."""

    replica_every_steps: int = 0  # parameters are compared across replicas so often, and before every save; 0 = never


@dataclass(frozen=True, slots=True)
class WarningSpec:
    """When a warning whose cost is measured leads to a question to the policy."""

    settles_s: float = 590.0  # for so long a condition must last; detectors repeat a lasting one by 600 s at the latest
    gap_s: float = 600.0  # between a planned change of the job and one for a warning


@dataclass(frozen=True, slots=True)
class LimitSpec:
    prepare_timeout_s: float = 60.0  # a node that cannot prepare in time is replanned around
    first_step_timeout_s: float = 600.0  # START to the first step of every rank
    restarts_without_progress_max: int = 3  # generations in a row that finish no step beyond the restored one
    suspect_test_s: float = 2.0  # a node that a fault makes suspect is tested for so long while it prepares; 0 = never


Param = str | int | float | bool


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """What decides about a job's incidents. The text of a script travels with the job: nothing reads the user's file later, and
    what is edited there changes no running job (`holdfast policy set` does)."""

    name: str = ""  # path of the script as it was submitted, or plugin:NAME; empty = the default policy
    source: str = ""  # of the script; empty for a plug-in, and for a job of an earlier version: its file is read
    params: Mapping[str, Param] = field(default_factory=dict)  # for the policy, as `job.params`

    @property
    def sha256(self) -> str:
        """Of the text, in hexadecimal; empty without one."""
        return hashlib.sha256(self.source.encode()).hexdigest() if self.source else ""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One training job. `mesh` is what it wants; `min_dp … max_dp` what it accepts."""

    name: str
    launch: LaunchSpec
    nodes: int
    nproc_per_node: int
    mesh: Mesh
    min_dp: int
    max_dp: int
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    hang: HangSpec = field(default_factory=HangSpec)
    limits: LimitSpec = field(default_factory=LimitSpec)
    policy: str = ""  # this and the next two of the policy: see `PolicySpec`
    spares: int = (
        0  # free nodes that are reserved for it while it runs: jobs of equal or lower priority do not get them
    )
    checks: ChecksSpec = field(default_factory=ChecksSpec)
    resume: ResumeSpec | None = None  # None = step 0
    steps: int = 0  # that the script does in all, to judge whether a planned change pays; 0 = not known
    policy_source: str = ""
    policy_params: Mapping[str, Param] = field(default_factory=dict)
    chaos: bool = False  # faults may be injected into it (`holdfast inject --every`)
    priority: int = 0  # -1000 … 1000; of several jobs that want nodes the one with the higher priority gets them
    warnings: WarningSpec = field(default_factory=WarningSpec)
    pool: str = ""  # it runs on nodes of this pool only; empty = on nodes without one

    @property
    def policy_spec(self) -> PolicySpec:
        return PolicySpec(self.policy, self.policy_source, self.policy_params)

    def with_policy(self, policy: PolicySpec) -> JobSpec:
        return replace(self, policy=policy.name, policy_source=policy.source, policy_params=policy.params)

    def __post_init__(self) -> None:
        if self.mesh.world_size != self.nodes * self.nproc_per_node:
            raise InvalidSpec(
                "mesh",
                str(self.mesh),
                f"a mesh of {self.nodes} nodes × {self.nproc_per_node} workers = {self.nodes * self.nproc_per_node} ranks, "
                f"not {self.mesh.world_size}",
            )
        if self.min_dp > self.max_dp:
            raise InvalidSpec("elastic.min_dp", self.min_dp, f"at most elastic.max_dp ({self.max_dp})")
        if not self.min_dp <= self.mesh.dp <= self.max_dp:
            raise InvalidSpec(
                "elastic", (self.min_dp, self.max_dp), f"a range that contains the mesh's dp ({self.mesh.dp})"
            )
        if self.checks.replica_every_steps and self.mesh.dp < 2:
            raise InvalidSpec(
                "checks.replica_every_steps",
                self.checks.replica_every_steps,
                f"a mesh with two replicas or more to compare (this one is {self.mesh})",
            )
        self._check_groups()

    def _check_groups(self) -> None:
        """Whole nodes leave with whole replicas: what the job accepts must be possible so."""
        mesh, size, width = self.mesh, self.mesh.replica_size, self.nproc_per_node
        if mesh.is_dp_outermost:
            if size % width and width % size:
                raise InvalidSpec(
                    "nproc_per_node",
                    width,
                    f"whole replicas per node or whole nodes per replica (a replica is {size} ranks)",
                )
            return
        group = mesh.grouping(width)
        if self.min_dp < mesh.dp == group.replicas:
            raise InvalidSpec(
                "elastic.min_dp",
                self.min_dp,
                f"{mesh.dp}: on nodes of {width} workers the mesh {mesh} cannot go on with fewer replicas, because no node "
                "can leave without ranks of all replicas",
            )
        if group.is_fixed and self.max_dp > mesh.dp:
            raise InvalidSpec(
                "elastic.max_dp",
                self.max_dp,
                f"{mesh.dp}: on nodes of {width} workers the ranks of the mesh {mesh} would change nodes with more replicas",
            )

    def nodes_at(self, dp: int) -> int:
        """Nodes needed to run `dp` replicas."""
        return -(-self.mesh.replica_size * dp // self.nproc_per_node)
