"""Decides which nodes of an allocation to announce as leaving, from the states that sinfo shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.cli.slurm.tools import NodeState

# Slurm's states of a node that gets no further jobs. An administrator sets "fail" as well. "down" is not a notice: whether the
# node is lost follows from its agent's connections.
_LEAVING = ("drain", "maint", "failing", "fail", "reboot")
OWN_REASON = "holdfast:"  # prefix of the reason of a drain by Holdfast, which is not a notice


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
    """`announced`: node → event, of the notices that the supervisor has accepted."""

    announced: dict[str, str] = field(default_factory=dict)

    def changes(self, states: Iterable[NodeState]) -> list[Change]:
        """Return the changes to send to the supervisor. The notice of a node that sinfo does not show is unchanged."""
        found: list[Change] = []
        for each in states:
            leaving = each.state.startswith(_LEAVING) and not each.reason.startswith(OWN_REASON)
            event = f"Slurm: {each.state}{f' ({each.reason})' if each.reason else ''}" if leaving else ""
            if event == self.announced.get(each.node, ""):
                continue
            found.append(Announce(each.node, event) if event else Withdraw(each.node))
        return found

    def done(self, change: Change) -> None:
        """Record that the supervisor has accepted a change. Until then, `changes` returns it again."""
        match change:
            case Announce(node, event):
                self.announced[node] = event
            case Withdraw(node):
                self.announced.pop(node, None)
