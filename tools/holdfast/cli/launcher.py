"""`holdfast run` as a launcher that a scheduler may restart: by a token it finds the job that it has submitted.

The name is not enough: a job of the same name may be somebody else's. The supervisor keeps a digest of the token.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.cli.client import Client
from holdfast.cli.endings import FAILED, exit_code
from holdfast.cli.secret_file import secret_in
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.job import JobSpec
from holdfast.wire.jobfile import to_body

ENV_LAUNCHER = "HOLDFAST_LAUNCHER_TOKEN"
TOKENS = Path("~/.local/state/holdfast/launchers")  # a file per job name and API
TOKEN_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class Start:
    """How to use the existing checkpoints of the job name, and the job of this name that there may be already."""

    resume: bool = False
    fresh: bool = False
    step: int | None = None
    launcher: Launcher | None = None  # follow the job that it has submitted before


def require_one_start(*, resume: bool, fresh: bool) -> None:
    """Raises `InvalidSpec` for both."""
    if resume and fresh:
        raise InvalidSpec(
            "--fresh", True, "either --fresh or --resume: one starts at step 0, the other from a checkpoint"
        )


def submit(client: Client, spec: JobSpec, start: Start, launcher: str = "") -> None:
    client.submit(to_body(spec), resume=start.resume, fresh=start.fresh, step=start.step, launcher=launcher)


@dataclass(frozen=True, slots=True)
class Launcher:
    token: str

    @classmethod
    def of(cls, name: str, url: str) -> Launcher:
        """By the environment; otherwise by a file, which the first launcher of this job makes."""
        if given := os.environ.get(ENV_LAUNCHER, ""):
            if len(given) > TOKEN_CHARS_MAX or not given.isascii() or not given.isprintable():
                raise InvalidSpec(ENV_LAUNCHER, given, f"at most {TOKEN_CHARS_MAX} printable ASCII characters")
            return cls(given)
        path = TOKENS.expanduser() / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
        try:
            return cls(secret_in(path))
        except OSError as error:
            raise InvalidSpec(
                ENV_LAUNCHER, "", f"a token, because none can be kept in {path} ({error.strerror or error})"
            ) from error

    def submit(self, client: Client, spec: JobSpec, start: Start) -> dict[str, Any] | None:
        """Return the job that this launcher has submitted before; None = it is submitted now. Raises `Conflict` for a job of
        the same name that another launcher has submitted and that is not over."""
        found = client.attach(spec.name, self.token)
        if found is not None and not _tries_again(found, start):
            return found
        try:
            submit(client, spec, start, self.token)
        except Conflict:
            # Another launcher with this token may have been quicker. If not, the reason stands.
            if (found := client.attach(spec.name, self.token)) is None or _tries_again(found, start):
                raise
            return found
        return None


def _tries_again(job: dict[str, Any], start: Start) -> bool:
    """Whether the job has failed in a way that another attempt is worth, and such an attempt is asked for."""
    return job["phase"] == "failed" and exit_code(job) == FAILED and (start.resume or start.fresh)
