"""Suite `actions`: checks that the decided action is the first safe one of the recommended actions.

The cases are every Xid of the catalogue in the notation of the driver, and every warning of docs/diagnostics.md. They run from
the agent's reader through the real detectors and the supervisor's core to the action of the default policy and the orders to
agents, in twelve situations: the agent can reset GPUs or not; it can boot the machine or not; a spare is free, or no spare is
free, or no spare is free and the job runs its fewest replicas. Each Xid runs twice: alone, and with a failure of the rank on
that GPU a second later. The right action follows from NVIDIA's catalogue (`actions_expected`), not from the product's mapping.

Precision: right actions / decided actions. Recall: cases with the right action / cases that need an action. Clean: no action
was needed, and none was decided. In addition, each case checks that no rank runs on a GPU that must be reset first or on a node
that must leave, that no GPU is reset and no machine booted under its workers, and that a machine is booted if and only if this
is the right action and the agent can do it.
"""

from __future__ import annotations

import numpy as np

from benchmarks.detection import actions_noise
from benchmarks.detection.actions_expected import SITUATIONS, Case, Rung, Situation, cases, right_action
from benchmarks.detection.actions_fleet import JOB, NODES, Fleet
from benchmarks.detection.actions_warnings import WARNINGS, Warned
from benchmarks.detection.fleet import COLLECTIVE, DEVICE
from benchmarks.detection.score import Score, progress
from holdfast.agent.collectors.kernel_lines import recognise
from holdfast.domain.findings import Severity
from holdfast.domain.incidents import ActionKind
from holdfast.domain.signals import KernelLine, WorkerExited

NOISE_H_BY_DEFAULT = 200.0
GPU = 2
FAULTY_NODE = "n1"
_RANK = 1


def suite(rng: np.random.Generator, noise_h: float = NOISE_H_BY_DEFAULT) -> Score:
    """Run the suite. `noise_h`: virtual hours of 12,500 nodes with noise only."""
    score = Score("actions")
    lines, ends = score.row("xid"), score.row("xid, and the rank fails")
    for case in cases():
        for situation in SITUATIONS:
            judge(lines, case, situation, ended=False)
            if case.rung is not Rung.RESET_LATER:  # a fault during a planned change is a different case
                judge(ends, case, situation, ended=True)
    warned = score.row("warnings")
    for warning in WARNINGS:
        for situation in SITUATIONS:
            judge_warning(warned, warning, situation)
    progress(f"actions: {lines.cases + ends.cases} cases of Xids, {warned.cases} of warnings")
    noise = score.row("noise")
    actions_noise.judge(noise, rng, noise_h)
    for name in ("false_planned_changes_per_day", "late_planned_changes_per_day", "virtual_hours"):
        score.facts[name] = noise.facts[name]
    return score.total(*(row.suite for row in score.rows if row is not noise))


def judge(score: Score, case: Case, situation: Situation, *, ended: bool) -> None:
    """Judge one line of the driver in one situation."""
    fleet = fleet_for(situation)
    struck = kernel_line(fleet, case.text)
    if ended and fleet.running:
        fail_rank(fleet)
    actions = fleet.actions()
    wanted = right_action(case.rung, situation, ended=ended)
    is_right = _compare(score, f"{case.name} ({situation}{', rank fails' if ended else ''})", wanted, actions)
    if is_right and struck:
        for what in _consequences(fleet, case.rung, situation, wanted):
            score.fail(f"{case.name} ({situation}): {what}", wrong=1)


def judge_warning(score: Score, case: Warned, situation: Situation) -> None:
    """Judge one warning in one situation."""
    fleet = fleet_for(situation)
    case.drive(fleet)
    what, wanted = f"{case.name} ({situation})", right_action(case.rung, situation, ended=False)
    if not any(finding.kind is case.kind and finding.severity is Severity.WARNING for finding in fleet.found):
        found = ", ".join(f"{finding.kind} {finding.severity}" for finding in fleet.found)
        score.fail(f"{what}: no warning was found, but {found or 'nothing'}", missed=1)
    elif _compare(score, what, wanted, fleet.actions()):
        for problem in _consequences(fleet, case.rung, situation, wanted):
            score.fail(f"{what}: {problem}", wrong=1)


def _compare(score: Score, what: str, wanted: ActionKind | None, actions: list[ActionKind]) -> bool:
    """Count the first decided action. Returns whether it was right."""
    decided = actions[0] if actions else None
    if decided is wanted:
        if wanted is None:
            score.clean += 1
        else:
            score.hit()
        return True
    score.fail(
        f"{what}: {decided or 'nothing'} instead of {wanted or 'nothing'}",
        wrong=decided is not None,
        missed=wanted is not None,
        spoiled=wanted is None,
    )
    return False


def _consequences(fleet: Fleet, rung: Rung, situation: Situation, wanted: ActionKind | None) -> list[str]:
    """List the wrong orders to agents."""
    before = fleet.nodes()
    fleet.settle()
    fleet.wait(40.0)  # conditions for a boot are checked every 30 s
    fleet.settle()
    wrong = list(fleet.wrong)
    if fleet.running == (wanted is ActionKind.WAIT):
        wrong.append(f"the job is {fleet.job.phase}")
    leaves = wanted in (ActionKind.HOT_SWAP, ActionKind.SCALE_DOWN, ActionKind.WAIT)
    if fleet.running and (FAULTY_NODE in fleet.nodes()) is leaves:
        wrong.append(f"{FAULTY_NODE} has {'still' if leaves else 'no'} ranks")
    if wanted in (None, ActionKind.RESTART, ActionKind.GPU_RESET) and fleet.nodes() != before:
        wrong.append("other nodes than before")
    reset = situation.resets and rung in (Rung.RESET, Rung.RESET_LATER)
    if fleet.resets != ([FAULTY_NODE] if reset else []):
        wrong.append(f"resets of {fleet.resets or 'nothing'}")
    if rung is Rung.REBOOT and fleet.boots != ([FAULTY_NODE] if situation.reboots else []):
        wrong.append(f"boots of {fleet.boots or 'nothing'}")
    if rung not in (Rung.REBOOT, Rung.REPLACE, Rung.RESET) and fleet.boots:
        wrong.append(f"boots of {fleet.boots}")
    return wrong


def fleet_for(situation: Situation) -> Fleet:
    return Fleet(situation.spares, situation.resets, situation.reboots, NODES if situation.minimum else 1)


def kernel_line(fleet: Fleet, text: str) -> bool:
    """Let the agent read this line of the kernel log. Returns whether the agent recognises it."""
    fleet.now += 1.0
    line = recognise(text)
    if line is None:
        return False
    fleet.see(KernelLine(FAULTY_NODE, fleet.now, line.text, line.xid, line.pci, GPU if line.pci else None, line.event))
    return True


def fail_rank(fleet: Fleet) -> None:
    """Let the rank on the GPU fail, and the other ranks in their next collective."""
    fleet.now += 1.0
    number, names = fleet.job.number, fleet.nodes()
    for rank in (_RANK, *(rank for rank in range(len(names)) if rank != _RANK)):
        error = DEVICE if rank == _RANK else COLLECTIVE
        fleet.see(WorkerExited(names[rank], fleet.now, JOB, number, rank, 100 + rank, 1, None, 20, False, error))
    fleet.pass_(2.0, tick_s=0.5)
