"""Which nodes of an allocation an administrator takes away: a fold over what sinfo shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.cli.slurm.tools import NodeState

# Slurm's states of a node that is to get no further jobs. An administrator sets "fail" as well. "down" is no notice: whether
# the node is lost is for its agent's connections to tell.
_LEAVING = ("drain", "maint", "failing", "fail", "reboot")
OWN_REASON = "holdfast:"  # a drain that we have asked for is no notice


@dataclass(frozen=True, slots=True)
class Announce:
    node: str
    event: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    node: str


Change = Announce | Withdraw


@dataclass(slots=True)
class Drains:
    """`announced`: node → event, as far as the supervisor has been told."""

    announced: dict[str, str] = field(default_factory=dict)

    def changes(self, states: Iterable[NodeState]) -> list[Change]:
        """Return what the supervisor is to be told. A node that sinfo does not show stays as it is."""
        found: list[Change] = []
        for each in states:
            leaving = each.state.startswith(_LEAVING) and not each.reason.startswith(OWN_REASON)
            event = f"Slurm: {each.state}{f' ({each.reason})' if each.reason else ''}" if leaving else ""
            if event == self.announced.get(each.node, ""):
                continue
            found.append(Announce(each.node, event) if event else Withdraw(each.node))
        return found

    def done(self, change: Change) -> None:
        """To be called when the supervisor has taken the change; until then it is asked again."""
        match change:
            case Announce(node, event):
                self.announced[node] = event
            case Withdraw(node):
                self.announced.pop(node, None)
