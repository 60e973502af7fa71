"""The format of a job file: one pydantic model with its sections. `schema` exports it as JSON Schema for editors.

Types are strict: `nodes: "2"` and `nodes: yes` are mistakes, and are not converted to 2 and 1.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from holdfast.domain.job import (
    LEARN_IMPORTS,
    CheckpointSpec,
    ChecksSpec,
    HangSpec,
    LimitSpec,
    Param,
    PolicySpec,
    ReportSpec,
    WarningSpec,
)
from holdfast.domain.nodes import pool_name
from holdfast.stores.opening import parse_url
from holdfast.wire.job_fields import (
    ITEMS_MAX,
    NODES_MAX,
    POLICY_CHARS_MAX,
    PRIORITY_MAX,
    SUSPECT_TEST_S_MAX,
    WORKERS_MAX,
    Count,
    NotNegative,
    Positive,
    Seconds,
    Text,
    canonical,
    job_name,
    learned_or_not,
    module_name,
    or_auto,
    parameter_name,
    preloaded_name,
    program,
    scalar,
    seconds_or_auto,
    steps_or_auto,
    variable_name,
)
from holdfast.wire.resume import parse as parse_resume


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Elastic(Section):
    """The numbers of replicas that the job accepts. An absent bound is the mesh's own dp."""

    min_dp: Annotated[
        Count | None, Field(description="with fewer replicas the job waits; absent = dp of the mesh", examples=[14])
    ] = None
    max_dp: Annotated[
        Count | None,
        Field(description="it grows up to this when nodes are free; absent = dp of the mesh", examples=[16]),
    ] = None


class Checkpoint(Section):
    """How often to save and where to. `auto` intervals are computed from the cost of saves and the rate of faults."""

    interval_steps: Annotated[
        int,
        *or_auto(steps_or_auto, int),
        Field(
            description="run.checkpoint saves at multiples of this number of steps; auto = the supervisor chooses",
            examples=[500],
        ),
    ] = 0
    keep: Annotated[int, Field(ge=2, description="complete steps kept per tier", examples=[3])] = CheckpointSpec().keep
    interval_min_s: Annotated[Seconds, Field(description="auto saves no more often than this", examples=[60])] = (
        CheckpointSpec().interval_min_s
    )
    interval_max_s: Annotated[Seconds, Field(description="auto saves no less often than this", examples=[1800])] = (
        CheckpointSpec().interval_max_s
    )
    store: Annotated[
        str,
        canonical(parse_url),
        Field(
            description="object store that takes copies: gs://bucket/prefix or file:///directory; absent = none",
            examples=["gs://bucket/llm"],
        ),
    ] = ""
    store_interval_s: Annotated[
        float,
        *or_auto(seconds_or_auto, float),
        Field(description="minimum time between two steps that are uploaded to the object store", examples=[900]),
    ] = CheckpointSpec().store_interval_s
    store_keep: Annotated[int, Field(ge=1, description="complete steps kept in the object store", examples=[10])] = (
        CheckpointSpec().store_keep
    )
    resume: Annotated[
        str,
        canonical(parse_resume),
        Field(
            description="start from a checkpoint in an object store: STORE/JOB, STORE/JOB@STEP or STORE/JOB@ATTEMPT/STEP",
            examples=["gs://bucket/llm/pretrain@12000"],
        ),
    ] = ""


class Hang(Section):
    """No finished step for max(floor_s, factor × p99 step time) is a warning; for ten times as long, or init_s, a hang. A rank
    that is proven stuck is a hang after seconds."""

    floor_s: Annotated[
        Seconds, Field(description="a shorter silence is no warning; see above for hangs", examples=[120])
    ] = HangSpec().floor_s
    factor: Annotated[
        float, Field(ge=1, allow_inf_nan=False, description="times the 99th percentile of the step times", examples=[5])
    ] = HangSpec().factor
    init_s: Annotated[
        Seconds, Field(description="allowance for init, restore, compile, eval and checkpoint", examples=[1200])
    ] = HangSpec().init_s


class Checks(Section):
    """Checks of the state itself. They cost time, and are disabled by default."""

    replica_every_steps: Annotated[
        int,
        Field(
            ge=0,
            description="number of steps after which parameters are compared across data-parallel replicas, which also happens "
            "before every save; 0 = never",
            examples=[1000],
        ),
    ] = ChecksSpec().replica_every_steps


class Policy(Section):
    """A policy with parameters. REST clients send the text of a script as well; the command reads it from `file`."""

    file: Annotated[
        str, Field(description="policy script, or plugin:NAME; absent = the default policy", examples=["policy.py"])
    ] = ""
    params: Annotated[
        dict[Annotated[str, AfterValidator(parameter_name)], Annotated[Param, BeforeValidator(scalar)]],
        Field(
            max_length=ITEMS_MAX, description="values that the policy reads as job.params", examples=[{"max_swaps": 3}]
        ),
    ] = {}
    source: Annotated[
        str,
        Field(
            max_length=POLICY_CHARS_MAX,
            description="text of the script, as REST clients send it; absent = read from `file` at submission",
            examples=["from holdfast.policy import default as decide"],
        ),
    ] = ""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: object) -> object:
        """Accept `policy: policy.py` for `policy: {file: policy.py}`."""
        if isinstance(given, str):
            return {"file": given}
        if not isinstance(given, Mapping):
            raise ValueError("the path of a script, plugin:NAME, or {file: …, params: {…}}")
        return given

    @model_serializer
    def _as_given(self) -> str | dict[str, Any]:
        return policy_body(PolicySpec(self.file, self.source, self.params))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


class Limits(Section):
    """How long parts of a recovery may take, and how often it may fail."""

    prepare_timeout_s: Annotated[
        Seconds, Field(description="limit for a node to prepare; a slower node is replaced in the plan", examples=[300])
    ] = LimitSpec().prepare_timeout_s
    first_step_timeout_s: Annotated[
        float,
        *or_auto(seconds_or_auto, float),
        Field(
            description="from start to the first step of every rank; auto = an hour until the job has stepped for the first "
            "time, with a warning after ten minutes; then ten minutes, or twice the longest start so far",
            examples=[1800],
        ),
    ] = LimitSpec().first_step_timeout_s
    restarts_without_progress_max: Annotated[
        int,
        Field(
            ge=0,
            description="generations in a row that finish no step beyond the restored one; after that the job fails",
            examples=[5],
        ),
    ] = LimitSpec().restarts_without_progress_max
    suspect_test_s: Annotated[
        float,
        Field(
            ge=0,
            le=SUSPECT_TEST_S_MAX,
            allow_inf_nan=False,
            description="quick tests of a node that a fault makes suspect, while it prepares; 0 = none",
            examples=[5],
        ),
    ] = LimitSpec().suspect_test_s


class Warnings(Section):
    """When the policy is asked about a warning whose cost is measured, such as a slow rank."""

    settles_s: Annotated[
        NotNegative, Field(description="how long the condition must last; 0 = ask at once", examples=[300])
    ] = WarningSpec().settles_s
    gap_s: Annotated[
        NotNegative, Field(description="minimum time between a planned change and one for a warning", examples=[1800])
    ] = WarningSpec().gap_s


class Report(Section):
    """What reports need and nobody measures (holdfast report). Options of the command take precedence."""

    price_per_gpu_hour: Annotated[
        NotNegative | None, Field(description="price of an hour of one GPU; absent = no costs", examples=[2.5])
    ] = None
    currency: Annotated[
        str, Field(min_length=1, max_length=8, description="what stands before an amount", examples=["€"])
    ] = ReportSpec().currency
    flops_per_token: Annotated[
        Positive | None,
        Field(
            description="FLOPs of one trained token, about 6 × parameters, for MFU; absent = as the script reports them",
            examples=[4.2e11],
        ),
    ] = None
    peak_flops: Annotated[
        Positive | None, Field(description="peak FLOP/s of one device, for MFU", examples=[989e12])
    ] = None
    restart_s: Annotated[
        NotNegative | None,
        Field(
            description="compare with: seconds of a restart without Holdfast; with checkpoint_every_s", examples=[250]
        ),
    ] = None
    checkpoint_every_s: Annotated[
        NotNegative | None,
        Field(description="compare with: seconds between checkpoints without Holdfast; with restart_s", examples=[600]),
    ] = None


class Source(Section):
    """Source from which each node reads a value that is neither stored with the job nor shown: a file or a command."""

    file: Annotated[
        str, Field(description="file on the node; a newline at its end is removed", examples=["/run/secrets/token"])
    ] = ""
    command: Annotated[
        str,
        Field(
            description="command line that the node runs, without a shell; its output is the value",
            examples=["pass show token"],
        ),
    ] = ""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.file.strip()) == bool(self.command.strip()):
            raise ValueError("either {file: PATH} or {command: COMMAND LINE}")
        if self.command:
            try:
                shlex.split(self.command)
            except ValueError as error:
                raise ValueError(f"a command line ({error})") from error
        return self


class JobFile(Section):
    """One training job. Relative paths are relative to the file."""

    name: Annotated[
        str,
        AfterValidator(job_name),
        Field(
            description="1 to 63 lower-case letters, digits and hyphens; checkpoints are kept under it",
            examples=["llm"],
        ),
    ]
    module: Annotated[
        str,
        AfterValidator(lambda text: module_name(text) if text else text),
        Field(
            description="Python module that every worker runs, as `python -m`; instead of `script`",
            examples=["mypkg.train"],
        ),
    ] = ""
    command: Annotated[
        str,
        AfterValidator(lambda text: program(text) if text else text),
        Field(
            description="program that every worker runs, instead of `script`: a path, or a name in PATH. Only a Python program "
            "of the nodes' environment is forked from the worker template; others take longer to start",
            examples=["tune"],
        ),
    ] = ""
    script: Annotated[
        str,
        Field(
            validate_default=True,
            description="Python script that every worker runs, or a directory or archive with a __main__.py",
            examples=["train.py"],
        ),
    ] = ""
    args: Annotated[
        list[Text], Field(max_length=ITEMS_MAX, description="arguments of every worker", examples=[["--lr", "3e-4"]])
    ] = []
    cwd: Annotated[
        str,
        Field(
            description="working directory; absent = the script's own; of a module or command, the job file's",
            examples=["/home/me/llm"],
        ),
    ] = ""
    env: Annotated[
        dict[Annotated[str, AfterValidator(variable_name)], Text],
        Field(
            max_length=ITEMS_MAX,
            description="environment variables of every worker; they are stored and shown",
            examples=[{"NCCL_DEBUG": "WARN"}],
        ),
    ] = {}
    env_from: Annotated[
        dict[Annotated[str, AfterValidator(variable_name)], Source],
        Field(
            max_length=ITEMS_MAX,
            description="variables whose values each node reads when it starts workers: they are neither stored nor "
            "shown",
            examples=[{"HF_TOKEN": {"file": "/run/secrets/hf"}}],
        ),
    ] = {}
    preload: Annotated[
        list[Annotated[str, AfterValidator(preloaded_name)]],
        Field(
            max_length=ITEMS_MAX,
            description="`auto`: each node learns the installed modules that the script imports, and its worker template "
            "imports them ahead of time. Names of modules, and of functions (module:function) that it calls, are in addition "
            "to `auto`, unless `none` is among them. `[]` or `[none]` turns it off",
            examples=[["transformers.trainer", "mypkg.data:prepare"]],
        ),
        AfterValidator(learned_or_not),
    ] = [LEARN_IMPORTS]
    nodes: Annotated[Count, Field(le=NODES_MAX, description="nodes that the full mesh needs", examples=[16])] = 1
    nproc_per_node: Annotated[
        Count, Field(le=WORKERS_MAX, description="workers per node, usually its GPUs", examples=[8])
    ] = 1
    mesh: Annotated[
        dict[str, Count] | None,
        Field(
            description="dimension → size, outermost first, in any order; absent = {dp: all ranks}",
            examples=[{"dp": 16, "pp": 2, "tp": 4}],
        ),
    ] = None
    elastic: Elastic = Elastic()
    checkpoint: Checkpoint = Checkpoint()
    hang: Hang = Hang()
    checks: Checks = Checks()
    limits: Limits = Limits()
    policy: Annotated[
        Policy,
        Field(
            description="policy script, or plugin:NAME for an installed one, alone or as {file, params}; absent = the default "
            "policy"
        ),
    ] = Policy()
    spares: Annotated[
        int,
        Field(
            ge=0,
            le=NODES_MAX,
            description="free nodes that are reserved for the job while it runs: no job of equal or lower priority gets them",
            examples=[1],
        ),
    ] = 0
    priority: Annotated[
        int,
        Field(
            ge=-PRIORITY_MAX,
            le=PRIORITY_MAX,
            description="if several jobs want nodes, the job with the higher priority gets them; it may also get replicas of "
            "jobs with a lower priority, if their policies agree",
            examples=[10],
        ),
    ] = 0
    steps: Annotated[
        int,
        Field(
            ge=0,
            description="total number of steps of the script, to decide whether a planned change pays; 0 = unknown: the number "
            "of remaining steps is assumed to equal that of the finished ones",
            examples=[100000],
        ),
    ] = 0
    chaos: Annotated[
        bool,
        Field(
            description="allow injected faults (holdfast inject --every); for tests of the recovery", examples=[True]
        ),
    ] = False
    warnings: Warnings = Warnings()
    pool: Annotated[
        str,
        AfterValidator(pool_name),
        Field(
            description="the job runs on nodes of this pool only (HOLDFAST_POOL of their agents); empty = nodes without a pool",
            examples=["h100"],
        ),
    ] = ""
    report: Report = Report()

    @field_validator("script")
    @classmethod
    def _one_target(cls, script: str, info: ValidationInfo) -> str:
        given = [name for name in ("module", "command") if info.data.get(name)]
        invalid = {"module", "command"} - info.data.keys()  # their own mistakes are already reported
        if not script and not given and not invalid:
            raise ValueError("a value: one of script, module and command is required")
        if len(given) + bool(script) > 1:
            raise ValueError(f"only one of script, module and command; {' and '.join(given)} is given as well")
        return script

    @field_validator("env_from")
    @classmethod
    def _once(cls, sources: dict[str, Source], info: ValidationInfo) -> dict[str, Source]:
        if twice := sorted(sources.keys() & info.data.get("env", {}).keys()):
            raise ValueError(f"variables that are not in env as well; {', '.join(twice)} is in both")
        return sources


def schema() -> dict[str, Any]:
    """Return the format as JSON Schema."""
    return JobFile.model_json_schema()


def policy_body(policy: PolicySpec) -> str | dict[str, Any]:
    """Return the body from which `parse_policy` returns `policy`."""
    if not (policy.source or policy.params):
        return policy.name
    body: dict[str, Any] = {"file": policy.name, "params": dict(policy.params), "source": policy.source}
    return {key: value for key, value in body.items() if value}
