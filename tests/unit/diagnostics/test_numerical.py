"""Numerical health: NaN and spikes are said, with numbers; noise, a falling loss and a loss scaler are not."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.numerical import Numerical, NumericalState
from holdfast.domain.findings import Finding, FindingKind, Severity, StepRecord
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, StepColumns
from holdfast.supervisor.core.model.job import DOUBT_STEPS_MAX

T0 = 1_700_000_000.0


def start(detector: Alone[NumericalState], generation: int) -> None:
    mesh = Mesh.of({"dp": 2})
    detector.observe(GenerationStarted("n0", T0, "gpt", generation, mesh, (0, 1), HangSpec()), T0)


def started(generation: int) -> Alone[NumericalState]:
    detector = Alone(Numerical())
    start(detector, generation)
    return detector


def run(
    losses: Iterable[float], grads: Iterable[float] | None = None, *, generation: int = 1, step_s: float = 1.0
) -> list[Finding]:
    """A job of two ranks, rank 1 reporting a loss and a norm per step. A NaN travels as the agent sends it: +inf."""
    detector, found, losses = started(generation), list[Finding](), list(losses)
    norms = [math.nan] * len(losses) if grads is None else list(grads)
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        at = T0 + step * step_s
        item = StepColumns(
            "n0", at, "gpt", generation, (0, 1), (step,) * 2, (at - 1,) * 2, (at,) * 2,
            (0.0,) * 2, (0.0,) * 2, (1,) * 2, (math.nan, loss), (math.nan, norm),
        )  # fmt: skip
        found += detector.observe(item, at)
        found += detector.observe(StepRecord("gpt", generation, step, 2, at - 1, at, 2, loss, 0.0), at)
    return found


def falling(steps: int, seed: int = 0, noise: float = 0.03) -> list[float]:
    rng = np.random.default_rng(seed)
    return [2.0 + 8.0 * math.exp(-step / 100) * (1 + rng.normal(0, noise)) for step in range(steps)]


@settings(max_examples=30)
@given(st.integers(0, 100_000))
def test_a_healthy_loss_says_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert run(falling(400, seed, 0.08), rng.lognormal(0, 0.3, 400)) == []


def test_a_spike_is_a_warning_with_its_numbers() -> None:
    losses = falling(100)
    (finding,) = run([*losses, losses[-1] * 2, *losses[-20:]])
    assert (finding.kind, finding.severity, finding.rank) == (FindingKind.NUMERICAL, Severity.WARNING, None)
    assert finding.evidence["step"] == "101"
    assert float(finding.evidence["z"]) > 8


def test_a_gradient_spike_is_a_warning() -> None:
    (finding,) = run(falling(100), [*np.random.default_rng(0).lognormal(0, 0.2, 99), 50.0])
    assert "gradient norm of 50" in finding.summary


def test_one_step_without_a_number_is_a_warning_five_are_an_error() -> None:
    losses = falling(40)
    warning, over = run([*losses, math.inf, *losses[-10:]])
    assert (warning.severity, warning.verified_step) == (Severity.WARNING, 39)
    assert (over.severity, over.contradicts) == (Severity.INFO, warning.id)
    found = run([*losses, *[math.inf] * 8])
    assert [f.severity for f in found] == [Severity.WARNING, Severity.ERROR]
    assert found[1].evidence["verified_step"] == "39", "the loss of step 40 is that of the state after step 39"
    assert found[1].evidence["ranks"] == "1"
    assert found[1].recommended_actions[0].value == "stop_job"


def test_a_loss_scaler_is_no_error() -> None:
    found = run(falling(60), [1.0] * 30 + [math.inf] * 10 + [1.0] * 20)
    assert [f.severity for f in found] == [Severity.WARNING, Severity.INFO]
    assert found[0].verified_step == 30, "the state after step 31 may have been changed by its gradient"
    assert found[1].evidence["step"] == "41"


def test_spikes_that_come_again_and_again_are_said_once_and_then_to_come_again() -> None:
    losses = falling(600)
    for step in range(100, 600, 20):
        losses[step] *= 2
    assert len(run(losses)) == 2


@pytest.mark.parametrize("garbage", [math.nan, -math.inf, 1e308, -1e308, 0.0])
def test_garbage_breaks_nothing(garbage: float) -> None:
    run([1.0] * 20 + [garbage] * 20 + [1.0] * 20, [garbage] * 60)


def test_a_restart_that_is_well_again_ends_it() -> None:
    detector = started(1)
    for generation, loss in ((1, math.inf), (2, 1.0), (1, math.inf)):
        start(detector, generation)
        for step in range(1, 5):
            record = StepRecord("gpt", generation, step, 1, T0, T0 + step, 1, loss, 0.0)
            found = detector.observe(record, T0 + step)
            assert all(finding.severity is Severity.WARNING for finding in found)


def test_steps_that_are_done_again_after_a_rollback_are_no_spike() -> None:
    """From step 300 back to step 20: the loss is what it was there, ten times what it had become."""
    losses = [2.0 * math.exp(-step / 100) for step in range(300)]
    norms = [20.0 * math.exp(-step / 60) for step in range(300)]
    detector, found = Alone(Numerical()), list[Finding]()
    for generation, steps in ((1, range(1, 301)), (2, range(21, 200))):
        start(detector, generation)
        for step in steps:
            at = T0 + 1000 * generation + step
            loss, norm = losses[step - 1], norms[step - 1]
            item = StepColumns(
                "n0", at, "gpt", generation, (0,), (step,), (at - 1,), (at,), (0.0,), (0.0,), (1,), (loss,), (norm,)
            )
            found += detector.observe(item, at)
            record = StepRecord("gpt", generation, step, 1, at - 1, at, 1, loss, 0.0)
            found += detector.observe(record, at)
    assert found == []


def test_a_lasting_nan_is_dated_by_its_first_step() -> None:
    found = run([*falling(50), *[math.nan] * 6])
    lasting = next(finding for finding in found if finding.severity is Severity.ERROR)
    assert lasting.since == T0 + 51


def doubts(found: list[Finding], steps: int) -> list[int | None]:
    """For each step from 1, the verified step that the standing warning, or the error, names after it."""
    standing, at_step = None, list[int | None]()
    lasting: int | None = None  # the supervisor judges when it is over
    by_step: dict[int, list[Finding]] = {}
    for finding in found:
        by_step.setdefault(int(finding.evidence["step"]), []).append(finding)
    for step in range(1, steps + 1):
        for finding in by_step.get(step, ()):
            if finding.contradicts:
                assert standing is not None
                assert finding.contradicts == standing.id
                standing = None
            elif finding.severity is Severity.ERROR:
                lasting = finding.verified_step
            elif finding.verified_step is not None:
                standing = finding
        at_step.append(lasting if standing is None else standing.verified_step)
    return at_step


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=150),
    st.sampled_from([0.01, 1.0, 30.0]),
)
@example([(True, False)] * 5 + [(False, False)], 0.01)  # the warning is withdrawn, and not the error of the fifth step
def test_no_step_without_a_number_is_without_a_doubt_and_no_doubt_is_about_a_verified_state(
    bad: list[tuple[bool, bool]], step_s: float
) -> None:
    losses = [1.0, 1.0, *(math.inf if loss else 1.0 for loss, _ in bad)]
    norms = [1.0, 1.0, *(math.inf if norm else 1.0 for _, norm in bad)]
    found = run(losses, norms, step_s=step_s)
    verified = 0
    for step, (loss, norm, doubt) in enumerate(zip(losses, norms, doubts(found, len(losses)), strict=True), start=1):
        if math.isfinite(loss):
            verified = step - 1
        if not (math.isfinite(loss) and math.isfinite(norm)):
            assert doubt is not None, f"step {step}"
            assert doubt <= verified
            assert step - doubt < DOUBT_STEPS_MAX or verified == doubt, "the supervisor drops older doubts"


def test_a_second_step_without_a_number_puts_the_state_in_doubt_again() -> None:
    losses = falling(80)
    losses[39] = losses[59] = losses[60] = math.nan
    warning, over, again = run(losses)
    assert (warning.verified_step, over.contradicts) == (38, warning.id)
    assert (again.severity, again.verified_step, again.evidence["times"]) == (Severity.WARNING, 58, "2")
    later = run([*losses, *[1.0] * 60])[-1]
    assert (later.contradicts, later.evidence["step"]) == (again.id, "120"), "a minute, because it has come again"


def test_values_that_come_and_go_are_not_reported_at_every_step() -> None:
    losses = [math.nan if step % 2 else 1.0 for step in range(600)]
    assert len(run([1.0, *losses])) <= 2 * 600 / 60 + 2, "one-second steps: a warning and its end per minute"
    assert len(run([1.0, *losses], step_s=0.01)) <= 2 * 600 / 100 + 2


def test_a_spike_within_a_doubt_does_not_end_it() -> None:
    norms = [*np.random.default_rng(0).lognormal(0, 0.2, 40), math.inf, 50.0, math.inf, math.inf]
    found = run([*falling(40), 2.0, math.inf, 2.0, 2.0], norms)
    assert doubts(found, 44)[40:] == [40, 40, 40, 40]


@pytest.mark.parametrize("steps", [1, 6])
def test_after_a_rollback_a_value_that_is_not_a_number_is_reported_again(steps: int) -> None:
    detector, found = Alone(Numerical()), list[Finding]()
    for generation, first in ((1, 1), (2, 30)):
        start(detector, generation)
        for step in range(first, 60 + steps):
            at = T0 + 1000 * generation + step
            loss = 1.0 if step < (60 if generation == 1 else 40) else math.nan
            found += detector.observe(StepRecord("gpt", generation, step, 1, at - 1, at, 1, loss, 0.0), at)
    by_generation = [[(f.severity, f.verified_step) for f in found if f.generation == each] for each in (1, 2)]
    lasting = [(Severity.ERROR, 58)] if steps > 4 else []
    assert by_generation[0] == [(Severity.WARNING, 58), *lasting]
    assert by_generation[1][:2] == [(Severity.WARNING, 38), (Severity.ERROR, 38)]


def test_a_gradient_after_a_rollback_names_no_step_of_the_abandoned_lineage() -> None:
    detector, found = Alone(Numerical()), list[Finding]()
    for generation, steps in ((1, range(1, 301)), (2, range(21, 30))):
        start(detector, generation)
        for step in steps:
            at, norm = T0 + 1000 * generation + step, math.inf if (generation, step) == (2, 25) else 1.0
            item = StepColumns(
                "n0", at, "gpt", generation, (0,), (step,), (at - 1,), (at,), (0.0,), (0.0,), (1,), (1.0,), (norm,)
            )
            found += detector.observe(item, at)
            found += detector.observe(StepRecord("gpt", generation, step, 1, at - 1, at, 1, 1.0, 0.0), at)
    assert [f.verified_step for f in found] == [24, None]
