"""Prepares a job file for a cluster: checks it, adds the text of its policy, and sets a pool for the job.

The script, the working directory and the data are in the container image, or on a volume. Their paths are absolute and are not
checked on this machine. A policy is a file of this machine, which is sent with the job file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from holdfast.domain.errors import InvalidSpec, InvalidSpecs
from holdfast.domain.job import JobSpec
from holdfast.plugins import POLICY_PREFIX
from holdfast.wire import yamlfile
from holdfast.wire.jobfile import parse_job, read_policy

JOB_KEY, POLICY_KEY = "job.yaml", "policy.py"  # of the ConfigMap, which the launcher sees as a directory


@dataclass(frozen=True, slots=True)
class JobSource:
    """A checked job file. `files`: contents of the ConfigMap by key."""

    spec: JobSpec
    files: Mapping[str, str]


def load(path: Path) -> JobSource:
    """Read a job file for a cluster. Raises `InvalidSpec` with file, line, field, value and the accepted values."""
    document = yamlfile.read(path)
    body = dict(document.data)
    files: dict[str, str] = {}
    try:
        text, carried = _policy(body.get("policy"), path.resolve().parent)
        spec = parse_job({**body, **({"policy": carried} if carried is not None else {})})
    except InvalidSpec as error:
        problems = error.problems if isinstance(error, InvalidSpecs) else (error,)
        raise InvalidSpecs([_located(problem, document) for problem in problems]) from error
    if text:
        files[POLICY_KEY] = text
        body["policy"] = _renamed(body["policy"])
    # Nodes that were created for this job are used by no other job, and this job uses no other nodes.
    pool = spec.pool or spec.name
    body["pool"] = pool
    files[JOB_KEY] = yaml.safe_dump(body, sort_keys=False, allow_unicode=True)
    return JobSource(replace(spec, pool=pool), dict(sorted(files.items())))


def _policy(given: object, base: Path) -> tuple[str, object]:
    """Return the policy's text, and the policy in a form that can be checked without its file; no text if the policy has no
    file on this machine."""
    file = given.get("file", "") if isinstance(given, Mapping) else given
    if not isinstance(file, str) or not file or file.startswith(POLICY_PREFIX):
        return "", None
    if isinstance(given, Mapping) and given.get("source"):
        return "", None
    path = (base / file).resolve()
    if not path.is_file():
        raise InvalidSpec("policy", file, f"an existing file of this machine, which is sent along; {path} is not one")
    text = read_policy(path)
    return text, {**given, "file": str(path)} if isinstance(given, Mapping) else str(path)


def _renamed(given: object) -> object:
    return {**given, "file": POLICY_KEY} if isinstance(given, Mapping) else POLICY_KEY


def _located(problem: InvalidSpec, document: yamlfile.Document) -> InvalidSpec:
    expected = problem.expected
    if problem.field in ("script", "cwd") and "absolute path" in expected:
        expected = "an absolute path in the container image, or on a volume (--claim)"
    where = document.where(tuple(problem.field.split(".")))
    return InvalidSpec(problem.field, problem.value, expected, where)
