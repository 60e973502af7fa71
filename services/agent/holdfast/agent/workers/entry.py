"""What a worker's program is: Python of this environment, which a worker template can run, or another program.

A console script of this environment is Python: a file whose first line names this environment's interpreter. So is the
interpreter itself with a script or `-m`. Everything else replaces the forked process by a new one: that works in the same way,
but each start takes as long as the program's own imports."""

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
    """What to say to the template: `kind` is one of `domain.template`, `target` a path or a module's name."""

    kind: str
    target: str
    args: tuple[str, ...]
    cwd: str
    note: str = ""  # for the user: why it does not start from the template


def entry_of(launch: LaunchSpec, environment: Mapping[str, str]) -> Entry:
    """Raises `InvalidSpec` when what is to be run is not on this node. `environment`: the worker's."""
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
    why = f"{launch.command} is no Python program of {os.path.dirname(sys.executable)}"
    return Entry(
        PROGRAM, program, launch.args, cwd, f"{why}: it starts without the worker template, with all of its imports"
    )


def _of_python(args: tuple[str, ...], cwd: str) -> Entry | None:
    """`python [-u] script.py …` and `python [-u] -m module …`; None for other options."""
    rest = list(args)
    while rest[:1] == ["-u"]:  # the output of a worker is not held back anyway
        rest.pop(0)
    match rest:
        case ["-m", module, *more]:
            return Entry(MODULE, module, tuple(more), cwd)
        case [script, *more] if not script.startswith("-"):
            path = os.path.abspath(os.path.join(cwd, script))
            return Entry(SCRIPT, path, tuple(more), cwd or os.getcwd()) if os.path.isfile(path) else None
    return None


def _is_own_python(program: str) -> bool:
    """Whether it is this environment's interpreter, under any of its names. Another environment has the same file elsewhere."""
    return os.path.dirname(program) == os.path.dirname(os.path.abspath(sys.executable)) and os.path.realpath(
        program
    ) == os.path.realpath(sys.executable)


def _interpreter_of(program: str, path: str) -> str:
    """The interpreter that the first line of a script names, as an absolute path; empty if there is none, or with options."""
    try:
        with open(program, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:  # it may be executed and not read
        return ""
    if not head.startswith(b"#!"):
        return ""
    first, _, rest = head[2:].decode(errors="replace").partition("\n")
    match first.split():
        case [interpreter]:
            if os.path.basename(interpreter) != "sh":
                return os.path.abspath(interpreter)
            # A path that is too long for a first line: installers write these lines instead.
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
