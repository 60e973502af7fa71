"""Checksums, observed steps and local gradient norms on their way from a worker's note to the signal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.agent.workers.progress import Progress
from holdfast.domain import worker
from holdfast.domain.notes import DIGEST_CHARS_MAX, ObservedStepsNote, ReplicaCheckNote, StepNote, parse
from holdfast.domain.signals import ObservedSteps, ReplicaChecks

WHO = {"job": "gpt", "generation": 2, "rank": 4}
CHECK: dict[str, Any] = {"step": 7, "digest": "ab12", "took_s": 0.004, "restored": False}
STEP: dict[str, Any] = {
    "step": 7, "started_at": 10.0, "ended_at": 11.5, "data_s": 0.1, "stall_s": 0, "tokens": 64, "loss": 2.5, "grad_norm": None,
}  # fmt: skip


def progress() -> Progress:
    return Progress(node="n0", job="gpt", generation=2, ranks=(4,), step=0, at=10.0)


def test_a_checksum_becomes_a_column() -> None:
    folded = progress()
    assert folded.take_checks(11.0) is None
    for more in ({}, {"step": 8, "restored": True}):
        parsed = parse(worker.encode("replica_check", **{**WHO, **CHECK, **more}))
        assert isinstance(parsed, ReplicaCheckNote)
        folded.fold(parsed)
    assert folded.take_checks(12.0) == ReplicaChecks(
        "n0", 12.0, "gpt", 2, (4, 4), (7, 8), ("ab12", "ab12"), (0.004, 0.004), (False, True)
    )
    assert folded.take_checks(13.0) is None


@pytest.mark.parametrize(
    "wrong", [{"step": -1}, {"took_s": math.nan}, {"took_s": "x"}, {"step": None}, {"rank": 1.5}], ids=str
)
def test_a_checksum_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    assert parse(worker.encode("replica_check", **{**WHO, **CHECK, **wrong})) is None


def test_a_checksum_without_end_is_cut() -> None:
    parsed = parse(worker.encode("replica_check", **{**WHO, **CHECK, "digest": "a" * 50_000}))
    assert isinstance(parsed, ReplicaCheckNote)
    assert len(parsed.digest) == DIGEST_CHARS_MAX


def test_local_norms_travel_only_when_somebody_reports_one() -> None:
    for norms, column in (([None, None], ()), ([None, 2.5], (math.nan, 2.5)), ([math.nan], (math.inf,))):
        folded = progress()
        for number, norm in enumerate(norms, start=1):
            parsed = parse(worker.encode("step", **{**WHO, **STEP, "step": number}, local_grad_norm=norm))
            assert isinstance(parsed, StepNote)
            folded.fold(parsed)
        columns = folded.take_steps(12.0)
        assert columns is not None
        assert columns.local_grad_norm == pytest.approx(column, nan_ok=True)


OBSERVED: dict[str, Any] = {"step": 16, "steps": 8, "started_at": 10.0, "ended_at": 11.0, "comm_wait_s": 0.25}


def test_observed_steps_are_counted_and_only_those_with_a_measured_wait_are_compared() -> None:
    """Ranks 4 and 5 of a script that reports no steps; rank 5 has begun later."""
    folded = Progress(node="n0", job="gpt", generation=2, ranks=(4, 5), step=0, at=9.0)
    assert (folded.observed, folded.observed_since) == ((0, 0.0), None)
    for rank, more in ((4, {}), (4, {"step": 24, "ended_at": 12.0}), (5, {"ended_at": 14.0, "steps": 16})):
        known = {**WHO, **OBSERVED, "rank": rank, **more, "comm_wait_s": None}
        parsed = parse(worker.encode("observed_steps", **known))
        assert isinstance(parsed, ObservedStepsNote)
        folded.fold(parsed)
    assert folded.observed == (16, 0.25)
    assert folded.sample(15.0, {}).observed == (24, 16)
    assert folded.observed_since == 14.0
    assert folded.silent
    assert folded.take_observed(15.0) is None, "no wait is known, so nothing can be compared"


def test_observed_steps_become_columns_and_are_no_sign_of_progress() -> None:
    folded = progress()
    assert folded.take_observed(11.0) is None
    for more in ({}, {"step": 24, "started_at": 11.0, "ended_at": 11.5}):
        parsed = parse(worker.encode("observed_steps", **{**WHO, **OBSERVED, **more}))
        assert isinstance(parsed, ObservedStepsNote)
        folded.fold(parsed)
    assert folded.silent
    assert (folded.step_of(4), folded.silent_s(1000.0), folded.stepping_since) == (0, 0.0, None)
    assert folded.take_observed(12.0) == ObservedSteps(
        "n0", 12.0, "gpt", 2, (4, 4), (16, 24), (8, 8), (10.0, 11.0), (11.0, 11.5), (0.25, 0.25)
    )
    assert folded.take_observed(13.0) is None
    assert folded.take_steps(13.0) is None


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"steps": 1 << 40}, {"ended_at": 9.0}, {"comm_wait_s": "?"}, {"comm_wait_s": -1}, {"step": 1.5}],
    ids=str,
)
def test_observed_steps_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    assert parse(worker.encode("observed_steps", **{**WHO, **OBSERVED, **wrong})) is None
