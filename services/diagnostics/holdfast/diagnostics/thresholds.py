"""Thresholds of the detectors that compare measurements, each with its source. One frozen class per detector; tests and
operators construct their own values. Numbers that need no tuning are constants in the detectors.

No threshold was fitted to the data that `make bench-detection` measures with. Each is a published rule, or follows from the
desired false-positive rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerThresholds:
    """Windows are counted in steps. Excess is a share of the comparison group's median (0.1 = 10 % slower)."""

    window: int = 15  # a straggler is to be reported within 15 steps
    window_min: int = 8  # windows with fewer steps are not judged
    floor: float = 0.10  # smallest excess of a straggler; Greyhound (ATC'25): 10 % over the median of the group
    # One false rank in 10,000 rank-days at a 10-s step: 576 windows a day × 1e4 ranks → p ≈ 2e-7 → 5 σ of a normal.
    z: float = 5.0
    clip: float = 0.5  # limit of a single step's excess: one step that takes 10 times as long does not make a slow rank
    lasting: float = 0.6  # share of the window's steps whose excess must be at least half of the floor
    missing: float = 0.2  # a step is not judged if a larger share of the ranks lacks a report
    imbalance: float = 0.15  # excess of the slowest rank, or of a stage, from which a warning is reported
    collective: float = 0.15  # growth of the wait of the rank that waits least, as a share of the step
    quiet_steps: int = 200  # a rank that recovers and becomes slow again within this many steps is flapping
    # steps without the condition after which it is withdrawn, in addition to the delay by the window
    over_steps: int = 3
    repeat_s: float = 600.0  # a straggler that stays slow is reported again


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericalThresholds:
    """Loss and gradient norm of a job, step by step."""

    history: int = 64  # steps with finite values that the next step is compared with
    history_min: int = 16
    z: float = 8.0  # robust standard deviations: heavy-tailed noise reaches 5 or 6 within a week of steps
    loss_factor: float = 1.25  # a spike must also be this many times the median: a flat loss has no deviation
    grad_factor: float = 5.0  # ByteRobust (SOSP'25) uses five times the usual gradient norm
    persist_steps: int = 5  # steps in a row without a finite loss; a loss scaler recovers sooner, a broken state never
    quiet_steps: int = 100  # a spike within this many steps of the last spike is not reported
    repeat_s: float = 600.0
    # A value that is not a number again within `quiet_steps` puts the state in doubt for so long.
    doubt_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientThresholds:
    """Each rank's gradient norm before the reduce, compared with ranks of the same model-parallel index in other replicas."""

    replicas_min: int = 3  # if two replicas differ, either may be wrong
    factor: float = 5.0  # ByteRobust (SOSP'25) uses five times the usual gradient norm
    z: float = 8.0  # robust standard deviations of the other ranks' scatter, as for the job's own norm
    history: int = 64  # steps over which the scatter is estimated
    history_min: int = 16
    share_max: float = 0.1  # of the ranks: if more ranks are outliers at once, the cause is not a single device
    quiet_steps: int = 1000
    repeat_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradationThresholds:
    """Limits of rates over `window_s`. All conditions lead to warnings."""

    window_s: float = 600.0  # gpud judges throttling over ten minutes
    points: int = 30  # readings per window; NVRx judges a link by its last 30 readings
    busy_share: float = 0.5  # NVRx: a port is bad if more than 15 of its last 30 readings show new errors
    throttled_share: float = 0.05  # of the time: the straggler detector can detect a loss of 5 % of the clock rate
    pcie_per_lane_s: float = 0.96 / 60  # DCGM: the bit error rate that PCIe 4 allows; from PCIe 5 on twice this rate
    symbol_errors_s: float = 10.0  # NVSentinel
    link_recoveries_s: float = 5.0 / 60  # NVSentinel
    slow_restarts_s: float = 10.0  # NVSentinel
    full_from: float = 0.7  # share in use above which the growth of a disk or of memory is judged
    disk_full_in_s: float = 6 * 3600.0  # about one working shift
    memory_full_in_s: float = 1800.0
    quiet_s: float = 6 * 3600.0  # a condition that recurs within this time is reported at its third occurrence
    repeat_s: float = 600.0
