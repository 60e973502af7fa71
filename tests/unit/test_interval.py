"""The interval: published formulas and numbers, and a choice that says why."""

from __future__ import annotations

import math

import pytest

from holdfast.domain.job import CheckpointSpec
from holdfast.supervisor.core.rules.interval import (
    PRIORS,
    STEPS_UNMEASURED,
    STORE_UNMEASURED_S,
    Loss,
    Measured,
    choose,
    daly,
    differs,
    fault_rate,
    goodput,
    young,
)

AUTO = CheckpointSpec(interval_steps=0, interval_min_s=0.001, interval_max_s=1e6)
HOUR_S = 3600.0


def test_young_and_daly() -> None:
    assert young(30, 1 / 17280) == pytest.approx(1018.23, abs=0.01)
    assert daly(30, 17280) == pytest.approx(998.33, abs=0.01)
    assert daly(600, 1800) == pytest.approx(1096.9, abs=0.1)
    assert daly(5000, 1800) == 1800, "a save that takes longer than the time between faults"
    assert daly(60, 3.1 * HOUR_S) == pytest.approx(1118, abs=10)


def test_every_level_has_its_own_interval() -> None:
    levels = [(1.0, 0.8 / 17280), (20.0, 0.2 / 17280)]
    assert [young(cost, rate) for cost, rate in levels] == pytest.approx([207.8, 1859], abs=0.5)
    assert sum(math.sqrt(2 * rate * cost) for cost, rate in levels) == pytest.approx(0.03114, abs=1e-5)


def test_daly_is_where_the_loss_is_least() -> None:
    for stall_s, mtbf_s in ((30.0, 17280.0), (0.1, 1824.0), (600.0, 1800.0)):
        best = goodput(daly(stall_s, mtbf_s), stall_s, mtbf_s, 0.0)
        for factor in (0.8, 1.25):
            assert goodput(factor * daly(stall_s, mtbf_s), stall_s, mtbf_s, 0.0) < best


def test_expected_goodput() -> None:
    assert goodput(3600, 30, 17280, 1200) == pytest.approx(0.83142, abs=1e-5)
    assert goodput(600, 1, 17280, 120) == pytest.approx(0.97429, abs=1e-5)


def test_the_rate_moves_from_the_prior_to_what_is_seen() -> None:
    assert fault_rate(Measured(), Loss.NODE, 0.0, 2048) * 54 * 86400 == pytest.approx(358)
    calm = fault_rate(Measured(), Loss.LOCAL, 1000 * HOUR_S, 16)
    rough = fault_rate(Measured(faults={"local": 500}), Loss.LOCAL, 1000 * HOUR_S, 16)
    assert calm == pytest.approx(1 / (1000 * HOUR_S + PRIORS[Loss.LOCAL].exposure_s))
    assert rough == pytest.approx(0.5 / HOUR_S, rel=0.02)
    assert fault_rate(Measured(), Loss.COPIES, 0.0, 16) < fault_rate(Measured(), Loss.NODE, 0.0, 16) / 10


def test_before_anything_is_measured_it_says_so() -> None:
    blank = choose(AUTO, Measured(), step_s=0.0, trained_s=0.0, nodes=4)
    assert (blank.steps, blank.timed) == (STEPS_UNMEASURED, False)
    assert "nothing is measured yet" in blank.reason
    slow = CheckpointSpec(interval_steps=0, interval_max_s=600)
    timed = choose(slow, Measured(), step_s=30.0, trained_s=60.0, nodes=4)
    assert timed.steps == 20
    assert "no save is measured yet, held at interval_max_s (600 s)" in timed.reason


def test_the_choice_follows_stall_and_faults_and_says_why() -> None:
    measured = Measured().saved(3, 0.5).recovered(Loss.LOCAL, 2.0)
    choice = choose(AUTO, measured, step_s=0.5, trained_s=HOUR_S, nodes=128)
    mtbf_s = 1 / sum(fault_rate(measured, loss, HOUR_S, 128) for loss in Loss)
    assert choice.steps == round(daly(0.5, mtbf_s) / 0.5)
    assert "a save stalls 0.5 s" in choice.reason
    assert "1 seen in 60 min" in choice.reason
    assert "the expected loss" in choice.reason
    cheaper = choose(AUTO, Measured().saved(3, 0.005), step_s=0.5, trained_s=HOUR_S, nodes=128)
    assert cheaper.steps < choice.steps / 5
    calmer = choose(AUTO, measured, step_s=0.5, trained_s=1000 * HOUR_S, nodes=128)
    assert calmer.steps > choice.steps


def test_the_users_bounds_hold() -> None:
    bounds = CheckpointSpec(interval_steps=0, interval_min_s=5.0, interval_max_s=20.0)
    for stall_s in (1e-6, 0.1, 1e4):
        choice = choose(bounds, Measured().saved(10, stall_s), step_s=0.5, trained_s=HOUR_S, nodes=4)
        assert 5.0 <= choice.steps * 0.5 <= 20.0
    assert choose(bounds, Measured().saved(9, 1.0), step_s=90.0, trained_s=HOUR_S, nodes=4).steps == 1


def test_what_the_job_file_fixes_is_not_chosen() -> None:
    choice = choose(CheckpointSpec(20), Measured().saved(50, 9.0), step_s=0.1, trained_s=HOUR_S, nodes=4)
    assert choice.steps == 20
    assert choice.reason == "every 20 steps, as the job file says"


def test_the_store_has_its_own_interval() -> None:
    fixed = CheckpointSpec(20, store="file:///s", store_interval_s=77.0)
    assert choose(fixed, Measured().uploaded(9.0), step_s=0.1, trained_s=HOUR_S, nodes=4).store_s == 77.0
    auto = CheckpointSpec(20, store="file:///s", store_interval_s=0.0)
    blank = choose(auto, Measured(), step_s=0.1, trained_s=HOUR_S, nodes=4)
    assert blank.store_s == STORE_UNMEASURED_S
    assert "until an upload is measured" in blank.reason
    large = choose(auto, Measured().uploaded(10.0), step_s=0.1, trained_s=HOUR_S, nodes=12_500)
    small = choose(auto, Measured().uploaded(10.0), step_s=0.1, trained_s=HOUR_S, nodes=4)
    assert 60.0 <= large.store_s < small.store_s <= 3600.0
    assert choose(auto, Measured().uploaded(900.0), step_s=0.1, trained_s=HOUR_S, nodes=12_500).store_s >= 900.0


def test_measurements_forget_slowly() -> None:
    measured = Measured().saved(1, 1.0)
    for _ in range(30):
        measured = measured.saved(1, 0.1)
    assert measured.saves == 31
    assert measured.stall_s == pytest.approx(0.1, abs=0.01)


def test_a_change_must_be_worth_it() -> None:
    assert not differs(125, 100)
    assert differs(126, 100)
    assert differs(100, 126)
