"""Plug-ins: extensions of Holdfast by other installed packages, through Python entry points. Standard library only.

A package declares its plug-ins in its pyproject.toml. It only has to be installed in the same environment as Holdfast:

    [project.entry-points."holdfast.detectors"]
    clock_drift = "acme_holdfast.drift:build"

| group                 | the object that the entry point names                                  | imported by                 |
|-----------------------|------------------------------------------------------------------------|-----------------------------|
| `holdfast.collectors` | `build(surroundings) -> Collector or None`                             | agents                      |
| `holdfast.detectors`  | `build() -> Detector`                                                  | diagnostics                 |
| `holdfast.stores`     | a `StoreKind`; the entry point's name is the scheme of its URLs        | supervisor, replicator, CLI |
| `holdfast.providers`  | `build() -> Provider`; asked when HOLDFAST_PROVIDER has its name       | supervisor                  |
| `holdfast.notifiers`  | `build(url) -> Notifier`; the entry point's name is the scheme of its addresses | supervisor         |
| `holdfast.policies`   | `decide(incident, job) -> Action`; a job has `policy: plugin:NAME`     | a child of the supervisor   |

`installed` reads package metadata and imports nothing; `load` imports one plug-in. A plug-in that fails is left
out; the service's log and `holdfast doctor` name it.

https://packaging.python.org/en/latest/specifications/entry-points/
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from holdfast.domain.errors import PluginError

T = TypeVar("T")

POLICY_PREFIX = "plugin:"  # prefix of a job's `policy` that names an entry point instead of a file


class Group(StrEnum):
    COLLECTORS = "holdfast.collectors"
    DETECTORS = "holdfast.detectors"
    STORES = "holdfast.stores"
    PROVIDERS = "holdfast.providers"
    POLICIES = "holdfast.policies"
    NOTIFIERS = "holdfast.notifiers"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of an installed package."""

    group: Group
    name: str
    target: str  # "module:attribute"
    package: str  # "acme-holdfast 1.2"; "" if the package has no metadata
    packages: int = 1  # number of packages that declare this name; the plug-in is refused if there are several

    def __str__(self) -> str:
        return f"{self.name} ({self.package or self.target})"


def installed(group: Group) -> tuple[Plugin, ...]:
    """Return all plug-ins of a group, by name. If two packages declare one name, both are listed, and `load` refuses them."""
    entries = entry_points(group=group)
    packages = Counter(entry.name for entry in entries)
    found = (
        Plugin(
            group,
            entry.name,
            entry.value,
            f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "",
            packages[entry.name],
        )
        for entry in entries
    )
    return tuple(sorted(found, key=lambda plugin: (plugin.name, plugin.package)))


def find(group: Group, name: str) -> Plugin | None:
    """Return the plug-in of that name; None if no installed package declares one."""
    return next((plugin for plugin in installed(group) if plugin.name == name), None)


def load(plugin: Plugin, kind: type[T]) -> T:
    """Import the object that the entry point names.

    Raises `PluginError` if the object is not a `kind`, if the import fails for any reason, or if two packages declare the name.
    """
    if plugin.packages > 1:
        raise PluginError(
            plugin.group, str(plugin), f"{plugin.packages} packages declare that name; uninstall all but one"
        )
    try:
        found = EntryPoint(plugin.name, plugin.target, plugin.group).load()
    except Exception as error:  # the import runs code of another package
        raise PluginError(plugin.group, str(plugin), f"{plugin.target}: {type(error).__name__}: {error}") from error
    if not isinstance(found, kind):
        raise PluginError(plugin.group, str(plugin), f"{plugin.target} is {type(found).__name__}, not {kind.__name__}")
    return found


def build_all(
    group: Group, *arguments: object, left_out: Callable[[Plugin, PluginError], None]
) -> Iterator[tuple[Plugin, Any]]:
    """Yield every plug-in of a group with the result of calling its object with `arguments`. Failed ones go to `left_out`."""
    for plugin in installed(group):
        try:
            yield plugin, build(plugin, *arguments)
        except PluginError as error:
            left_out(plugin, error)


def build(plugin: Plugin, *arguments: object) -> Any:
    """Call the plug-in's object with `arguments`. Raises `PluginError`, also for any exception of the object."""
    make: Any = load(plugin, object)
    try:
        return make(*arguments)
    except Exception as error:
        raise PluginError(plugin.group, str(plugin), f"{plugin.target}(): {type(error).__name__}: {error}") from error
