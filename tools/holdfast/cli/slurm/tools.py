"""Runs Slurm's commands, each with a time limit, because a controller that hangs must not stop a training run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from holdfast.domain.errors import NotFound, Unavailable

TIMEOUT_S = 20.0


def run(*command: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return the output of a command of Slurm. Raises `NotFound` if it is not installed, `Unavailable` with its message."""
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except FileNotFoundError:
        raise NotFound(f"{command[0]} is not installed: this is not a machine of a Slurm cluster") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} has not answered within {timeout_s:g} s: is slurmctld running?") from None
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())[:500]
        raise Unavailable(f"{command[0]} failed with exit code {done.returncode}: {message or 'no message'}")
    return done.stdout


def submit(script: str, timeout_s: float = TIMEOUT_S) -> str:
    """Submit a script by its path. Returns the id of the Slurm job."""
    found = re.match(r"(\d+)", answer := run("sbatch", "--parsable", script, timeout_s=timeout_s))
    if found is None:
        raise Unavailable(f"sbatch answered without a job's number: {answer[:200]!r}")
    return found[1]


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node as sinfo shows it. `state` is in lower case, without the suffixes for nodes that do not answer or save power."""

    node: str
    state: str
    reason: str


def node_states(nodelist: str) -> list[NodeState]:
    """Return the states of nodes. `nodelist` is in Slurm's short form, n[0-3,7]."""
    # the reason is the last field, since it may contain any text
    return parse_states(run("sinfo", "-h", "-N", "-n", nodelist, "-o", "%N|%T|%E"))


def parse_states(output: str) -> list[NodeState]:
    found: dict[str, NodeState] = {}  # a node has a line per partition
    for line in output.splitlines():
        match line.split("|", 2):
            case [node, state, reason] if node.strip():
                cleaned = re.sub(r"[^a-z+]", "", state.lower())
                found[node.strip()] = NodeState(
                    node.strip(), cleaned, "" if reason.strip() == "none" else reason.strip()
                )
            case _:
                continue
    return list(found.values())


def ends_at(job: str) -> float | None:
    """Return the allocation's time limit as Unix time; None if it has no limit."""
    found = re.search(r"\bEndTime=(\S+)", run("scontrol", "-o", "show", "job", job))
    try:
        return None if found is None else datetime.fromisoformat(found[1]).timestamp()
    except ValueError:
        return None


def states(jobs: Sequence[str]) -> dict[str, str]:
    """Return the state of each queued or running job, such as PENDING. Other jobs are missing."""
    shown = run("squeue", "-h", "-a", "--me", "-o", "%i %T")
    found = dict(line.split(None, 1) for line in shown.splitlines() if len(line.split(None, 1)) == 2)
    return {job: found[job].strip() for job in jobs if job in found}


def cancel(jobs: Sequence[str]) -> None:
    run("scancel", *jobs)


def tell(job: str, signal_name: str) -> None:
    """Send a signal to the process of the batch script, and to no other process of the job."""
    run("scancel", "--batch", f"--signal={signal_name}", job)


def script_of(job: str) -> str:
    return run("scontrol", "write", "batch_script", job, "-")
