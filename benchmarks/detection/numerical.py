"""Suite `numerical`: generated losses and gradient norms, without and with one fault."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.score import Score
from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.numerical import Numerical
from holdfast.domain.findings import Finding, Severity, StepRecord
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, StepColumns

RUNS = 80  # for each kind
STEPS = 400
_T0 = 1_700_000_000.0
_FAULTS = ("loss spike", "gradient spike", "NaN for a step", "NaN for good")

Series = NDArray[np.float64]


def suite(rng: np.random.Generator) -> Score:
    score = Score("numerical", unit="steps")
    clean = score.row("clean")
    for _ in range(RUNS):
        found = watch(*_healthy(rng))
        if found:
            clean.fail(found[0].summary, wrong=len(found), spoiled=True)
        else:
            clean.clean += 1
    for fault in _FAULTS:
        row = score.row(fault)
        for _ in range(RUNS):
            loss, grad = _healthy(rng)
            at = int(rng.integers(100, STEPS - 50))
            match fault:
                case "loss spike":
                    loss[at : at + 3] *= rng.uniform(1.6, 4.0)
                case "gradient spike":
                    grad[at] *= rng.uniform(12, 100)
                case "NaN for a step":
                    loss[at] = math.inf  # as agents send a NaN
                case _:
                    loss[at:] = math.inf
            _judge(row, fault, watch(loss, grad), at + 1)
    return score.total()


def _judge(row: Score, fault: str, found: list[Finding], step: int) -> None:
    wanted = Severity.ERROR if fault == "NaN for good" else Severity.WARNING
    near = [one for one in found if 0 <= int(one.evidence["step"]) - step <= 10]
    hits = [one for one in near if one.severity is wanted]
    if hits:
        row.hit(int(hits[0].evidence["step"]) - step)
    else:
        row.fail(f"{fault} at step {step}: {[one.summary for one in found]}", missed=1)
    unexpected = (
        len(found) - len(near) + sum(one.severity is Severity.ERROR and wanted is Severity.WARNING for one in near)
    )
    if unexpected:
        row.fail(f"{fault} at step {step}: {[one.summary for one in found]}", wrong=unexpected)


def _healthy(rng: np.random.Generator) -> tuple[Series, Series]:
    """A loss that falls with noise, and heavy-tailed gradient norms."""
    step = np.arange(STEPS)
    floor, height, scale = rng.uniform(1.5, 3), rng.uniform(2, 9), rng.uniform(40, 300)
    loss = (floor + height * np.exp(-step / scale)) * (1 + rng.normal(0, rng.uniform(0.005, 0.05), STEPS))
    return loss, rng.uniform(0.1, 3) * rng.lognormal(0, rng.uniform(0.1, 0.4), STEPS)


def watch(loss: Series, grad: Series) -> list[Finding]:
    detector = Alone(Numerical())
    detector.observe(GenerationStarted("n0", _T0, "job", 1, Mesh.of({"dp": 1}), (0,), HangSpec()), _T0)
    found: list[Finding] = []
    for step, (one, norm) in enumerate(zip(loss.tolist(), grad.tolist(), strict=True), start=1):
        at = _T0 + step
        item = StepColumns("n0", at, "job", 1, (0,), (step,), (at - 1,), (at,), (0.0,), (0.0,), (1,), (one,), (norm,))
        found += detector.observe(item, at)
        found += detector.observe(StepRecord("job", 1, step, 1, at - 1, at, 1, one, 0.0), at)
    return found
