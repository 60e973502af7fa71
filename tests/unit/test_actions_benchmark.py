"""Suite `actions` of the detection benchmark: what it takes for right, how it counts, and that it can say no."""

from __future__ import annotations

import csv
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from benchmarks.detection import actions, actions_noise
from benchmarks.detection.actions_expected import (
    NVLINK5,
    SITUATIONS,
    Rung,
    Situation,
    cases,
    codes_in,
    right_action,
    rungs,
)
from benchmarks.detection.actions_warnings import WARNINGS
from benchmarks.detection.score import Score
from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import ActionKind

ABLE, POOR = Situation(True, True, 1), Situation(False, False, 0)
BY_NAME = {case.name: case for case in cases()}
WARNED = {case.name: case for case in WARNINGS}


def test_every_code_of_the_catalogue_has_a_rung() -> None:
    text = resources.files("holdfast.diagnostics.catalogue").joinpath("xid.csv").read_text(encoding="utf-8")
    codes = {int(row["xid"]) for row in csv.DictReader(text.splitlines()[1:])}
    assert rungs().keys() | set(NVLINK5) | {154} == codes
    assert len(BY_NAME) == len(cases()) > 180
    assert list(codes_in("1-3 7")) == [1, 2, 3, 7]


def test_every_kind_of_warning_is_judged() -> None:
    never_warnings = {
        FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION, FindingKind.REPEATED_EXCEPTION, FindingKind.RANKS_MISSING,
    }  # fmt: skip
    assert {case.kind for case in WARNINGS} == set(FindingKind) - never_warnings


def test_what_is_right_depends_on_what_the_node_and_the_fleet_can_do() -> None:
    assert len(set(SITUATIONS)) == 12
    for situation in SITUATIONS:
        reset = right_action(Rung.RESET, situation, ended=False)
        assert (reset is ActionKind.GPU_RESET) is situation.resets
        assert right_action(Rung.NOTHING, situation, ended=False) is None
    assert right_action(Rung.RESET_LATER, ABLE, ended=False) is ActionKind.HOT_SWAP
    assert right_action(Rung.RESET_LATER, POOR, ended=False) is None
    assert right_action(Rung.REPLACE, POOR, ended=False) is ActionKind.SCALE_DOWN
    assert right_action(Rung.REBOOT, replace(POOR, minimum=True), ended=False) is ActionKind.WAIT
    assert right_action(Rung.RESTART_IF_ENDED, POOR, ended=True) is ActionKind.RESTART


def counts(score: Score) -> tuple[int, int, int, int, int]:
    return score.hits, score.wrong, score.missed, score.clean, score.spoiled


@pytest.mark.parametrize(
    "name", ["13", "45", "48", "63", "79", "94", "151", "149 Nonfatal", "149 Fatal", "154 0x4 (Drain and Reset)"]
)
@pytest.mark.parametrize("situation", [ABLE, POOR], ids=str)
def test_codes_of_each_rung(name: str, situation: Situation) -> None:
    score = Score("actions")
    actions.judge(score, BY_NAME[name], situation, ended=False)
    assert not score.mistakes
    assert score.cases == 1


def test_an_action_that_is_not_the_rung_is_wrong_and_missed() -> None:
    score = Score("actions")
    actions.judge(score, replace(BY_NAME["79"], rung=Rung.RESET), ABLE, ended=False)
    assert counts(score) == (0, 1, 1, 0, 0)
    assert score.mistakes == ["79 (resets and boots, a spare): hot_swap instead of gpu_reset"]
    score = Score("actions")
    actions.judge(score, replace(BY_NAME["48"], rung=Rung.NOTHING), ABLE, ended=False)
    assert counts(score) == (0, 1, 0, 0, 1)
    score = Score("actions")
    actions.judge(score, replace(BY_NAME["92"], rung=Rung.RESTART), ABLE, ended=False)
    assert counts(score) == (0, 0, 1, 0, 0)


def test_what_agents_are_ordered_is_judged_as_well() -> None:
    """The right action, and yet the machine must not be booted for it."""
    score = Score("actions")
    actions.judge(score, replace(BY_NAME["151"], rung=Rung.RESET), replace(ABLE, resets=False), ended=False)
    assert not score.mistakes, "a reset that is not possible may be a boot"
    actions.judge(score, replace(BY_NAME["79"], rung=Rung.SWAP_LATER), ABLE, ended=False)
    assert "boots of ['n1']" in score.mistakes[0]


@pytest.mark.parametrize(
    "name", ["row remap pending", "NVMe timeout", "port flaps", "maintenance", "gradient of one rank"]
)
def test_warnings(name: str) -> None:
    score = Score("actions")
    for situation in (ABLE, POOR):
        actions.judge_warning(score, WARNED[name], situation)
    assert not score.mistakes
    assert score.cases == 2


def test_a_warning_that_no_detector_reports_is_missed() -> None:
    score = Score("actions")
    actions.judge_warning(score, replace(WARNED["NVMe timeout"], drive=lambda fleet: None), ABLE)
    assert counts(score) == (0, 0, 1, 0, 0)


def test_noise_changes_runs_only_with_a_reason() -> None:
    score = Score("noise")
    actions_noise.judge(score, np.random.default_rng(3), hours=400.0, nodes=100)
    assert score.facts["false_planned_changes_per_day"] == 0.0
    assert sum(score.facts["findings_per_day"].values()) > 0


def test_a_change_without_a_reason_is_counted() -> None:
    noise = actions_noise.Noise(np.random.default_rng(1), nodes=20)
    noise.now += 36_000.0
    # A rank that is called slow for two hours, and never was: of its node nothing is noted.
    noise._slow_rank("n3", actions_noise.Condition("slow", noise.now, noise.now + 7200.0), 0.4, 0)
    noise.run(12.0)
    assert dict(noise.evicted) == {"false": 1}
    assert noise.mistakes


def test_a_rank_that_is_called_slow_twice_for_a_moment_costs_no_change() -> None:
    noise = actions_noise.Noise(np.random.default_rng(1), nodes=20)
    noise.now += 36_000.0
    noise._slow_rank("n3", None, 0.4, 0)
    noise.at(noise.now + 600.0, lambda: noise._slow_rank("n3", None, 0.4, 0))
    noise.run(12.0)
    assert not noise.evicted
