"""Checksums and local gradient norms on their way from a worker's note to the signal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.agent.workers.progress import Progress
from holdfast.domain import worker
from holdfast.domain.notes import DIGEST_CHARS_MAX, ReplicaCheckNote, StepNote, parse
from holdfast.domain.signals import ReplicaChecks

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
