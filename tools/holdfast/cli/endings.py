"""Exit codes of commands, and the message of an expected error.

Schedulers decide by the exit code of `holdfast run` whether to submit a job again. The codes are those of sysexits.h; the code
of a job that should not be started again is that of NVIDIA's launchers for Slurm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from holdfast.cli.terminal import Terminal
from holdfast.domain.errors import HoldfastError

COMPLETED = 0
FAILED = 1  # another attempt may succeed
USAGE_ERROR = 2
UNAVAILABLE = 69  # EX_UNAVAILABLE: no supervisor answers; the state of the job is unknown
SUSPENDED = 75  # EX_TEMPFAIL: all nodes of the job ended; the job continues when there are nodes again
DO_NOT_RESTART = 93  # another attempt would fail in the same way, or an operator stopped the job
SIGNALLED = 128  # + the signal's number, as a shell has it

ENDED = frozenset({"completed", "stopped", "failed"})  # phases of a finished job


def exit_code(job: Mapping[str, Any]) -> int:
    """Return the exit code for a finished or suspended job."""
    match job["phase"]:
        case "completed":
            return COMPLETED
        case "suspended":
            return SUSPENDED
        case "stopped":
            return DO_NOT_RESTART
        case _:  # a supervisor of an earlier version gives no details of a failure
            return DO_NOT_RESTART if job.get("permanent_failure") else FAILED


def show_error(error: HoldfastError) -> None:
    # as text, not markup: rich would read `:100:` and `[lists]` in messages as emoji and styles
    message = Text.assemble(("error:", "bold red"), f" {error}")
    Terminal(stderr=True, highlight=False).print(message, soft_wrap=True)
