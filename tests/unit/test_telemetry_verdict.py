"""What benchmarks.telemetry makes of its rounds."""

from __future__ import annotations

import pytest

from benchmarks.telemetry import Round, judged


def rounds(*ratios: float) -> list[Round]:
    return [Round((10.0, 12.0), (10.0 * ratio, 12.0 * ratio), metrics=1) for ratio in ratios]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((1.002, 1.002, 1.004, 1.004), "met"),
        ((1.01, 1.01, 1.012, 1.012), "missed"),
        ((0.95, 0.95, 1.03, 1.03), "too noisy to say"),
        ((0.999, 0.999, 0.96, 0.96), "too noisy to say"),
    ],
)
def test_a_verdict_is_given_where_the_pairs_agree(ratios: tuple[float, ...], verdict: str) -> None:
    assert f"aim ≤ 0.5%: {verdict}" in str(judged(rounds(*ratios))["verdict"])


def test_a_core_that_is_slower_cancels_out() -> None:
    slow_core = 1.1
    assert judged(rounds(1.003 * slow_core, 1.003 / slow_core))["more"] == pytest.approx(0.003)
