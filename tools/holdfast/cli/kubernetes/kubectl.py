"""Runs kubectl, each call with a time limit. Users have it, with their clusters, credentials and plug-ins set up."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from holdfast.domain.errors import NotFound, Unavailable

PROGRAM = "kubectl"
TIMEOUT_S = 60.0
JOBSET = "jobset.jobset.x-k8s.io"  # with its group, because another resource may have the same short name


def run(*arguments: str, context: str = "", given: str | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """Return the output of kubectl. `given`: its standard input. Raises `NotFound` if it is not installed, `Unavailable` with
    its message."""
    command = [PROGRAM, *([f"--context={context}"] if context else []), *arguments]
    try:
        done = subprocess.run(
            command,
            check=False,
            input=given or "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except FileNotFoundError:
        raise NotFound(
            f"{PROGRAM}, which submits to the cluster, is not installed: install it, or pipe `holdfast kubernetes render` to a "
            f"machine that has it (… | {PROGRAM} apply -f -)"
        ) from None
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"{PROGRAM} has not answered within {timeout_s:g} s: check that the cluster's API server answers"
        ) from None
    if done.returncode:
        raise Unavailable(f"{_shown(arguments)} failed with exit code {done.returncode}: {_message(done)}")
    return done.stdout


def _shown(arguments: Sequence[str]) -> str:
    return " ".join((PROGRAM, *arguments[:3]))


def _message(done: subprocess.CompletedProcess[str]) -> str:
    message = " ".join((done.stderr or done.stdout).split())[:500] or "no message"
    if "no matches for kind" in message or "the server doesn't have a resource type" in message:
        return f"{message}. JobSet is not installed in this cluster: https://jobset.sigs.k8s.io"
    return message


def jobset(name: str, namespace: str, context: str = "") -> dict[str, Any] | None:
    """Return a JobSet as the cluster has it; None if there is none of the name."""
    answer = run(
        "get", JOBSET, name, f"--namespace={namespace}", "--ignore-not-found", "--output=json", context=context
    )
    try:
        found = json.loads(answer) if answer.strip() else None
    except ValueError:
        raise Unavailable(f"{PROGRAM} answered with output that is not JSON: {answer[:200]!r}") from None
    return found if isinstance(found, dict) else None


def apply(documents: str, context: str = "") -> str:
    return run("apply", "--filename=-", context=context, given=documents)
