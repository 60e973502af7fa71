"""Plug-ins: what other installed packages add to Holdfast, by Python entry points. Standard library only.

A package names what it brings in its pyproject.toml, and `pip install` beside Holdfast is all that it takes:

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

POLICY_PREFIX = "plugin:"  # of a job's `policy` that is an entry point and no file


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
    package: str  # "acme-holdfast 1.2", empty when its metadata does not say
    packages: int = 1  # how many bring this name: one, or it is refused

    def __str__(self) -> str:
        return f"{self.name} ({self.package or self.target})"


def installed(group: Group) -> tuple[Plugin, ...]:
    """All plug-ins of a group, by name. Two packages that bring the same name are both listed; `load` refuses them."""
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
    """The plug-in of that name; None when no installed package brings one."""
    return next((plugin for plugin in installed(group) if plugin.name == name), None)


def load(plugin: Plugin, kind: type[T]) -> T:
    """The object that the entry point names, which must be a `kind`.

    Raises `PluginError` when it is none, when it cannot be imported, for whatever reason, or when two packages bring the name.
    """
    if plugin.packages > 1:
        raise PluginError(
            plugin.group, str(plugin), f"{plugin.packages} packages bring that name; uninstall all but one"
        )
    try:
        found = EntryPoint(plugin.name, plugin.target, plugin.group).load()
    except Exception as error:  # it runs another's module
        raise PluginError(plugin.group, str(plugin), f"{plugin.target}: {type(error).__name__}: {error}") from error
    if not isinstance(found, kind):
        raise PluginError(plugin.group, str(plugin), f"{plugin.target} is {type(found).__name__}, not {kind.__name__}")
    return found


def build_all(
    group: Group, *arguments: object, left_out: Callable[[Plugin, PluginError], None]
) -> Iterator[tuple[Plugin, Any]]:
    """Every plug-in of a group with what its object returns for `arguments`. Those that fail go to `left_out`."""
    for plugin in installed(group):
        try:
            yield plugin, build(plugin, *arguments)
        except PluginError as error:
            left_out(plugin, error)


def build(plugin: Plugin, *arguments: object) -> Any:
    """What the plug-in's object returns for `arguments`. Raises `PluginError` for whatever it raises, too."""
    make: Any = load(plugin, object)
    try:
        return make(*arguments)
    except Exception as error:
        raise PluginError(plugin.group, str(plugin), f"{plugin.target}(): {type(error).__name__}: {error}") from error
