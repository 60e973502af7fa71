"""Determines how a worker's program is started: from the worker template, if it is Python of this environment, or by exec.

Two kinds of programs count as Python of this environment: a console script, whose first line names this environment's
interpreter, and the interpreter itself with a script or `-m`. Any other program replaces the forked process (exec). This works
in the same way, but each start takes as long as the program's own imports."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.job import LaunchSpec
from holdfast.domain.template import MODULE, PROGRAM, SCRIPT

_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """The fields of a fork request: `kind` is a constant of `domain.template`, `target` a path or the name of a module."""

    kind: str
    target: str
    args: tuple[str, ...]
    cwd: str
    note: str = ""  # for the user: why the program does not start from the template


def entry_of(launch: LaunchSpec, environment: Mapping[str, str]) -> Entry:
    """Raises `InvalidSpec` if the program or the directory is not on this node. `environment`: that of the worker."""
    if launch.cwd and not Path(launch.cwd).is_dir():
        raise InvalidSpec("cwd", launch.cwd, "a directory that exists on this node")
    if launch.module:
        return Entry(MODULE, launch.module, launch.args, launch.cwd)
    if launch.command:
        return _of_command(launch, environment.get("PATH", os.defpath))
    if not Path(launch.script).is_file() and not Path(launch.script, "__main__.py").is_file():
        raise InvalidSpec("script", launch.script, "a file that exists on this node")
    return Entry(SCRIPT, launch.script, launch.args, launch.cwd)


def _of_command(launch: LaunchSpec, path: str) -> Entry:
    program = shutil.which(launch.command, path=path)
    if program is None:
        raise InvalidSpec("command", launch.command, "a program that exists on this node and may be executed")
    program = os.path.abspath(program)
    cwd = launch.cwd
    if _is_own_python(program) and (warm := _of_python(launch.args, cwd)) is not None:
        return warm
    if (interpreter := _interpreter_of(program, path)) and _is_own_python(interpreter):
        return Entry(SCRIPT, program, launch.args, cwd or os.getcwd())
    why = f"{launch.command} is not a Python program of {os.path.dirname(sys.executable)}"
    return Entry(
        PROGRAM, program, launch.args, cwd, f"{why}: it starts without the worker template, with all of its imports"
    )


def _of_python(args: tuple[str, ...], cwd: str) -> Entry | None:
    """Return the entry of `python [-u] script.py …` or `python [-u] -m module …`; None for other options."""
    rest = list(args)
    while rest[:1] == ["-u"]:  # the output of a worker is never buffered
        rest.pop(0)
    match rest:
        case ["-m", module, *more]:
            return Entry(MODULE, module, tuple(more), cwd)
        case [script, *more] if not script.startswith("-"):
            path = os.path.abspath(os.path.join(cwd, script))
            return Entry(SCRIPT, path, tuple(more), cwd or os.getcwd()) if os.path.isfile(path) else None
    return None


def _is_own_python(program: str) -> bool:
    """Whether `program` is this environment's interpreter, under any of its names. The directory is compared as well, because
    other environments may link to the same file."""
    return os.path.dirname(program) == os.path.dirname(os.path.abspath(sys.executable)) and os.path.realpath(
        program
    ) == os.path.realpath(sys.executable)


def _interpreter_of(program: str, path: str) -> str:
    """Return the absolute path of the interpreter in a script's first line; "" if there is none, or if it has options."""
    try:
        with open(program, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:  # the file may be executable but not readable
        return ""
    if not head.startswith(b"#!"):
        return ""
    first, _, rest = head[2:].decode(errors="replace").partition("\n")
    match first.split():
        case [interpreter]:
            if os.path.basename(interpreter) != "sh":
                return os.path.abspath(interpreter)
            # If the interpreter's path is too long for a first line, installers write this form.
            try:
                match shlex.split(rest.partition("\n")[0]):
                    case ["exec", interpreter, "$0", "$@"]:
                        return interpreter
            except ValueError:
                pass
            return ""
        case [env, name] if os.path.basename(env) == "env":
            return os.path.abspath(shutil.which(name, path=path) or name)
    return ""
