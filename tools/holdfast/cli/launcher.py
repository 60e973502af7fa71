"""`holdfast run` as a launcher that a scheduler may restart. A token identifies the job that the launcher has submitted.

The job's name is not sufficient, because another user may have a job of the same name. The supervisor stores a digest of the
token.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.client import Client
from holdfast.cli.endings import FAILED, exit_code
from holdfast.cli.secret_file import secret_in
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.job import JobSpec
from holdfast.wire.jobfile import parse_job, to_body, to_request

ENV_LAUNCHER = "HOLDFAST_LAUNCHER_TOKEN"
Resume = Annotated[bool, typer.Option("--resume", help="Start from the newest complete checkpoint of this job name.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start at step 0. Existing checkpoints of the name are retained.")]
TOKENS = Path("~/.local/state/holdfast/launchers")  # a file per job name and API
TOKEN_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class Start:
    """How to use existing checkpoints and an existing job of the same name."""

    resume: bool = False
    fresh: bool = False
    step: int | None = None
    launcher: Launcher | None = None  # follow the job that this launcher has submitted before


def require_one_start(*, resume: bool, fresh: bool) -> None:
    """Raises `InvalidSpec` if both are set."""
    if resume and fresh:
        raise InvalidSpec(
            "--fresh", True, "either --fresh or --resume: one starts at step 0, the other from a checkpoint"
        )


def chosen_start(*, resume: bool, fresh: bool) -> str:
    """Return how the options say that a run begins: "resume", "fresh" or nothing. Raises `InvalidSpec` if both are set."""
    require_one_start(resume=resume, fresh=fresh)
    return "resume" if resume else "fresh" if fresh else ""


def submit(client: Client, spec: JobSpec, start: Start, launcher: str = "") -> None:
    client.submit(to_request(spec), resume=start.resume, fresh=start.fresh, step=start.step, launcher=launcher)


@dataclass(frozen=True, slots=True)
class Launcher:
    token: str

    @classmethod
    def of(cls, name: str, url: str) -> Launcher:
        """Return the launcher with the token of the environment; otherwise that of a file, which the job's first launcher
        creates."""
        if given := os.environ.get(ENV_LAUNCHER, ""):
            if len(given) > TOKEN_CHARS_MAX or not given.isascii() or not given.isprintable():
                raise InvalidSpec(ENV_LAUNCHER, given, f"at most {TOKEN_CHARS_MAX} printable ASCII characters")
            return cls(given)
        path = TOKENS.expanduser() / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
        try:
            return cls(secret_in(path))
        except OSError as error:
            raise InvalidSpec(
                ENV_LAUNCHER, "", f"a token, because no token can be stored in {path} ({error.strerror or error})"
            ) from error

    def submit(self, client: Client, spec: JobSpec, start: Start) -> dict[str, Any] | None:
        """Return the job that this launcher has submitted before; None = it is submitted now. Raises `Conflict` if another
        launcher has submitted an unfinished job of the same name."""
        found = client.attach(spec.name, self.token)
        if found is not None and not _tries_again(found, start):
            return found
        try:
            submit(client, spec, start, self.token)
        except Conflict:
            # Another launcher with this token may have submitted the job meanwhile. If not, raise the first error.
            if (found := client.attach(spec.name, self.token)) is None or _tries_again(found, start):
                raise
            return found
        return None


def _tries_again(job: dict[str, Any], start: Start) -> bool:
    """Whether another attempt is requested, and the job has failed in a way that another attempt may fix."""
    return job["phase"] == "failed" and exit_code(job) == FAILED and (start.resume or start.fresh)


def start_options(found: Mapping[str, Any] | None, start: str, has_checkpoints: Callable[[], bool]) -> list[str]:
    """Return the options of `holdfast run`. `found`: the job that this launcher has submitted before; None = none yet. `start`:
    how the first submission uses checkpoints of the job's name: "resume", "fresh" or nothing."""
    if found is None:
        return [f"--{start}"] if start else []
    if found["phase"] != "failed" or exit_code(found) != FAILED:
        return []
    # Without any checkpoint, the failed run began at step 0, and so does the next one.
    began_anew = not found["checkpoint_step"] and found["goes_on_from"] is None and not has_checkpoints()
    return ["--fresh" if began_anew else "--resume"]


def changed_keys(job: Mapping[str, Any], spec: JobSpec) -> list[str]:
    """Return the keys of the job file in which `spec` differs from the job that was submitted. The policy and the checkpoint
    that it started from are not compared: the supervisor completes one and drops the other."""
    before = parse_job({key: value for key, value in job["spec"].items() if key != "policy"})
    submitted, given = to_body(before), to_body(replace(spec, resume=before.resume))
    return [key for key, value in given.items() if key != "policy" and submitted[key] != value]
