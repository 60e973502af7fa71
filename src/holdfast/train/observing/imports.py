"""Records which modules a script has imported by its first step, so that the next generation's template can import them in
advance (`preload: [auto]`).

Only modules of installed packages are recorded, because files next to the script may be edited before the next start. Modules
that torch imports late are omitted, because they may start processes. The list has the order in which their imports began. With
it are recorded the version of each package, as a property of its file, and the environment variables that differ from those
with which the worker was started: a module that reads one of them when it is imported must be imported after the script has set
it. (If an import has set it, it has the same value in a template that has done the same imports.)"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from types import ModuleType

from holdfast.domain.worker import ENV_IMPORTS

MODULES_MAX = 4000
_NEVER = ("torch", "holdfast", "pip", "setuptools", "_distutils_hack")
_recorded = False
_base: frozenset[str] = frozenset()
_environment: Mapping[str, str] | None = None  # of the script, when it began


def set_base(names: Iterable[str]) -> None:
    """Set the modules that every worker template imports and that are not recorded. Called in the template."""
    global _base
    _base = frozenset(names)


def begin() -> None:
    """The script is about to start, with the present environment."""
    global _environment
    _environment = dict(os.environ)


def record() -> None:
    """Write the list, once, if the agent requests it. Called at the end of the first step and of the script; never raises."""
    global _recorded
    path = os.environ.get(ENV_IMPORTS, "")
    if _recorded or not path:
        return
    _recorded = True
    names = of_packages(sys.modules, roots())
    now, before = dict(os.environ), dict(os.environ) if _environment is None else _environment
    names_set = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
    variables = {name: fingerprint(now.get(name)) for name in names_set}
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w") as file:
            json.dump({"modules": names, "files": files_of(names), "variables": variables}, file)
        os.replace(temporary, path)
    except (OSError, ValueError):  # the next start is slower; nothing else depends on it
        pass


def fingerprint(value: str | None) -> str:
    """Identify the value of a variable, which may be a secret; None = it is not set."""
    return "" if value is None else hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:8]


def roots() -> tuple[str, ...]:
    """Return the directories of installed packages."""
    return tuple(dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))))


def of_packages(modules: Mapping[str, ModuleType], roots: Iterable[str]) -> list[str]:
    """Return the names of the modules whose files are below `roots`. A module under a second name is omitted."""
    below = tuple(f"{root}{os.sep}" for root in roots)
    found = []
    for name, module in list(modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if name in _base or name.partition(".")[0] in _NEVER or getattr(spec, "name", "") != name:
            continue
        if isinstance(origin, str) and origin.startswith(below):
            found.append(name)
    return found[:MODULES_MAX]


def files_of(names: Iterable[str]) -> dict[str, str]:
    """Return time and size of the file of each package that is not inside of another one in `names`."""
    known, found = set(names), {}
    for name in names:
        if not any(parent in known for parent in _parents(name)):
            try:
                stat = os.stat(str(getattr(sys.modules[name].__spec__, "origin", "")))
            except OSError:
                found[name] = ""  # deleted since
            else:
                found[name] = f"{stat.st_mtime_ns} {stat.st_size}"
    return found


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
