"""Providers of machines. The leader requests another machine if a node does not return (when: core/repair/replacements.py).

| `HOLDFAST_PROVIDER` | provider |
|---|---|
| empty | none; `command`, if there is a `HOLDFAST_REPLACE_COMMAND` |
| `command` | the command line of `HOLDFAST_REPLACE_COMMAND`, on the supervisor's machine |
| `kubernetes` | the API server of the cluster: the pod of the agent is deleted (docs/kubernetes.md) |
| another name | the plug-in of this name in the group `holdfast.providers`: `build() -> Provider` |

More nodes (demand.py decides when) are requested by the command line of `HOLDFAST_MORE_COMMAND`, or by a plug-in that has the
method `more`, if `HOLDFAST_MORE_NODES_MAX` allows any.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast import plugins
from holdfast.domain.errors import InvalidSpec, PluginError
from holdfast.kubernetes.replace import Replacer
from holdfast.plugins import Group
from holdfast.supervisor.providers.command import Command, MoreCommand
from holdfast.supervisor.providers.kubernetes import Kubernetes
from holdfast.supervisor.providers.protocol import Machine, MoreNodes, Provider, Supplier

COMMAND = "command"
KUBERNETES = "kubernetes"

__all__ = ["COMMAND", "KUBERNETES", "Machine", "MoreNodes", "Provider", "Supplier", "build", "name_of", "supplier"]


def name_of(provider: str, command: str) -> str:
    """The provider's name by these settings; empty = none. Raises `InvalidSpec` if they contradict each other."""
    if command and provider not in ("", COMMAND):
        raise InvalidSpec("HOLDFAST_PROVIDER", provider, "command, or nothing, while HOLDFAST_REPLACE_COMMAND is set")
    if provider == COMMAND and not command:
        raise InvalidSpec("HOLDFAST_REPLACE_COMMAND", command, "a command line, because HOLDFAST_PROVIDER is command")
    return COMMAND if command else provider


def build(provider: str, command: str, replacer: Callable[[], Replacer] | None = None) -> Provider | None:
    """The provider; None if there is none. `replacer`: creates the replacer of pods of the cluster from its settings. Raises
    `InvalidSpec`, or `PluginError` if the plug-in is not installed or fails."""
    name = name_of(provider, command)
    if not name:
        return None
    if name == COMMAND:
        return Command(command)
    if name == KUBERNETES and replacer is not None:
        return Kubernetes(replacer())
    plugin = plugins.find(Group.PROVIDERS, name)
    if plugin is None:
        there = ", ".join(found.name for found in plugins.installed(Group.PROVIDERS)) or "none"
        raise InvalidSpec(
            "HOLDFAST_PROVIDER", name, f"command, kubernetes, or the name of an installed plug-in ({there})"
        )
    built = plugins.build(plugin)
    if not isinstance(built, Provider):
        raise PluginError(Group.PROVIDERS, str(plugin), f"{type(built).__name__} has no method `replace`")
    return built


def supplier(provider: Provider | None, more_command: str, nodes_max: int) -> Supplier | None:
    """The supplier of more nodes; None if there is none. Raises `InvalidSpec`."""
    if not more_command:
        return provider if nodes_max and isinstance(provider, Supplier) else None
    if not nodes_max:
        raise InvalidSpec(
            "HOLDFAST_MORE_NODES_MAX",
            nodes_max,
            "the most nodes that a pool may have, because HOLDFAST_MORE_COMMAND is set",
        )
    return MoreCommand(more_command)
