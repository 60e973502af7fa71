"""The specification of a job, as submitted. Built from YAML or REST by `holdfast.wire.jobfile`, never by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.mesh import Mesh

LEARN_IMPORTS = "auto"  # in `preload`: each node learns the modules that the script imports


@dataclass(frozen=True, slots=True)
class EnvSource:
    """Source of the value of an environment variable, read on each node. The value is neither stored nor shown. Either `file`
    or `command` is set."""

    name: str
    file: str = ""  # path on the node; the value is the text of the file, without the newline at its end
    command: str = ""  # command line, run without a shell; the value is its output, without the newline at its end


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """The program that each worker runs: exactly one of `script`, `module` and `command` is set. Scripts and modules are forked
    from the node's worker template and started as `__main__`."""

    # absolute path on every node of a Python script, or of a directory or archive with a `__main__.py`
    script: str = ""
    args: tuple[str, ...] = ()
    cwd: str = ""  # working directory; empty = the script's own directory, otherwise the agent's
    env: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()  # modules that the template imports besides torch and holdfast.train; `LEARN_IMPORTS`
    module: str = ""  # as `python -m`
    command: str = ""  # a program: an absolute path on every node, or a name that is looked up in PATH
    env_from: tuple[EnvSource, ...] = ()

    @property
    def target(self) -> str:
        """The script, module or command, as the user gave it."""
        return self.script or self.module or self.command


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """How often a job saves, and where. A tier's own interval is a minimum: when it is over, the newest step is copied."""

    interval_steps: int = 50  # `run.checkpoint` saves at multiples of this number; 0 = auto: the supervisor chooses
    keep: int = 2  # complete checkpoints that each tier of a node keeps
    interval_min_s: float = 1.0  # bounds of the interval that the supervisor chooses
    interval_max_s: float = 600.0
    store: str = ""  # object store for copies: gs://bucket/prefix or file:///directory; empty = none
    store_interval_s: float = 300.0  # at most one step per interval is uploaded to the object store
    store_keep: int = 3  # complete checkpoints that the object store keeps


@dataclass(frozen=True, slots=True)
class ResumeSpec:
    """The checkpoint that a new job starts from: a checkpoint of another job, or of an earlier run, in an object store."""

    store: str  # URL of the object store
    job: str
    attempt: int | None = None  # None = the newest attempt that has the step
    step: int | None = None  # None = the newest complete checkpoint

    def __str__(self) -> str:
        """In the notation of a job file."""
        attempt = "" if self.attempt is None else f"{self.attempt}/"
        at = "" if self.step is None else f"@{attempt}{self.step}"
        return f"{self.store}/{self.job}{at}"


@dataclass(frozen=True, slots=True)
class HangSpec:
    """A job hangs if no rank finishes a step for max(floor_s, factor × p99 step time)."""

    floor_s: float = 10.0
    factor: float = 3.0
    init_s: float = 600.0  # allowance while a rank is in init, restore, compile, eval or checkpoint


@dataclass(frozen=True, slots=True)
class ChecksSpec:
    """Checks of the state itself. They cost time and are off by default."""

    # Steps between comparisons of parameters across replicas, which are also made before every save. 0 = never.
    replica_every_steps: int = 0


@dataclass(frozen=True, slots=True)
class WarningSpec:
    """When the policy is asked about a warning whose cost is measured."""

    settles_s: float = 590.0  # how long the condition must last; detectors repeat it at the latest every 600 s
    gap_s: float = 600.0  # shortest time between a planned change of the job and a change because of a warning


@dataclass(frozen=True, slots=True)
class LimitSpec:
    prepare_timeout_s: float = 60.0  # the next plan excludes a node that has not prepared within this time
    first_step_timeout_s: float = 0.0  # from START to the first step of every rank; 0 = auto: by the starts seen so far
    restarts_without_progress_max: int = 3  # generations in a row that finish no step beyond the restored one
    suspect_test_s: float = 2.0  # time for the test of a suspect while it prepares; 0 = suspects are not tested


@dataclass(frozen=True, slots=True)
class ReportSpec:
    """What reports of the job need and nobody measures. None = not stated."""

    price_per_gpu_hour: float | None = None
    currency: str = "$"  # what stands before an amount
    flops_per_token: float | None = None  # of one trained token, about 6 × parameters
    peak_flops: float | None = None  # FLOP/s of one device
    restart_s: float | None = None  # of a restart without Holdfast, to compare with
    checkpoint_every_s: float | None = None  # between checkpoints without Holdfast, to compare with


Param = str | int | float | bool


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The policy of a job. The text of the script is stored with the job. The user's file is not read again, so that an edit of
    the file does not change a running job (`holdfast policy set` does)."""

    name: str = ""  # path of the script when it was submitted, or plugin:NAME; empty = the default policy
    source: str = ""  # text of the script; empty for a plug-in, and for a job of an earlier version, whose file is read
    params: Mapping[str, Param] = field(default_factory=dict)  # for the policy, as `job.params`

    @property
    def sha256(self) -> str:
        """SHA-256 of the text, in hexadecimal; empty if there is no text."""
        return hashlib.sha256(self.source.encode()).hexdigest() if self.source else ""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One training job. `mesh`: the mesh that the job wants. `min_dp … max_dp`: the numbers of replicas that it accepts."""

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
    policy: str = ""  # `policy`, `policy_source` and `policy_params`: see `PolicySpec`
    # free nodes that are reserved for the job while it runs: jobs of equal or lower priority do not get them
    spares: int = 0
    checks: ChecksSpec = field(default_factory=ChecksSpec)
    resume: ResumeSpec | None = None  # None = start from step 0
    steps: int = 0  # total number of steps of the script, used to judge whether a planned change pays; 0 = not known
    policy_source: str = ""
    policy_params: Mapping[str, Param] = field(default_factory=dict)
    chaos: bool = False  # faults may be injected into the job (`holdfast inject --every`)
    priority: int = 0  # -1000 … 1000; if several jobs want nodes, the job with the higher priority gets them
    warnings: WarningSpec = field(default_factory=WarningSpec)
    pool: str = ""  # the job runs only on nodes of this pool; empty = only on nodes without a pool
    report: ReportSpec = field(default_factory=ReportSpec)

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
        """Check the accepted numbers of replicas: each must be reachable by removing or adding whole nodes with whole
        replicas."""
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
