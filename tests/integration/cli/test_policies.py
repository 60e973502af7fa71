"""The policy travels with its job: what was submitted decides, whatever becomes of its file, until another one is set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import Shell
from training import WarmStack
from waiting import wait_until

from holdfast.cli.client import Client
from holdfast.cli.stack_options import StackOptions

TRAIN = "import time\nwhile True:\n    time.sleep(0.02)\n"
POLICY = """\
from holdfast.policy import restart


def decide(incident, job):
    return restart(f"says the {job.params['number']}")
"""
STRICT = "from holdfast.policy import stop\n\n\ndef decide(incident, job):\n    return stop('one crash is enough')\n"
TIMEOUT_S = 120.0


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[WarmStack]:
    with WarmStack(StackOptions(directory=tmp_path / "stack", nodes=1)) as stack:
        yield stack


@pytest.fixture
def shell(stack: WarmStack, tmp_path: Path) -> Shell:
    for name, text in {"train.py": TRAIN, "policy.py": POLICY, "strict.py": STRICT}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "job.yaml").write_text(
        "name: steady\nscript: train.py\npolicy: {file: policy.py, params: {number: first}}\n"
    )
    return Shell(tmp_path, stack.for_commands)


def said(shell: Shell, *arguments: str, code: int = 0) -> str:
    result = shell(*arguments)
    assert result.code == code, result
    return result.out


def crash(stack: WarmStack, number: int) -> dict[str, Any]:
    """Kill the worker; the job's incident of this number as it was resolved."""

    def pid() -> int | None:
        with Client(stack.api_url) as client:
            job = client.job("steady")
        return next((each["pid"] for each in job["ranks"] if each["pid"]), None) if job["phase"] == "running" else None

    def resolved() -> dict[str, Any] | None:
        with Client(stack.api_url) as client:
            incidents = list(client.incidents(job="steady"))
        closed = len(incidents) == number and incidents[0]["state"] == "resolved"
        return incidents[0] if closed else None

    psutil.Process(wait_until(pid, description="a running worker", timeout_s=TIMEOUT_S)).kill()
    return wait_until(resolved, description="the incident to be resolved", timeout_s=TIMEOUT_S)


def test_the_policy_that_was_submitted_decides_until_another_one_is_set(
    stack: WarmStack, shell: Shell, tmp_path: Path
) -> None:
    said(shell, "run", "--detach", "job.yaml")
    (tmp_path / "policy.py").unlink()
    first = crash(stack, 1)
    assert first["action"]["reason"] == "says the first"
    assert first["decided_by"] == str(tmp_path / "policy.py")

    # It is shown although its file is gone, with what it has decided.
    assert said(shell, "policy", "show", "steady", "--text") == POLICY
    assert "says the first" not in said(shell, "policy", "show", "steady")
    said(shell, "policy", "export", "steady", "--out", "questions.jsonl")

    # Another one is tried on the incident that was, with the supervisor and without.
    for source in (("--job", "steady"), ("--from", "questions.jsonl")):
        table = said(shell, "policy", "test", "strict.py", *source)
        assert first["id"] in table
        assert "one crash is enough" in table
        assert "1 would have been decided differently" in table

    # It is set when it was confirmed, and not before.
    (tmp_path / "policy.py").write_text(POLICY)
    change = ("policy", "set", "steady", "policy.py", "--param", "number=second")
    assert "Let " in said(shell, *change, code=1)
    assert "number first" in said(shell, "policy", "show", "steady")
    assert "the same decisions" in said(shell, *change, "--yes")
    shown = said(shell, "policy", "show", "steady")
    assert "number second" in shown
    assert "before" in shown
    assert crash(stack, 2)["action"]["reason"] == "says the second"

    # One that fails is refused, and the other goes on deciding.
    refused = shell("policy", "set", "steady", "policy.py", "--yes")
    assert refused.code == 2
    assert "KeyError: 'number'" in refused.err
    assert "number second" in said(shell, "policy", "show", "steady")
