"""Chooses the checkpoint interval of a job. Pure.

Theory. A save every τ seconds costs its stall s, and every fault costs on average half of the time between two saves. With
faults at a rate λ = 1/M the loss is least at Young's τ = √(2sM). Daly's higher-order formula also holds where s is no longer
small against M. Tiers are levels of this: a farther tier is worth its cost C only for the faults that the nearer tiers do not
survive. So it has its own interval max(√(2C/λ), D), where D is the time that a copy takes to arrive.

λ is unknown. It is estimated for each class of fault from the faults of this job, on top of a prior from published fleets: a
Gamma distribution, whose mean after k faults in a time T is (α + k) / (β + T). This is crude, but sufficient: at twice or half
of the optimal interval the loss by saving and repeating steps grows by a quarter.

Sources: Young 1974, Daly 2006, Benoit et al. 2016 (levels); those of the priors are next to their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from holdfast.domain.job import CheckpointSpec
from holdfast.domain.words import plural

STEPS_UNMEASURED = 50  # before anything is known
SAVES_FIRST = 3  # saves that are measured before the first choice,
SAVES_BETWEEN = 10  # and before each further one
CHANGE_MIN = 1.25  # a choice this close to the present interval changes nothing: the optimum is flat
STORE_UNMEASURED_S = 300.0
STORE_BOUNDS_S = (60.0, 3600.0)
STOLEN = 0.05  # of the training speed, while a step is on its way to the object store
_NEW = 0.2  # weight of a new measurement
_DAY_S = 86400.0


class Loss(StrEnum):
    """Classes of faults by the copies that survive them."""

    LOCAL = "local"  # the nodes and what they saved: a process, a hang, a GPU reset
    NODE = "node"  # the copies on other nodes
    COPIES = "copies"  # the object store alone


@dataclass(frozen=True, slots=True)
class Prior:
    """`faults` (α) in `exposure_s` (β) of a job, or of one node when `per_node`."""

    faults: float
    exposure_s: float
    per_node: bool


# Faults of Llama 3's pre-training that took hardware: 419 less 54 of software and 7 of watchdogs, in 54 days on 2,048 nodes.
_NODE_S = 54 * 2048 / (419 - 54 - 7) * _DAY_S
PRIORS: Mapping[Loss, Prior] = {
    # Meta's jobs of 1,024 GPUs fail every 7.9 h where their hardware explains 29 h: user and software faults, at any size.
    Loss.LOCAL: Prior(1.0, 1 / (1 / 7.9 - 1 / 29) * 3600, per_node=False),
    Loss.NODE: Prior(1.0, _NODE_S, per_node=True),
    Loss.COPIES: Prior(0.094, _NODE_S, per_node=True),  # 9.4 % of StepFun's node faults coincide with another
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a job so far. Seconds are moving averages."""

    saves: int = 0
    stall_s: float = 0.0  # of one save, on the slowest rank
    recovery_s: float = 0.0  # from a fault to the first new step of every rank
    upload_s: float = 0.0  # from complete on the nodes to complete in the object store; 0 = no upload measured
    faults: Mapping[str, int] = field(default_factory=dict)  # by Loss
    change_s: float = 0.0  # of a planned change, from its first order to the first new step of every rank

    def saved(self, saves: int, stall_s: float) -> Measured:
        """Add `saves` more saves, with a mean stall of `stall_s`."""
        return replace(self, saves=self.saves + saves, stall_s=_mean(self.stall_s, stall_s))

    def recovered(self, loss: Loss, seconds: float) -> Measured:
        faults = {**self.faults, loss.value: self.faults.get(loss.value, 0) + 1}
        return replace(self, faults=faults, recovery_s=_mean(self.recovery_s, seconds))

    def changed(self, seconds: float) -> Measured:
        return replace(self, change_s=_mean(self.change_s, seconds))

    def uploaded(self, seconds: float) -> Measured:
        return replace(self, upload_s=_mean(self.upload_s, seconds))


def _mean(known: float, new: float) -> float:
    return new if known == 0.0 else known + _NEW * (new - known)


@dataclass(frozen=True, slots=True)
class Interval:
    """The interval in force, or announced: a save at every multiple of `steps`."""

    steps: int
    store_s: float
    reason: str  # one English sentence
    saves: int = 0  # number of measured saves when it was chosen
    timed: bool = False  # the time of a step was known
    decided: bool = False  # `steps` is a policy's answer, and holds until it gives another one


# ---------------------------------------------------------------- formulas


def young(cost_s: float, rate: float) -> float:
    """The interval in seconds of a level whose copy costs `cost_s` and that serves faults at `rate` per second."""
    return math.sqrt(2 * cost_s / rate)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves, to higher order."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def goodput(interval_s: float, stall_s: float, mtbf_s: float, recovery_s: float) -> float:
    """The useful share of time, for exponentially distributed faults that can also occur during recoveries."""
    if interval_s + stall_s + recovery_s > 500 * mtbf_s:
        return 0.0  # too small to distinguish from 0
    return interval_s / (math.expm1((interval_s + stall_s) / mtbf_s) * mtbf_s * math.exp(recovery_s / mtbf_s))


def fault_rate(measured: Measured, loss: Loss, trained_s: float, nodes: int) -> float:
    """Faults of one class per second of the whole job."""
    prior, scale = PRIORS[loss], nodes if PRIORS[loss].per_node else 1
    return scale * (prior.faults + measured.faults.get(loss.value, 0)) / (prior.exposure_s + scale * trained_s)


# ---------------------------------------------------------------- the choice


def choose(spec: CheckpointSpec, measured: Measured, *, step_s: float, trained_s: float, nodes: int) -> Interval:
    """The intervals of a job on `nodes` nodes that was submitted `trained_s` ago. Values that `spec` sets are kept.

    `step_s` is the time of one step, 0 = not known yet.
    """
    store_s, store_reason = _store(spec, measured, trained_s, nodes)
    steps, reason = _steps(spec, measured, step_s, trained_s, nodes)
    return Interval(steps, store_s, "; ".join(filter(None, (reason, store_reason))), measured.saves, step_s > 0)


def differs(steps: int, before: int) -> bool:
    """Whether the difference is worth a change."""
    return max(steps, before) > CHANGE_MIN * min(steps, before)


def _steps(spec: CheckpointSpec, measured: Measured, step_s: float, trained_s: float, nodes: int) -> tuple[int, str]:
    if spec.interval_steps:
        return spec.interval_steps, f"every {spec.interval_steps} steps, as the job file says"
    if step_s <= 0:
        return STEPS_UNMEASURED, f"every {STEPS_UNMEASURED} steps to begin with: nothing is measured yet"
    if measured.saves == 0:
        interval_s, held = _bounded(STEPS_UNMEASURED * step_s, spec)
        steps = max(1, round(interval_s / step_s))
        return (
            steps,
            f"every {plural(steps, 'step')} ({_time(steps * step_s)}) to begin with: no save is measured yet{held}",
        )
    mtbf_s = 1 / sum(fault_rate(measured, loss, trained_s, nodes) for loss in Loss)
    best_s = daly(measured.stall_s, mtbf_s)
    interval_s, held = _bounded(best_s, spec)
    steps = max(1, round(interval_s / step_s))
    lost = 1 - goodput(steps * step_s, measured.stall_s, mtbf_s, measured.recovery_s)
    seen = sum(measured.faults.values())
    return steps, (
        f"every {plural(steps, 'step')} ({_time(steps * step_s)}): a save stalls {_time(measured.stall_s)}, a fault is "
        f"expected every {_time(mtbf_s)} ({seen} seen in {_time(trained_s)}, weighed with a prior), a recovery takes "
        f"{_time(measured.recovery_s)}; the best is {_time(best_s)}{held}, the expected loss {lost:.2%}"
    )


def _bounded(interval_s: float, spec: CheckpointSpec) -> tuple[float, str]:
    if interval_s < spec.interval_min_s:
        return spec.interval_min_s, f", held at interval_min_s ({spec.interval_min_s:g} s)"
    if interval_s > spec.interval_max_s:
        return spec.interval_max_s, f", held at interval_max_s ({spec.interval_max_s:g} s)"
    return interval_s, ""


def _store(spec: CheckpointSpec, measured: Measured, trained_s: float, nodes: int) -> tuple[float, str]:
    if not spec.store:
        return spec.store_interval_s or STORE_UNMEASURED_S, ""
    if spec.store_interval_s:
        return spec.store_interval_s, ""
    if not measured.upload_s:
        return STORE_UNMEASURED_S, f"to the object store every {_time(STORE_UNMEASURED_S)} until an upload is measured"
    rate = fault_rate(measured, Loss.COPIES, trained_s, nodes)
    best_s = max(young(STOLEN * measured.upload_s, rate), measured.upload_s)
    chosen_s = min(max(best_s, STORE_BOUNDS_S[0]), STORE_BOUNDS_S[1])
    return chosen_s, (
        f"to the object store every {_time(chosen_s)}: an upload takes {_time(measured.upload_s)}, and only it survives a "
        f"fault that is expected every {_time(1 / rate)}"
    )


def _time(seconds: float) -> str:
    """Format a duration: 0.085 s, 12 s, 4.8 min, 7.9 h, 12 d."""
    for unit, size in (("d", _DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
