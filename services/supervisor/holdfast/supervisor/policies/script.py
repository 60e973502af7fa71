"""A user's policy script, run in a process of its own so that it can be killed. Blocking: call it from a worker thread.

The process stays warm between questions (an answer takes about a millisecond) and is restarted after an overrun. Every failure
raises `PolicyError`, and the caller lets the default policy decide.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from holdfast.domain.errors import MalformedMessage, PolicyError
from holdfast.domain.findings import FindingKind, Severity
from holdfast.domain.incidents import LOAN, MAINTENANCE, REPAIR, Action, Incident, IncidentState, LoanRequest
from holdfast.domain.job import Param, PolicySpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import Notice
from holdfast.policy import JobView, check
from holdfast.runtime.processes.readable import readable
from holdfast.supervisor.policies import sandbox
from holdfast.wire import records

DEADLINE_S = 1.0
LOAD_DEADLINE_S = 10.0  # a fresh interpreter and the script's own imports
ANSWER_BYTES_MAX = 65_536
_ONLY_WARNINGS = frozenset(  # the job runs on
    {
        FindingKind.CHECKPOINT,
        FindingKind.DEGRADATION,
        FindingKind.HOST_OOM,
        FindingKind.IMBALANCE,
        FindingKind.KERNEL_STALL,
        FindingKind.NETWORK_FAULT,
        FindingKind.NO_PROGRESS,
        FindingKind.PREFLIGHT,
        FindingKind.SLOW_COLLECTIVE,
        FindingKind.STORAGE_FAULT,
        FindingKind.STRAGGLER,
    }
)
LATE_MAX = 2  # late answers of one script after which `try_script` stops asking it


@dataclass(frozen=True, slots=True)
class Question:
    """The message to the script's process."""

    incident: Incident
    job: JobView


class PolicyLate(PolicyError):
    """The script did not answer in time."""


class PolicyScript:
    """`decide` of one script, or of a plug-in (`plugin:NAME`). Use as a context manager, or call `close`."""

    def __init__(self, policy: PolicySpec, *, deadline_s: float = DEADLINE_S) -> None:
        """`policy` without a text: that of the named file, read when the process starts."""
        self.path = policy.name
        self._source = policy.source
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    def load(self) -> None:
        """Start the script's process unless it runs. Raises `PolicyError` with file and line."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        # -P: the script's directory must not shadow modules.
        command = [sys.executable, "-P", "-m", "holdfast.supervisor.policies.host", self.path]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=sandbox.environment(os.environ)
        )
        try:
            self._write(json.dumps(self._source).encode())
            self._answer(LOAD_DEADLINE_S, "importing it")
        except PolicyError:
            self.close()
            raise

    def decide(self, incident: Incident, job: JobView) -> Action:
        """The script's answer. Raises `PolicyError` if it raised, exceeded its deadline, or returned no Action."""
        self.load()
        self._write(records.dumps(Question(incident, job), Question))
        raw = self._answer(self._deadline_s, "decide()")
        try:
            return records.loads(raw, Action)
        except MalformedMessage as error:
            raise PolicyError(f"{self.path}: decide() answered no valid Action: {error}") from error

    def _write(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        rest = memoryview(line + b"\n")
        try:
            while rest:  # unbuffered: a long line may be written in parts
                rest = rest[self._process.stdin.write(rest) or 0 :]
        except OSError as error:
            self.close()
            raise PolicyError(f"{self.path}: its process ended ({error})") from error

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, deadline_s: float, what: str) -> bytes:
        """One line from the process: `{"ok": …}` or `{"error": "…"}`. Kills the process if it is late or ends."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        end = time.monotonic() + deadline_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = end - time.monotonic()
            if left_s <= 0 or not readable(process.stdout, left_s):
                self.close()
                raise PolicyLate(f"{self.path}: {what} took longer than {deadline_s:g} s and was stopped")
            chunk = os.read(process.stdout.fileno(), ANSWER_BYTES_MAX)
            line += chunk
            if not chunk or len(line) > ANSWER_BYTES_MAX:
                self.close()
                ended = "its process ended" if not chunk else f"the answer is longer than {ANSWER_BYTES_MAX} bytes"
                raise PolicyError(f"{self.path}: {what}: {ended}")
        try:  # the script can write to this pipe, too
            answer = json.loads(line)
            if "error" in answer:
                raise PolicyError(str(answer["error"]))
            return json.dumps(answer["ok"]).encode()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self.close()
            raise PolicyError(f"{self.path}: {what}: its process wrote no answer but {line[:100]!r}") from error


def ask_samples(script: PolicyScript, params: Mapping[str, Param]) -> None:
    """Raises `PolicyError` unless the script loads and answers a sample of every kind of incident."""
    script.load()
    for incident, job in _samples(params):
        script.decide(incident, job)


def _samples(params: Mapping[str, Param]) -> Iterator[tuple[Incident, JobView]]:
    for incident in sample_incidents():
        yield incident, replace(sample_job(incident), params=params)


# ---------------------------------------------------------------- holdfast policy check


@dataclass(frozen=True, slots=True)
class Trial:
    """A script's answer to one kind of incident. `problem` is empty if the answer could be carried out."""

    kind: str
    action: Action | None
    problem: str


def try_script(policy: PolicySpec, *, deadline_s: float = DEADLINE_S) -> tuple[Trial, ...]:
    """Load a policy and ask it about one incident of every kind. Raises `PolicyError` if it does not load."""
    trials: list[Trial] = []
    late = 0
    with PolicyScript(policy, deadline_s=deadline_s) as script:
        script.load()
        for incident, job in _samples(policy.params):
            if late >= LATE_MAX:
                trials.append(Trial(incident.kind, None, f"not asked: it gave no answer in time {late} times"))
                continue
            try:
                action = script.decide(incident, job)
            except PolicyError as error:
                late += isinstance(error, PolicyLate)
                trials.append(Trial(incident.kind, None, str(error)))
            else:
                trials.append(Trial(incident.kind, action, check(action, incident, job)))
    return tuple(trials)


def sample_incidents() -> tuple[Incident, ...]:
    """One incident of each kind, as a script may receive it."""
    kinds = [kind for kind in FindingKind if kind is not FindingKind.HOST_PRESSURE]
    return tuple(
        Incident(
            id=f"sample-{kind}",
            job="sample",
            kind=kind,
            cause=f"a sample {kind}",
            state=IncidentState.OPEN,
            generation=1,
            findings=("sample",),
            node="" if kind in (REPAIR, LOAN) else "n1",
            rank=None if kind in (REPAIR, LOAN, FindingKind.NODE_LOST, FindingKind.GPU_ERROR) else 1,
            gpu=0 if kind == FindingKind.GPU_ERROR else None,
            fault_at=1000.0,
            detected_at=1000.1,
            last_step=42,
            severity=_severity(kind),
            cost_share=0.1 if kind == FindingKind.STRAGGLER else None,
            loan=LoanRequest("urgent", 10, 2, ("n2",)) if kind == LOAN else None,
        )
        for kind in (*kinds, REPAIR, LOAN)
    )


def _severity(kind: str) -> Severity:
    if kind == FindingKind.GPU_ERROR:
        return Severity.FATAL
    return Severity.WARNING if kind in _ONLY_WARNINGS else Severity.ERROR


def sample_job(incident: Incident) -> JobView:
    """Three replicas of one node and a spare. The node is unusable if the incident implies it. Before a repair, two run."""
    lost = incident.kind in (FindingKind.NODE_LOST, FindingKind.GPU_ERROR)
    dp = 2 if incident.kind == REPAIR else 3
    return JobView(
        at=1000.2,
        name="sample",
        mesh=Mesh.of({"dp": dp}),
        target_dp=3,
        min_dp=1,
        max_dp=4,
        generation=1,
        nodes=tuple(f"n{slot}" for slot in range(dp)),
        unusable=(incident.node,) if lost else (),
        spares=("n9",),
        reachable_dp=3,
        step=42,
        checkpoint_step=40,
        checkpoint_interval_steps=10,
        remaining_s=86_400.0,
        change_s=10.0,
        notices={incident.node: Notice("file", "reboot", 1000.0, 4600.0)} if incident.kind == MAINTENANCE else {},
    )
