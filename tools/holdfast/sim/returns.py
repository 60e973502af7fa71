"""Nodes in a simulation that fail with hardware faults, are booted, and fail again; and the promises about their return."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random

from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.generations import Generation
from holdfast.domain.nodes import Check, Preflight
from holdfast.domain.orders import RebootNode
from holdfast.runtime.steady_clock import DRIFT_MAX
from holdfast.sim.world import Violation, World
from holdfast.supervisor.core import Node, State
from holdfast.supervisor.core.rules.holddown import own
from holdfast.supervisor.protocol import (
    Command,
    Event,
    FindingArrived,
    GenerationChanged,
    GenerationStage,
    NodeCordonRequested,
    NodeRepaired,
    Publish,
    Send,
)
from holdfast.supervisor.return_rules import ReturnRules

# Short times, so that many returns happen within one run.
RULES = ReturnRules(hold_s=4.0, hold_s_max=16.0, probation_s=40.0)
FAULTS_MAX = 3
LOOK_S = 2.0  # interval at which an idle agent checks whether it has to test itself
TESTED_EVERY_S = 60.0
REPAIRED_S = (120.0, 300.0)  # until an operator marks the node as repaired
ROUNDING_S = 0.001
SLACK_S = 15.0  # additional time for leader crashes and ended sessions


@dataclass(slots=True)
class Returns:
    """The hardware faults of one seed. None by default: three of four seeds give the same runs as before nodes could return."""

    faults: int = 0
    chance: Random = field(default_factory=Random, compare=False)
    at_peace: bool = False
    ordered: bool = False  # agents have a command that boots their machine; otherwise an operator boots it

    @classmethod
    def of(cls, seed: int) -> Returns:
        if seed % 4 != 1:
            return cls()
        chance = Random(f"returns of {seed}")
        return cls(chance.randint(1, FAULTS_MAX), chance, ordered=seed % 8 == 5)

    def calm(self) -> None:
        """Let no hardware and no test fail from now on."""
        self.at_peace = True

    def reboot(self) -> str:
        """Return the outcome of the command that boots a machine."""
        if self.at_peace:
            return "boots"
        return self.chance.choice(("boots", "boots", "boots", "takes the answer with it", "fails", "does nothing"))

    def tests(self, now: float) -> Preflight:
        """Return the result of a node's pre-flight test."""
        ok = self.chance.random() < 0.9 or self.at_peace
        return Preflight(now, 0.1, (Check("disk", ok, "9 GB free" if ok else "99% full"),))


@dataclass(slots=True)
class ReturnPromises:
    """A node gets no ranks while it has not been booted since its fault, is held down, sent away or cordoned. Otherwise it
    becomes a spare again in time."""

    world: World
    cordoned: set[str] = field(default_factory=set)  # by an operator
    condemned: dict[str, str] = field(default_factory=dict)  # node → boot id of the machine that failed
    machine: dict[str, str] = field(default_factory=dict)  # node → machine id of the machine that failed
    back: dict[str, float] = field(default_factory=dict)  # node → time at which it first reported another boot id
    really_back: dict[str, float] = field(default_factory=dict)  # likewise, by the world's time
    sent_away: dict[str, str] = field(default_factory=dict)  # node → the fault for which it was sent away
    passed_at: dict[str, float] = field(default_factory=dict)  # node → time since which its tests are passed
    counted_ids: set[str] = field(default_factory=set)  # ids of findings that were counted

    def folded(self, before: State, event: Event, after: State, commands: tuple[Command, ...]) -> None:
        match event:
            case NodeCordonRequested(cordoned=True, node=node) if node in before.nodes:
                self.cordoned.add(node)
            case NodeCordonRequested(node=node) | NodeRepaired(node=node):
                self._released(node)
            case FindingArrived(finding=finding):
                self._found(before, event, after, finding)
        if after.nodes is not before.nodes:
            for name, known in after.nodes.items():
                self._watch(name, known, event.at)
        for command in commands:
            match command:
                case Publish(record=GenerationChanged(stage=GenerationStage.PLANNED, generation=generation)):
                    self._no_ranks_too_early(generation, after, event.at)
                case Send(node=name, order=RebootNode()) if name not in {send.node for send in before.sends()}:
                    self._boots_only_what_must(after, after.nodes[name])

    def log_went_back(self, state: State) -> None:
        """Forget the decisions that the log has lost."""
        out = {name: node for name, node in state.nodes.items() if node.unschedulable_reason}
        self.cordoned &= {name for name, node in out.items() if node.unschedulable_reason.startswith("cordoned")}
        self.condemned = {name: boot for name, boot in self.condemned.items() if name in out and out[name].removal}
        self.sent_away = {name: at for name, at in self.sent_away.items() if name in self.condemned}
        still_back = {name for name, node in out.items() if node.removal and node.removal.back_at is not None}
        self.back = {name: at for name, at in self.back.items() if name in still_back}
        self.really_back = {name: at for name, at in self.really_back.items() if name in still_back}
        self.passed_at.clear()

    # ------------------------------------------------------------ private

    def _released(self, node: str) -> None:
        self.cordoned.discard(node)
        self.condemned.pop(node, None)
        self.sent_away.pop(node, None)
        self._gone(node)

    def _gone(self, node: str) -> None:
        self.back.pop(node, None)
        self.really_back.pop(node, None)

    def _found(self, before: State, event: FindingArrived, after: State, finding: Finding) -> None:
        node = before.nodes.get(finding.node)
        if finding.severity is not Severity.FATAL or finding.kind is not FindingKind.GPU_ERROR or node is None:
            return
        began = event.at - event.age_s - max(0.0, finding.at - finding.since)
        if finding.id in self.counted_ids:
            return
        self.counted_ids.add(finding.id)
        if began < node.repaired_at or node.name in self.cordoned:
            return
        self.condemned[node.name] = node.facts.boot_id
        self.machine[node.name] = node.facts.machine_id
        self._gone(node.name)
        counted = [fault for fault in own(after.nodes[node.name].faults) if fault.at == event.at]
        if counted and node.probation is not None and node.probation.covers(counted[-1]):
            self.sent_away.setdefault(node.name, counted[-1].incident)

    def _watch(self, name: str, node: Node, at: float) -> None:
        if name in self.condemned and self.machine[name] != node.facts.machine_id:
            cordoned = name in self.cordoned
            self._released(name)  # another machine
            self.cordoned |= {name} if cordoned else set()
        failed = self.condemned.get(name, "")
        if "" not in (failed, node.facts.boot_id) and node.facts.boot_id != failed:
            self.back.setdefault(name, at)
            self.really_back.setdefault(name, self.world.now)
        fit = node.preflight is not None and not node.unfit and not node.untested
        if not fit or not node.connected:
            self.passed_at.pop(name, None)
        else:
            self.passed_at.setdefault(name, at)
        self._is_a_spare_again(name, node, at)

    def _is_a_spare_again(self, name: str, node: Node, at: float) -> None:
        since = self.back.get(name)
        if since is None or name in self.sent_away or name in self.cordoned or name not in self.passed_at:
            return
        removal = node.removal
        if removal is None or removal.final or removal.at > since:  # the node failed again, or too often
            return
        if at > max(since + RULES.hold_s_max, self.passed_at[name]) + SLACK_S:
            raise Violation(
                f"{name} was booted and connected at {since:.3f}, has passed tests since {self.passed_at[name]:.3f}, and was "
                f"not a spare again by {at:.3f}: {node.unschedulable_reason}"
            )

    def _boots_only_what_must(self, state: State, node: Node) -> None:
        if (live := state.live_on(node)) or node.workers:
            raise Violation(f"{node.name} is to boot, and its workers {live} have not ended")
        if node.name in self.back or node.removal is None:
            raise Violation(
                f"{node.name} is to boot, and no fault needs it: {node.unschedulable_reason or 'in service'}"
            )

    def _no_ranks_too_early(self, generation: Generation, after: State, at: float) -> None:
        for name in generation.nodes:
            what = f"generation {generation.number} takes {name}, which"
            if name in self.cordoned:
                raise Violation(f"{what} an operator has cordoned")
            if name not in self.condemned:
                continue
            fault = self.sent_away.get(name)
            if fault is not None and any(each.incident == fault for each in own(after.nodes[name].faults)):
                raise Violation(f"{what} was sent away for {fault}, and no operator has spoken")
            since = self.back.get(name)
            if since is None:
                raise Violation(f"{what} has not been booted since its fault")
            if at < since + RULES.hold_s:
                raise Violation(f"{what} is held down: it connected at {since:.3f}, and it is {at:.3f}")
            really_s = self.world.now - self.really_back.get(name, -inf)
            if really_s < RULES.hold_s * (1 - DRIFT_MAX) - ROUNDING_S:
                raise Violation(f"{what} is held down for {RULES.hold_s:g} s, and connected {really_s:.3f} s ago")
            if after.nodes[name].unfit or after.nodes[name].untested:
                raise Violation(f"{what} has not passed its tests since its fault")
