"""The batch script of an allocation. Pure: `render` creates it, `doubts` checks a script that a user may have changed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.domain.errors import InvalidSpec

TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")
LEAST_S = 60  # minimum time for training in an allocation
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Options that `render` sets and users must not override. The consequences would show too late: an allocation that ends with its
# first lost node, or processes that are killed instead of notified.
OURS = frozenset(
    {
        *("job-name", "J", "nodes", "N", "ntasks-per-node", "time", "t", "output", "o", "chdir", "D"),
        *("no-kill", "k", "no-requeue", "requeue", "signal", "dependency", "d", "array", "a", "ntasks", "n"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The requested allocation. `notice_s`: how long before the time limit Slurm signals the allocation; Slurm adds up to a
    minute. `command`: the command that the batch node runs."""

    name: str
    nodes: int
    time: str
    notice_s: int
    directory: Path
    exclusive: bool
    options: Sequence[str]
    command: Sequence[str]


def render(asked: Allocation) -> str:
    """Return the script. Raises `InvalidSpec`."""
    if _NAME.fullmatch(asked.name) is None:
        raise InvalidSpec("name", asked.name, "a name of letters, digits, '.', '_' and '-'")
    if TIME.fullmatch(asked.time) is None:
        raise InvalidSpec("--time", asked.time, "minutes, MM:SS, HH:MM:SS or D-HH:MM:SS, as Slurm takes them")
    if (limit_s := seconds(asked.time)) < asked.notice_s + LEAST_S:
        raise InvalidSpec(
            "--time",
            asked.time,
            f"a longer time: this is {limit_s:.0f} s, of which the last {asked.notice_s} s are for saving (--notice). A number "
            "without a colon is in minutes",
        )
    if any(character in str(asked.directory) for character in "\n%"):
        raise InvalidSpec("--dir", str(asked.directory), "a path without % and line breaks, which Slurm would replace")
    refuse_ours(asked.options)
    lines = [
        f"--job-name={asked.name}",
        f"--nodes={asked.nodes}",
        "--ntasks-per-node=1",
        f"--time={asked.time}",
        *(["--exclusive"] if asked.exclusive else []),
        "--no-kill",
        "--no-requeue",
        f"--signal=B:USR1@{asked.notice_s}",
        "--dependency=singleton",
        f"--output={asked.directory}/slurm-%j.out",
        *asked.options,
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "",
            "# --no-kill: the allocation survives lost nodes. --no-requeue: Slurm does not start it again from its beginning.",
            "# B: only the process below gets the signal before the time limit. singleton: the next allocation waits for it.",
            "trap '' USR1 USR2  # until the command below handles them",
            f"exec {shlex.join(asked.command)}",
            "",
        ]
    )


def seconds(limit: str) -> float:
    """Return the seconds of a time limit in Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    scale = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, scale, strict=False))


def refuse_ours(options: Sequence[str]) -> None:
    """Raises `InvalidSpec` for an option that the script sets itself, or that is not a single option of sbatch."""
    for option in options:
        found = re.fullmatch(r"--([a-z0-9-]+)(=[^\n]*)?|-([A-Za-z])([^\n]*)", option)
        if found is None:
            raise InvalidSpec("options", option, "options of sbatch after --, each as --name=value")
        if (name := found[1] or found[3]) in OURS:
            raise InvalidSpec("options", option, f"other options of sbatch: holdfast slurm submit sets --{name} itself")


def doubts(script: str) -> list[str]:
    """Return the settings of a batch script that endanger the run, each with a fix. Options on sbatch's command line are not
    checked."""
    options = [line.removeprefix("#SBATCH").strip() for line in script.splitlines() if line.startswith("#SBATCH")]
    found = []
    if not any(re.match(r"(--no-kill|-k)\b", option) for option in options):
        found.append("without --no-kill, Slurm ends the whole allocation with the first node that fails: add it")
    if not any(option.startswith("--no-requeue") for option in options):
        found.append("without --no-requeue, Slurm may start the allocation again from its beginning: add it")
    signals = [option.partition("=")[2] for option in options if option.startswith("--signal")]
    if not signals:
        found.append(
            "without --signal=B:USR1@600, only SIGTERM to its agents announces the end of the job's time: add it"
        )
    elif not re.match(r"[BR]*B[BR]*:", signals[-1]):
        found.append(f"--signal={signals[-1]} goes to all processes of the job's steps: add B: (--signal=B:USR1@600)")
    return found
