"""Detects deviations of a GPU from its expected state. Reports warnings, for actions when the job next stops.

Faults that stop a job are reported as an Xid or as NVML's recovery action (`gpu_error`); `degradation` judges trends of
counters. This detector judges states: fewer devices than expected, memory rows that wait for a reset or have no spare row left,
links that are down, a PCIe link that is narrower or slower than possible while the GPU works, a fabric that is not complete. A
state must hold for `samples` readings. It ends when `absent` readings have not shown it, because a PCIe link is not judged
while its GPU is idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.lasting import Lasting
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.roster import Roster
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import GpuHealth as Health

_NODES_MAX = 50_000
_FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED; 0 = the board has no fabric

_RESET = (Remedy.WATCH, Remedy.RESET_GPU)
_UPWARDS = (Remedy.RESET_GPU, Remedy.REBOOT_NODE, Remedy.REPLACE_NODE)


@dataclass(frozen=True, slots=True)
class _Lack:
    """One deviation from the expected state."""

    gpu: int | None
    uuid: str
    rule: str
    words: str
    recommended_actions: tuple[Remedy, ...]
    numbers: dict[str, str]


@dataclass(slots=True)
class HealthState:
    seen: Bounded[str, dict[tuple[str, str], int]] = field(default_factory=lambda: Bounded(_NODES_MAX))
    """Node → (GPU, rule) → number of readings in a row that show the state. For a reported state, a negative number counts the
    readings that do not show it."""
    lasting: Lasting[tuple[str, str, str]] = field(default_factory=Lasting)  # by node, GPU, rule


@dataclass(frozen=True, slots=True)
class GpuHealth:
    reads: ClassVar = (Health,)
    initial = HealthState
    samples: int = 2  # a single reading may coincide with a reload of the driver
    absent: int = 10
    busy_percent: int = 50  # idle GPUs slow down their PCIe link, so only the link of a working GPU is judged

    def observe(self, state: HealthState, item: Observed, now: float, roster: Roster) -> tuple[HealthState, Findings]:
        if not isinstance(item, Health):
            return state, ()
        before, counts, findings = state.seen.get(item.node, {}), dict[tuple[str, str], int](), list[Finding]()
        for lack in self._lacks(item):
            key, full_key = (lack.uuid, lack.rule), (item.node, lack.uuid, lack.rule)
            counts[key] = max(0, before.get(key, 0)) + 1
            if counts[key] >= self.samples or full_key in state.lasting:
                findings += state.lasting.seen(full_key, now, partial(_finding, item, lack, now))
        for key in sorted(before.keys() - counts.keys()):
            full_key, readings = (item.node, *key), min(0, before[key]) - 1
            if readings <= -self.absent:
                findings += state.lasting.over(full_key, now)
            elif full_key in state.lasting:
                counts[key] = readings
        state.seen[item.node] = counts
        return state, tuple(findings)

    def _lacks(self, item: Health) -> Iterator[_Lack]:
        if len(item.gpu) < item.expected:
            numbers = {"expected": str(item.expected), "found": str(len(item.gpu))}
            words = f"has {len(item.gpu)} of {item.expected} GPUs"
            yield _Lack(None, "", "device_count", words, (Remedy.REBOOT_NODE, Remedy.REPLACE_NODE), numbers)
        for row, (gpu, uuid) in enumerate(zip(item.gpu, item.uuid, strict=True)):
            for rule, words, recommended_actions, numbers in self._of_gpu(item, row):
                yield _Lack(gpu, uuid or str(gpu), rule, words, recommended_actions, numbers)

    def _of_gpu(self, item: Health, row: int) -> Iterator[tuple[str, str, tuple[Remedy, ...], dict[str, str]]]:
        rows = {"remapped_rows": str(item.remapped_rows[row])}
        if item.remap_failed[row] == 1:
            yield "remap_failed", "has no spare memory row left: return the board", (Remedy.REPLACE_NODE,), rows
        elif item.remap_pending[row] == 1:
            yield "remap_pending", "waits for a reset to replace a memory row", _RESET, rows
        down = item.nvlinks_down[row]
        if down > 0 and item.nvlinks_up[row] > 0:  # if no link is up, the board does not use its links
            links = {"up": str(item.nvlinks_up[row]), "down": str(down)}
            yield "nvlink_down", f"has {down} NVLinks down", _UPWARDS, links
        if item.utilization[row] >= self.busy_percent:
            yield from _narrow("width", "lanes", item.pcie_width[row], item.pcie_width_max[row])
            yield from _narrow("generation", "generation", item.pcie_gen[row], item.pcie_gen_max[row])
        if item.fabric_state[row] not in (-1, 0, _FABRIC_COMPLETED):
            fabric = {"fabric_state": str(item.fabric_state[row]), "fabric_health": f"{item.fabric_health[row]:#x}"}
            yield "fabric", f"is not in its NVLink fabric (state {item.fabric_state[row]})", _UPWARDS, fabric


def _narrow(what: str, unit: str, now: int, most: int) -> Iterator[tuple[str, str, tuple[Remedy, ...], dict[str, str]]]:
    if 0 < now < most:
        yield f"pcie_{what}", f"works on PCIe {unit} {now} of {most}", _UPWARDS[1:], {"now": str(now), "max": str(most)}


def _finding(item: Health, lack: _Lack, now: float) -> Finding:
    subject = item.node if lack.gpu is None else f"GPU {lack.gpu} of {item.node}"
    return Finding(
        id=f"gpu_health:{item.node}:{lack.uuid}:{lack.rule}:{item.at:.0f}",
        kind=FindingKind.GPU_ERROR,
        severity=Severity.WARNING,
        at=now,
        since=min(item.at, now),
        summary=f"{subject} {lack.words}.",
        node=item.node,
        gpu=lack.gpu,
        confidence=0.9,
        evidence={"rule": lack.rule, "uuid": lack.uuid, "source": "NVML", **lack.numbers},
        recommended_actions=lack.recommended_actions,
    )
