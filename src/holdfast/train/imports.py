"""Records which modules a script has imported by its first step, so that the next generation's template can import them in
advance (`preload: [auto]`).

Only modules of installed packages are recorded, because files next to the script may be edited before the next start. Modules
that torch imports late are omitted, because they may start processes. The list has the order in which their imports began."""

from __future__ import annotations

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


def set_base(names: Iterable[str]) -> None:
    """Set the modules that every worker template imports and that are not recorded. Called in the template."""
    global _base
    _base = frozenset(names)


def record() -> None:
    """Write the list, once, if the agent requests it. Called at the end of the first step and of the script; never raises."""
    global _recorded
    path = os.environ.get(ENV_IMPORTS, "")
    if _recorded or not path:
        return
    _recorded = True
    names = of_packages(sys.modules, (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w") as file:
            json.dump(names, file)
        os.replace(temporary, path)
    except OSError:  # the next start is slower; nothing else depends on it
        pass


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
