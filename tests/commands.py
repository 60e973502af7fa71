"""The real command in a process of its own, and what it leaves behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from leftovers import MARK, marked
from ports import NO_LOCAL_API
from waiting import wait_until
from warm_processes import COMMANDS, STACK, warm

MEMORY = Path("/dev/shm")
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Shell:
    """Types commands in `directory`. Everything that they start carries our mark, wherever it is in the process tree."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    view: tuple[str, ...] = ()  # that the forks have of the file system, as for `warm`

    def __call__(self, *arguments: str, timeout_s: float = TIMEOUT_S) -> Result:
        what, command = _warm(arguments)
        return Result(*warm(what, self.view)(command, self.directory, self._environment(), timeout_s))

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        scratch = self.directory / "tmp"
        scratch.mkdir(exist_ok=True)
        return {
            **inherited,
            **NO_LOCAL_API,
            MARK: self.mark,
            "TMPDIR": str(scratch),
            "HOME": str(scratch),
            "COLUMNS": "120",
            **self.environment,
        }

    @contextmanager
    def start(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A command that is killed when the block is left before its end: a fork, and so is each process of its stack."""
        what, command = _warm(arguments)
        with warm(what, self.view).command(command, self.directory, self._environment()) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    @contextmanager
    def start_python(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A new interpreter, killed when the block is left before its end."""
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def processes(self) -> list[psutil.Process]:
        return marked(self.mark)

    def assert_nothing_runs(self) -> None:
        wait_until(lambda: not self.processes(), description="every process of the command to be gone")


def _warm(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Of what the command is a fork, and the arguments of that."""
    if arguments[0] in ("up", "demo") or (arguments[0] == "run" and "--local" in arguments):
        return STACK, ("holdfast.cli.main", *arguments)
    return COMMANDS, arguments


def refused(result: Result, *parts: str) -> None:
    """Exit code 2 and one clear error that holds every part; no traceback, and rich's frame does not count as text."""
    said = " ".join(result.err.replace("│", " ").split())
    assert result.code == 2, f"exit code {result.code}\n{result.out}\n{result.err}"
    assert "Traceback" not in result.err + result.out, result.err
    for part in parts:
        assert part in said, f"{part!r} is not in: {said}"


def read_until(process: subprocess.Popen[str], pattern: str, *, errors: bool = False) -> re.Match[str]:
    """Read the command's output, or its `errors`, up to a line; its end, or the test's time limit, ends the wait."""
    stream = process.stderr if errors else process.stdout
    assert stream is not None
    read = ""
    for line in stream:
        read += line
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"{pattern!r} never came; output:\n{read}")
