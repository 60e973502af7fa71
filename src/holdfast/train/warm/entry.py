"""What a worker runs, as `python script.py`, `python -m module` or the shell would start it.

A script may also be a directory or an archive with a `__main__.py`. A program that is not Python replaces the process: the pid,
the parent and the descriptors stay, so that the agent stops it and reports its end as it does for every worker."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from holdfast.domain.template import MODULE, PROGRAM

ARCHIVES = (".zip", ".pyz")


@dataclass(frozen=True, slots=True)
class Entry:
    """`kind` is one of `domain.template`; `target` a path, or of a module its dotted name."""

    kind: str
    target: str
    args: tuple[str, ...]
    cwd: str  # empty = the script's directory; of a module or program, where this process is

    def run(self) -> None:
        """Run the script or module to its end, and pass on its exceptions. A program replaces this process: no return."""
        if self.kind == PROGRAM:
            self._replace_process()
        spec, code = self._module() if self.kind == MODULE else self._script()
        # A new module that stays in `sys.modules`, so that pickle and multiprocessing find the script's names in
        # `__main__`.
        main = ModuleType("__main__")
        main.__file__ = str(spec.origin)
        main.__loader__ = spec.loader
        main.__dict__["__builtins__"] = __builtins__
        if self.kind == MODULE:  # relative imports work, and a child process finds the module again
            main.__spec__, main.__package__ = spec, spec.parent
        sys.modules["__main__"] = main
        sys.argv = [str(spec.origin) if self.kind == MODULE else self.target, *self.args]
        exec(code, main.__dict__)

    def _script(self) -> tuple[ModuleSpec, CodeType]:
        script = self.target
        os.chdir(self.cwd or os.path.dirname(script))
        if os.path.isdir(script) or script.endswith(ARCHIVES):
            sys.path.insert(0, script)
            found = PathFinder.find_spec("__main__", [script])
            if found is None:
                raise ImportError(f"there is no __main__.py in {script}", path=script)
            return found, _code_of(found)
        if (directory := os.path.dirname(script)) not in sys.path[:1]:
            sys.path.insert(0, directory)
        spec = ModuleSpec("__main__", SourceFileLoader("__main__", script), origin=script)
        return spec, compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)

    def _module(self) -> tuple[ModuleSpec, CodeType]:
        if self.cwd:
            os.chdir(self.cwd)
        sys.path.insert(0, os.getcwd())
        spec = _found(self.target)
        if spec.submodule_search_locations is not None:  # a package
            spec = _found(f"{self.target}.__main__")
        return spec, _code_of(spec)

    def _replace_process(self) -> None:
        if self.cwd:
            os.chdir(self.cwd)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python; a program expects the kernel's default
            signal.signal(number, signal.SIG_DFL)
        os.execve(self.target, [self.target, *self.args], dict(os.environ))


def _found(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)  # imports the packages that it is in
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return spec


def _code_of(spec: ModuleSpec) -> CodeType:
    get_code = getattr(spec.loader, "get_code", None)
    code = None if get_code is None else get_code(spec.name)
    if not isinstance(code, CodeType):
        raise ImportError(f"{spec.name} has no Python code to run as a program", name=spec.name, path=spec.origin)
    return code
