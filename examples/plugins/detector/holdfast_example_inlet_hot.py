"""A detector: warns if the air that enters a node stays hot. Pure, like every detector: no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.diagnostics.detectors.protocol import Observed
from holdfast.diagnostics.roster import Roster
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.signals import Measurements

NODES_MAX = 50_000


def build() -> InletHot:
    return InletHot()


@dataclass
class State:
    hot: dict[str, int] = field(default_factory=dict)
    """Node → number of consecutive readings that were too hot."""


@dataclass(frozen=True)
class InletHot:
    limit_c: float = 45.0
    samples: int = 3

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        return (Measurements,)

    def initial(self) -> State:
        return State()

    def observe(self, state: State, item: Observed, now: float, roster: Roster) -> tuple[State, tuple[Finding, ...]]:
        if not isinstance(item, Measurements) or "inlet_c" not in item.name:
            return state, ()
        celsius = item.value[item.name.index("inlet_c")]
        if celsius <= self.limit_c:
            state.hot.pop(item.node, None)
            return state, ()
        state.hot[item.node] = in_a_row = state.hot.get(item.node, 0) + 1
        while len(state.hot) > NODES_MAX:
            del state.hot[next(iter(state.hot))]
        return state, (self._finding(item, celsius, now),) if in_a_row == self.samples else ()

    def _finding(self, item: Measurements, celsius: float, now: float) -> Finding:
        return Finding(
            id=f"inlet_hot:{item.node}:{item.at:.0f}",
            kind=FindingKind.DEGRADATION,
            severity=Severity.WARNING,
            at=now,
            since=min(item.at, now),
            summary=f"the air that enters {item.node} has {celsius:g} °C, more than {self.limit_c:g}",
            node=item.node,
            evidence={"inlet_c": f"{celsius:g}"},
        )
