"""Replacements of machines that do not return in a simulation, and the promises about the requests for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from holdfast.sim.world import Violation
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import Command, Event, NodeCordonRequested, NodeRepaired, RequestReplacement
from holdfast.supervisor.return_rules import ReplacementRules

# Short times, so that some replacements happen within one run.
RULES = ReplacementRules(provider="world", after_s=20.0, per_day_max=2)


@dataclass(slots=True)
class Replacing:
    """The answers of one seed's provider of machines. Most seeds have no provider."""

    rules: ReplacementRules | None = None
    chance: Random = field(default_factory=Random, compare=False)
    at_peace: bool = False

    @classmethod
    def of(cls, seed: int) -> Replacing:
        return cls(RULES, Random(f"replacements of {seed}")) if seed % 16 in (1, 13) else cls()

    def calm(self) -> None:
        """From now on the provider agrees to every request and delivers a machine."""
        self.at_peace = True

    def answer(self) -> str:
        if self.at_peace:
            return "agrees"
        return self.chance.choice(("agrees", "agrees", "agrees", "refuses", "answers nothing", "no machine comes"))


@dataclass(slots=True)
class ReplacementPromises:
    """No machine is replaced while it has workers or is in service, nor twice for one fault. The number of requests is
    limited."""

    asked: list[str] = field(default_factory=list)  # requests
    # node → request, until another machine arrives or an operator repairs or uncordons the node
    agreed: dict[str, str] = field(default_factory=dict)

    def folded(self, event: Event, after: State, commands: tuple[Command, ...]) -> None:
        match event:
            case NodeCordonRequested(node=node) | NodeRepaired(node=node):
                self.agreed.pop(node, None)
        for command in commands:
            if isinstance(command, RequestReplacement):
                self._asked(command, after)

    def came(self, node: str) -> None:
        """Record that another machine has arrived."""
        self.agreed.pop(node, None)

    def log_went_back(self) -> None:
        """Forget the requests, because requests that the log has lost may be repeated."""
        self.asked.clear()
        self.agreed.clear()

    def _asked(self, command: RequestReplacement, state: State) -> None:
        node = state.nodes[command.node]
        what = f"{command.node} is to be replaced ({command.request})"
        if node.connected and ((live := state.live_on(node)) or node.workers):
            raise Violation(f"{what}, and its workers {live} have not ended")
        if node.removal is None:
            raise Violation(f"{what}, and no fault has taken it out: {node.unschedulable_reason or 'in service'}")
        if command.request in self.asked:
            raise Violation(f"{what}, and has been asked for already")
        if command.node in self.agreed:
            raise Violation(f"{what}, and another machine was promised by {self.agreed[command.node]}")
        self.asked.append(command.request)
        if len(self.asked) > RULES.per_day_max:
            raise Violation(f"{what}, the last of {len(self.asked)} within one run: {', '.join(self.asked)}")
