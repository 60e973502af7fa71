"""The job file: YAML or a REST body → `JobSpec`, and back. All mistakes are reported at once.

One pydantic model describes the format, and `schema` exports it as JSON Schema for editors. Types are strict: `nodes: "2"` and
`nodes: yes` are mistakes, and are not converted to 2 and 1.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from holdfast.domain.errors import InvalidSpec, InvalidSpecs
from holdfast.domain.job import (
    CheckpointSpec,
    ChecksSpec,
    EnvSource,
    HangSpec,
    JobSpec,
    LaunchSpec,
    LimitSpec,
    Param,
    PolicySpec,
    ReportSpec,
    WarningSpec,
)
from holdfast.domain.mesh import DATA_PARALLEL, Mesh
from holdfast.domain.nodes import pool_name
from holdfast.plugins import POLICY_PREFIX
from holdfast.stores.opening import parse_url
from holdfast.wire import yamlfile
from holdfast.wire.resume import parse as parse_resume
from holdfast.wire.yamlfile import KeyPath, dotted

NODES_MAX = 100_000
WORKERS_MAX = 1_024  # per node
RANKS_MAX = 1_000_000  # limit of the detectors
PRIORITY_MAX = 1_000
ITEMS_MAX = 1_000  # each of arguments, variables and modules
POLICY_CHARS_MAX = 65_536
NAME_CHARS_MAX = 63

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("1 to 63 lower-case letters, digits and hyphens, a letter or digit first and last")
    return text


def _module(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise ValueError("a module's dotted name, such as transformers.models.llama")
    return text


def _preloaded(text: str) -> str:
    module, colon, function = text.partition(":")
    if not all(part.isidentifier() for part in module.split(".")) or (colon and not function.isidentifier()):
        raise ValueError("a module's dotted name, such as transformers.models.llama, or module:function")
    return text


def _program(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("the path of a program, or its name if it is in PATH")
    return text


def _variable(text: str) -> str:
    if not text or "=" in text or "\0" in text:
        raise ValueError("the name of an environment variable")
    return text


def _parameter(text: str) -> str:
    if not text.isidentifier():
        raise ValueError("a name such as max_swaps")
    return text


def _scalar(value: object) -> object:
    if not isinstance(value, str | int | float | bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("a string, a finite number, true or false")
    return value


def _text(value: object) -> object:
    """Accept unquoted numbers for text of the process, but not yes and no, which YAML reads as True and False."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_text)]
Count = Annotated[int, Field(ge=1)]
SUSPECT_TEST_S_MAX = 60.0
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Elastic(_Part):
    """The numbers of replicas that the job accepts. An absent bound is the mesh's own dp."""

    min_dp: Annotated[
        Count | None, Field(description="with fewer replicas the job waits; absent = dp of the mesh", examples=[14])
    ] = None
    max_dp: Annotated[
        Count | None,
        Field(description="it grows up to this when nodes are free; absent = dp of the mesh", examples=[16]),
    ] = None


AUTO = "auto"  # in the file; the spec has 0 instead


def _steps(value: object) -> object:
    if value == AUTO:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("auto, or a number of steps of at least 1")
    return value


def _seconds(value: object) -> object:
    if value == AUTO:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError("auto, or a number of seconds greater than 0")
    return float(value)


def _auto(value: float) -> float | str:
    return value or AUTO


def _or_auto(check: Callable[[object], object], kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Return the validator, the serialiser and the schema of a number for which `auto` may be given."""
    number = {int: "integer", float: "number"}[kind]
    known = {"anyOf": [{"const": AUTO}, {"type": number, "exclusiveMinimum": 0}], "default": AUTO}
    # Names `kind`, not the return type of `_auto`: an int where the serialiser expects a float would cause a warning each time.
    shown: Any = kind | Literal["auto"]
    return BeforeValidator(check), PlainSerializer(_auto, return_type=shown), WithJsonSchema(known)


def _canonical(parse: Callable[[str], object]) -> AfterValidator:
    """Validate a text by `parse`, and replace it by the canonical text of the result; empty stays empty."""

    def check(text: str) -> str:
        try:
            return str(parse(text)) if text else ""
        except InvalidSpec as error:
            raise ValueError(error.expected) from error

    return AfterValidator(check)


class Checkpoint(_Part):
    """How often to save and where to. `auto` intervals are computed from the cost of saves and the rate of faults."""

    interval_steps: Annotated[
        int,
        *_or_auto(_steps, int),
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
        _canonical(parse_url),
        Field(
            description="object store that takes copies: gs://bucket/prefix or file:///directory; absent = none",
            examples=["gs://bucket/llm"],
        ),
    ] = ""
    store_interval_s: Annotated[
        float,
        *_or_auto(_seconds, float),
        Field(description="minimum time between two steps that are uploaded to the object store", examples=[900]),
    ] = CheckpointSpec().store_interval_s
    store_keep: Annotated[int, Field(ge=1, description="complete steps kept in the object store", examples=[10])] = (
        CheckpointSpec().store_keep
    )
    resume: Annotated[
        str,
        _canonical(parse_resume),
        Field(
            description="start from a checkpoint in an object store: STORE/JOB, STORE/JOB@STEP or STORE/JOB@ATTEMPT/STEP",
            examples=["gs://bucket/llm/pretrain@12000"],
        ),
    ] = ""


class Hang(_Part):
    """If no step is finished for max(floor_s, factor × p99 step time), the job hangs."""

    floor_s: Annotated[Seconds, Field(description="a shorter silence is never a hang", examples=[120])] = (
        HangSpec().floor_s
    )
    factor: Annotated[
        float, Field(ge=1, allow_inf_nan=False, description="times the 99th percentile of the step times", examples=[5])
    ] = HangSpec().factor
    init_s: Annotated[
        Seconds, Field(description="allowance for init, restore, compile, eval and checkpoint", examples=[1200])
    ] = HangSpec().init_s


class Checks(_Part):
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


class Policy(_Part):
    """A policy with parameters. REST clients send the text of a script as well; the command reads it from `file`."""

    file: Annotated[
        str, Field(description="policy script, or plugin:NAME; absent = the default policy", examples=["policy.py"])
    ] = ""
    params: Annotated[
        dict[Annotated[str, AfterValidator(_parameter)], Annotated[Param, BeforeValidator(_scalar)]],
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


class _PolicyBody(_Part):
    policy: Policy


class Limits(_Part):
    """How long parts of a recovery may take, and how often it may fail."""

    prepare_timeout_s: Annotated[
        Seconds, Field(description="limit for a node to prepare; a slower node is replaced in the plan", examples=[300])
    ] = LimitSpec().prepare_timeout_s
    first_step_timeout_s: Annotated[
        Seconds, Field(description="from start to the first step of every rank", examples=[1800])
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


NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Warnings(_Part):
    """When the policy is asked about a warning whose cost is measured, such as a slow rank."""

    settles_s: Annotated[
        NotNegative, Field(description="how long the condition must last; 0 = ask at once", examples=[300])
    ] = WarningSpec().settles_s
    gap_s: Annotated[
        NotNegative, Field(description="minimum time between a planned change and one for a warning", examples=[1800])
    ] = WarningSpec().gap_s


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Report(_Part):
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


class Source(_Part):
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


class JobFile(_Part):
    """One training job. Relative paths are relative to the file."""

    name: Annotated[
        str,
        AfterValidator(_name),
        Field(
            description="1 to 63 lower-case letters, digits and hyphens; checkpoints are kept under it",
            examples=["llm"],
        ),
    ]
    module: Annotated[
        str,
        AfterValidator(lambda text: _module(text) if text else text),
        Field(
            description="Python module that every worker runs, as `python -m`; instead of `script`",
            examples=["mypkg.train"],
        ),
    ] = ""
    command: Annotated[
        str,
        AfterValidator(lambda text: _program(text) if text else text),
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
        dict[Annotated[str, AfterValidator(_variable)], Text],
        Field(
            max_length=ITEMS_MAX,
            description="environment variables of every worker; they are stored and shown",
            examples=[{"NCCL_DEBUG": "WARN"}],
        ),
    ] = {}
    env_from: Annotated[
        dict[Annotated[str, AfterValidator(_variable)], Source],
        Field(
            max_length=ITEMS_MAX,
            description="variables whose values each node reads when it starts workers: they are neither stored nor "
            "shown",
            examples=[{"HF_TOKEN": {"file": "/run/secrets/hf"}}],
        ),
    ] = {}
    preload: Annotated[
        list[Annotated[str, AfterValidator(_preloaded)]],
        Field(
            max_length=ITEMS_MAX,
            description="modules that the worker template imports ahead of time, and functions (module:function) that it calls",
            examples=[["transformers.trainer", "mypkg.data:prepare"]],
        ),
    ] = []
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


def load_job(path: Path) -> JobSpec:
    """Read a job file. Raises `InvalidSpec` with file, line, field, value and accepted values, for all mistakes."""
    document = yamlfile.read(path)
    return _build(document.data, path.resolve().parent, document.where)


def parse_job(body: Mapping[str, Any], base: Path | None = None) -> JobSpec:
    """Return the job of a REST body or of flags. Raises `InvalidSpec` for all mistakes.

    Relative paths are relative to `base` and must exist. Without a base, paths must be absolute and are not checked, because
    they are paths on the nodes, not on this machine.
    """
    return _build(body, base, lambda _: "")


def to_body(spec: JobSpec, *, policy_source: bool = True) -> dict[str, Any]:
    """Return the body from which `parse_job` returns `spec`; without `policy_source`, it lacks the text of the policy."""
    launch = spec.launch
    return {
        "name": spec.name,
        "script": launch.script,
        "module": launch.module,
        "command": launch.command,
        "args": list(launch.args),
        "cwd": launch.cwd,
        "env": dict(launch.env),
        "env_from": {
            source.name: {"file": source.file} if source.file else {"command": source.command}
            for source in launch.env_from
        },
        "preload": list(launch.preload),
        "nodes": spec.nodes,
        "nproc_per_node": spec.nproc_per_node,
        "mesh": dict(spec.mesh.dims),
        "elastic": {"min_dp": spec.min_dp, "max_dp": spec.max_dp},
        "checkpoint": _checkpoint_body(spec),
        "hang": {"floor_s": spec.hang.floor_s, "factor": spec.hang.factor, "init_s": spec.hang.init_s},
        "checks": {"replica_every_steps": spec.checks.replica_every_steps},
        "limits": {
            "prepare_timeout_s": spec.limits.prepare_timeout_s,
            "first_step_timeout_s": spec.limits.first_step_timeout_s,
            "restarts_without_progress_max": spec.limits.restarts_without_progress_max,
            "suspect_test_s": spec.limits.suspect_test_s,
        },
        "policy": policy_body(spec.policy_spec if policy_source else replace(spec.policy_spec, source="")),
        "spares": spec.spares,
        "priority": spec.priority,
        "steps": spec.steps,
        "chaos": spec.chaos,
        "warnings": {"settles_s": spec.warnings.settles_s, "gap_s": spec.warnings.gap_s},
        "pool": spec.pool,
        "report": asdict(spec.report),
    }


def policy_body(policy: PolicySpec) -> str | dict[str, Any]:
    """Return the body from which `parse_policy` returns `policy`."""
    if not (policy.source or policy.params):
        return policy.name
    body: dict[str, Any] = {"file": policy.name, "params": dict(policy.params), "source": policy.source}
    return {key: value for key, value in body.items() if value}


def parse_policy(body: object, base: Path | None = None) -> PolicySpec:
    """Return the policy of a REST body or a flag, in the form of `policy` in a job file. Raises `InvalidSpec` as `parse_job`
    does."""
    try:
        return _policy(_PolicyBody.model_validate({"policy": body}).policy, base)
    except ValidationError as error:
        raise InvalidSpecs([_problem(detail, lambda _: "") for detail in error.errors(include_url=False)]) from error


def read_policy(path: Path) -> str:
    """Return the text of a policy script. Raises `InvalidSpec`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidSpec("policy", str(path), f"a readable file ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InvalidSpec("policy", str(path), f"a Python file in UTF-8 ({error})") from error
    if not text.strip() or len(text) > POLICY_CHARS_MAX:
        raise InvalidSpec(
            "policy", str(path), f"a script of 1 to {POLICY_CHARS_MAX:,} characters; this one has {len(text):,}"
        )
    return text


def _checkpoint_body(job: JobSpec) -> dict[str, Any]:
    spec = job.checkpoint
    return {
        "interval_steps": _auto(spec.interval_steps),
        "keep": spec.keep,
        "interval_min_s": spec.interval_min_s,
        "interval_max_s": spec.interval_max_s,
        "store": spec.store,
        "store_interval_s": _auto(spec.store_interval_s),
        "store_keep": spec.store_keep,
        "resume": str(job.resume) if job.resume else "",
    }


# ---------------------------------------------------------------- model → spec

Where = Callable[[KeyPath], str]


def _build(body: Mapping[str, Any], base: Path | None, where: Where) -> JobSpec:
    _require_text(body, where)
    try:
        job = JobFile.model_validate(body)
    except ValidationError as error:
        found = [_problem(detail, where) for detail in error.errors(include_url=False)]
        raise InvalidSpecs(sorted(found, key=_line)) from error
    problems: list[InvalidSpec] = []

    def path(field: str, value: str, *, directory: bool = False, exists: bool = True) -> str:
        try:
            return _path(field, value, base, directory=directory, exists=exists) if value else ""
        except InvalidSpec as problem:
            problems.append(_located(problem, where))
            return value

    launch = LaunchSpec(
        script=path("script", job.script),
        args=tuple(job.args),
        cwd=path("cwd", job.cwd or ("" if job.script or base is None else "."), directory=True),
        env=tuple(job.env.items()),
        preload=tuple(job.preload),
        module=job.module,
        command=path("command", job.command) if "/" in job.command else job.command,
        env_from=tuple(
            EnvSource(name, path(f"env_from.{name}.file", source.file, exists=False), source.command)
            for name, source in job.env_from.items()
        ),
    )
    policy = PolicySpec()
    try:
        policy = _policy(job.policy, base)
    except InvalidSpec as problem:
        problems.append(_located(problem, where))
    try:
        spec = _spec(job, launch).with_policy(policy)
    except InvalidSpec as problem:
        problems.append(_located(problem, where))
    if problems:
        raise InvalidSpecs(problems)
    return spec


def _require_text(body: Mapping[str, Any], where: Where) -> None:
    """Raises InvalidSpec for text that is not Unicode, because YAML and JSON can contain halves of surrogate pairs."""
    seen: set[int] = set()  # a YAML alias is one value at many places
    todo: list[tuple[KeyPath, object]] = [((), body)]
    while todo:
        key, value = todo.pop()
        if isinstance(value, Mapping | list):
            if id(value) in seen:
                continue
            seen.add(id(value))
            parts = value.items() if isinstance(value, Mapping) else enumerate(value)
            for part, inner in parts:
                todo += [((*key, part), inner), (key, part)]
        elif isinstance(value, str) and not _is_encodable(value):
            expected = "Unicode text, without halves of surrogate pairs"
            shown = tuple(part if not isinstance(part, str) or _is_encodable(part) else ascii(part) for part in key)
            raise InvalidSpec(dotted(shown) or "body", ascii(value), expected, where(key))


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _policy(given: Policy, base: Path | None) -> PolicySpec:
    """Return the policy, with the text of its file if `base` is given."""
    if given.source or not given.file or given.file.startswith(POLICY_PREFIX):
        return PolicySpec(given.file, given.source, given.params)
    path = _path("policy", given.file, base)
    return PolicySpec(path, "" if base is None else read_policy(Path(path)), given.params)


def _spec(job: JobFile, launch: LaunchSpec) -> JobSpec:
    if job.nodes * job.nproc_per_node > RANKS_MAX:
        raise InvalidSpec(
            "nproc_per_node",
            job.nproc_per_node,
            f"at most {RANKS_MAX} ranks in all, not {job.nodes * job.nproc_per_node}",
        )
    mesh = Mesh.of({DATA_PARALLEL: job.nodes * job.nproc_per_node} if job.mesh is None else job.mesh)
    return JobSpec(
        name=job.name,
        launch=launch,
        nodes=job.nodes,
        nproc_per_node=job.nproc_per_node,
        mesh=mesh,
        min_dp=mesh.dp if job.elastic.min_dp is None else job.elastic.min_dp,
        max_dp=mesh.dp if job.elastic.max_dp is None else job.elastic.max_dp,
        checkpoint=_checkpoint(job.checkpoint),
        hang=HangSpec(**job.hang.model_dump()),
        limits=LimitSpec(**job.limits.model_dump()),
        checks=ChecksSpec(**job.checks.model_dump()),
        spares=job.spares,
        priority=job.priority,
        steps=job.steps,
        chaos=job.chaos,
        warnings=WarningSpec(**job.warnings.model_dump()),
        pool=job.pool,
        report=ReportSpec(**job.report.model_dump()),
        resume=parse_resume(job.checkpoint.resume) if job.checkpoint.resume else None,
    )


def _checkpoint(given: Checkpoint) -> CheckpointSpec:
    if given.interval_min_s > given.interval_max_s:
        raise InvalidSpec(
            "checkpoint.interval_min_s", given.interval_min_s, f"at most interval_max_s ({given.interval_max_s:g})"
        )
    return CheckpointSpec(**{field.name: getattr(given, field.name) for field in fields(CheckpointSpec)})


def _path(field: str, value: str, base: Path | None, *, directory: bool = False, exists: bool = True) -> str:
    """Return the absolute path, and with `base` check that it exists. Without `exists`, it may exist on the nodes only."""
    if value.startswith("~/") and not exists:
        return value  # the home directory is that of the agent's user
    if base is None:
        if not value.startswith("/"):
            raise InvalidSpec(field, value, "an absolute path: the nodes do not know your working directory")
        return value
    # Links are kept, because the interpreter of a virtual environment is a link to that of the system.
    path = Path(os.path.abspath(base / value)) if field == "command" else (base / value).resolve()
    runs = field == "script" and (path / "__main__.py").is_file()
    if exists and not (path.is_dir() if directory else path.is_file() or runs):
        kind = "directory" if directory else "file"
        raise InvalidSpec(field, value, f"an existing {kind}; {path} is not one")
    return str(path)


# ---------------------------------------------------------------- errors


def _located(problem: InvalidSpec, where: Where) -> InvalidSpec:
    key = tuple(problem.field.split("."))
    return InvalidSpec(problem.field, problem.value, problem.expected, where(key))


def _line(problem: InvalidSpec) -> int:
    return int(problem.where.rpartition(":")[2] or 0)


def _problem(detail: Any, where: Where) -> InvalidSpec:
    key: KeyPath = tuple(part for part in detail["loc"] if part != "[key]")
    value: object = detail["input"]
    match detail["type"]:
        case "missing":
            value, expected = None, "a value: it is required"
        case "extra_forbidden":
            expected = _known_keys(key)
        case _:
            expected = _expected(detail["msg"])
    return InvalidSpec(dotted(key), value, expected, where(key))


def _expected(message: str) -> str:
    """Convert pydantic's "Input should be greater than or equal to 1" to "at least 1"."""
    message = re.sub(r"^(Value error, |Input should be |\w+ should (be |have )?)", "", message)
    return message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation such as `Policy | str | None` or `dict[str, Source]`; None if it has none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model_in(each)) is not None), None)


def _known_keys(key: KeyPath) -> str:
    """Return the accepted keys, or the most similar one, for an unknown key."""
    model: type[BaseModel] = JobFile
    for part in key[:-1]:
        if (field := model.model_fields.get(str(part))) is not None:  # else the name of a variable, as in env_from
            model = _model_in(field.annotation) or model
    names = list(model.model_fields)
    near = difflib.get_close_matches(str(key[-1]), names, n=1)
    return f"a known key; did you mean {near[0]!r}?" if near else f"one of the keys {', '.join(names)}"
