"""The job file: YAML or a REST body → `JobSpec`, and back. All mistakes are reported at once.

`job_sections` is the format. This module reads a document by it, resolves paths and builds the specification.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from pydantic import (
    ValidationError,
)

from holdfast.domain.errors import InvalidSpec, InvalidSpecs
from holdfast.domain.job import (
    CheckpointSpec,
    ChecksSpec,
    EnvSource,
    HangSpec,
    JobSpec,
    LaunchSpec,
    LimitSpec,
    PolicySpec,
    ReportSpec,
    WarningSpec,
)
from holdfast.domain.mesh import DATA_PARALLEL, Mesh
from holdfast.plugins import POLICY_PREFIX
from holdfast.wire import yamlfile
from holdfast.wire.job_errors import Where, line_of, located, problem_of
from holdfast.wire.job_fields import POLICY_CHARS_MAX, RANKS_MAX, preload_body, preloaded, shown_auto
from holdfast.wire.job_sections import Checkpoint, JobFile, Policy, Section, policy_body
from holdfast.wire.resume import parse as parse_resume
from holdfast.wire.yamlfile import KeyPath, dotted


class _PolicyBody(Section):
    policy: Policy


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
        "preload": preload_body(launch.preload),
        "nodes": spec.nodes,
        "nproc_per_node": spec.nproc_per_node,
        "mesh": dict(spec.mesh.dims),
        "elastic": {"min_dp": spec.min_dp, "max_dp": spec.max_dp},
        "checkpoint": _checkpoint_body(spec),
        "hang": {"floor_s": spec.hang.floor_s, "factor": spec.hang.factor, "init_s": spec.hang.init_s},
        "checks": {"replica_every_steps": spec.checks.replica_every_steps},
        "limits": {
            "prepare_timeout_s": spec.limits.prepare_timeout_s,
            "first_step_timeout_s": shown_auto(spec.limits.first_step_timeout_s),
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


def to_request(spec: JobSpec) -> dict[str, Any]:
    """Return a body from which `parse_job` returns `spec`, without keys that have their defaults: a supervisor of an earlier
    version rejects keys that it does not know."""
    size = {"nodes", "mesh", "elastic"}  # whose defaults depend on each other
    defaults = to_body(parse_job({"name": spec.name, "script": "/default"})) | {"name": "", "script": ""}
    return {
        key: value if key in size else _without_defaults(value, defaults[key])
        for key, value in to_body(spec).items()
        if key in size or value != defaults[key]
    }


def _without_defaults(value: Any, defaults: Any) -> Any:
    """A section without the keys that have their defaults; other values as they are."""
    if not (isinstance(value, dict) and isinstance(defaults, dict) and value.keys() == defaults.keys()):
        return value
    return {key: each for key, each in value.items() if each != defaults[key]}


def parse_policy(body: object, base: Path | None = None) -> PolicySpec:
    """Return the policy of a REST body or a flag, in the form of `policy` in a job file. Raises `InvalidSpec` as `parse_job`
    does."""
    try:
        return _policy(_PolicyBody.model_validate({"policy": body}).policy, base)
    except ValidationError as error:
        raise InvalidSpecs([problem_of(detail, lambda _: "") for detail in error.errors(include_url=False)]) from error


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
        "interval_steps": shown_auto(spec.interval_steps),
        "keep": spec.keep,
        "interval_min_s": spec.interval_min_s,
        "interval_max_s": spec.interval_max_s,
        "store": spec.store,
        "store_interval_s": shown_auto(spec.store_interval_s),
        "store_keep": spec.store_keep,
        "resume": str(job.resume) if job.resume else "",
    }


def _build(body: Mapping[str, Any], base: Path | None, where: Where) -> JobSpec:
    _require_text(body, where)
    try:
        job = JobFile.model_validate(body)
    except ValidationError as error:
        found = [problem_of(detail, where) for detail in error.errors(include_url=False)]
        raise InvalidSpecs(sorted(found, key=line_of)) from error
    problems: list[InvalidSpec] = []

    def path(field: str, value: str, *, directory: bool = False, exists: bool = True) -> str:
        try:
            return _path(field, value, base, directory=directory, exists=exists) if value else ""
        except InvalidSpec as problem:
            problems.append(located(problem, where))
            return value

    launch = LaunchSpec(
        script=path("script", job.script),
        args=tuple(job.args),
        cwd=path("cwd", job.cwd or ("" if job.script or base is None else "."), directory=True),
        env=tuple(job.env.items()),
        preload=preloaded(tuple(job.preload)),
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
        problems.append(located(problem, where))
    try:
        spec = _spec(job, launch).with_policy(policy)
    except InvalidSpec as problem:
        problems.append(located(problem, where))
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
        limits=LimitSpec(**dict(job.limits)),
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
