"""Thresholds of the detectors that compare, each with its source. One frozen class per detector; tests and operators build
their own. Numbers without a reason to change them are constants in the detectors.

No value was fitted to the data that `make bench-detection` judges by: values are published rules, or follow from the wanted
false-positive rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerThresholds:
    """Steps of a window; excess as a share of the peers' median (0.1 = 10 % slower)."""

    window: int = 15  # a straggler is to be reported within 15 steps
    window_min: int = 8  # fewer steps are not judged
    floor: float = 0.10  # Greyhound (ATC'25): more than 10 % over the median of the group
    # One false rank in 10,000 rank-days at a 10-s step: 576 windows a day × 1e4 ranks → p ≈ 2e-7 → 5 σ of a normal.
    z: float = 5.0
    clip: float = 0.5  # the most that one step counts: a step of 10 × is one slow step, not a slow rank
    lasting: float = 0.6  # share of the window's steps that must show at least half of the floor
    missing: float = 0.2  # a step of which more ranks lack a report is not judged
    imbalance: float = 0.15  # the slowest rank over the median, or a stage over the median stage: worth a warning
    collective: float = 0.15  # growth of the time that even the last rank waits, as a share of the step
    quiet_steps: int = 200  # a rank that recovers and relapses within as many steps flaps
    over_steps: int = (
        3  # without a condition, which is withdrawn then; that one step shows none takes a part of the window
    )
    repeat_s: float = 600.0  # a straggler that stays slow is reported again


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericalThresholds:
    """Loss and gradient norm of a job, step by step."""

    history: int = 64  # finite steps that the next one is compared with
    history_min: int = 16
    z: float = 8.0  # robust standard deviations: heavy-tailed noise reaches 5 or 6 within a week of steps
    loss_factor: float = 1.25  # and at least as many times the median: the deviation of a flat loss is nearly 0
    grad_factor: float = 5.0  # ByteRobust (SOSP'25) looks at five times the usual gradient norm
    persist_steps: int = 5  # in a row without a finite loss: a loss scaler recovers sooner, a broken state never
    quiet_steps: int = 100  # a spike within as many steps of the last one is not reported
    repeat_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientThresholds:
    """Each rank's gradient norm before the reduce, against those of the same position in other replicas."""

    replicas_min: int = 3  # of two that differ, either may be the odd one
    factor: float = 5.0  # ByteRobust (SOSP'25) looks at five times the usual gradient norm
    z: float = 8.0  # robust standard deviations of the other ranks' scatter, as for the job's own norm
    history: int = 64  # steps from which the scatter is taken
    history_min: int = 16
    share_max: float = 0.1  # of the ranks: if more stand out at once, the cause is not a single device
    quiet_steps: int = 1000
    repeat_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradationThresholds:
    """Rates over `window_s`. All lead to warnings."""

    window_s: float = 600.0  # gpud looks at throttling over ten minutes
    points: int = 30  # per window; NVRx judges a link by its last 30 readings
    busy_share: float = 0.5  # NVRx: a port is bad when more than 15 of its last 30 readings show new errors
    throttled_share: float = 0.05  # of the time: the straggler detector can notice a loss of 5 % of the clock rate
    pcie_per_lane_s: float = 0.96 / 60  # DCGM: the bit error rate that PCIe 4 allows; twice that from PCIe 5 on
    symbol_errors_s: float = 10.0  # NVSentinel
    link_recoveries_s: float = 5.0 / 60  # NVSentinel
    slow_restarts_s: float = 10.0  # NVSentinel
    full_from: float = 0.7  # share in use from which the growth of a disk or memory is judged
    disk_full_in_s: float = 6 * 3600.0  # a working shift
    memory_full_in_s: float = 1800.0
    quiet_s: float = 6 * 3600.0  # a condition that recurs within this time is reported at its third occurrence
    repeat_s: float = 600.0
