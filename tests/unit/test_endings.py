"""Endings of workers from public threads: a user's bug stops the job after at most a restart and a swap, nothing else does."""

from __future__ import annotations

import pytest
from endings import Ending, Trial, load

from holdfast.domain.incidents import ActionKind
from holdfast.supervisor.protocol import JobPhase

ALL = [*load("development"), *load("held_out")]
OUTAGE_S = 600.0


def of(truth: str) -> list[Ending]:
    return [ending for ending in ALL if ending.truth == truth and not ending.missed]


def test_the_corpus_has_two_halves_with_a_thread_for_each_ending() -> None:
    halves = [load("development"), load("held_out")]
    assert min(map(len, halves)) >= 20
    assert sum(map(len, halves)) >= 40
    assert all(ending.origin.startswith("https://") for ending in ALL)
    messages = [(ending.error.type, ending.error.message) for ending in ALL]
    assert len(set(messages)) == len(messages)
    assert not any(ending.missed for ending in halves[0])
    for half in halves:
        assert {ending.truth for ending in half} == {"user", "node", "outage"}


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("rank", [1, None], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("ending", of("user"), ids=str)
def test_a_bug_of_the_user_s_stops_the_job_after_a_restart_and_a_swap_at_most(
    ending: Ending, rank: int | None, spares: int
) -> None:
    trial = Trial(spares=spares)
    trial.fails(ending, rank, lambda trial: True)
    assert trial.job.phase is JobPhase.FAILED
    assert trial.failures <= 3
    assert trial.swaps <= 1
    assert sum(trial.pauses_s) == pytest.approx(0.0, abs=1.0), "nobody waits for a bug to pass"
    assert all(node.faults == () or not node.quarantined for node in trial.fleet.state.nodes.values())


@pytest.mark.parametrize("ending", of("node"), ids=str)
def test_what_one_node_s_own_environment_does_is_cured_by_a_swap(ending: Ending) -> None:
    trial = Trial(spares=1)
    trial.fails(ending, 1, lambda trial: "n1" in trial.fleet.nodes())
    assert trial.job.phase is not JobPhase.FAILED, trial.job.reason
    assert "n1" not in trial.fleet.nodes()
    assert trial.failures <= 2
    assert not trial.fleet.state.nodes["n1"].quarantined


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("rank", [1, None], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("ending", of("outage"), ids=str)
def test_an_outage_of_ten_minutes_stops_nothing(ending: Ending, rank: int | None, spares: int) -> None:
    trial = Trial(spares=spares)
    until = trial.fleet.now + OUTAGE_S
    trial.fails(ending, rank, lambda trial: trial.fleet.now < until)
    assert trial.job.phase is not JobPhase.FAILED, trial.job.reason
    assert trial.failures < 15, "tries are apart"
    assert all(not node.quarantined for node in trial.fleet.state.nodes.values())


def test_a_service_that_never_comes_back_stops_the_job_after_hours_and_says_so() -> None:
    ending = next(ending for ending in of("outage") if ending.step == 0)
    trial = Trial(spares=0)
    trial.fails(ending, None, lambda trial: True)
    assert trial.job.phase is JobPhase.FAILED
    assert "24 attempts in a row without progress" in trial.job.reason
    assert 2 * 3600 < sum(trial.pauses_s) < 4 * 3600
    assert trial.pauses_s[:4] == pytest.approx([0.0, 5.0, 10.0, 20.0], abs=0.5)


def test_the_same_exception_on_one_node_only_tries_a_spare_before_the_stop() -> None:
    ending = of("user")[0]
    trial = Trial(spares=1)
    trial.fails(ending, 1, lambda trial: True)
    decided = [incident.action.kind for incident in trial.fleet.state.closed if incident.action is not None]
    assert decided == [ActionKind.RESTART, ActionKind.HOT_SWAP, ActionKind.STOP]
    trial = Trial(spares=1)
    trial.fails(ending, None, lambda trial: True)
    decided = [incident.action.kind for incident in trial.fleet.state.closed if incident.action is not None]
    assert decided == [ActionKind.RESTART, ActionKind.STOP], "the ranks of several nodes have shown it already"
