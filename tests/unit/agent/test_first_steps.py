"""When an agent reports that the ranks of a generation step, of scripts that report all, some or none of their steps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from agent_harness import prepare_order

from holdfast.agent.workers.generation import LocalGeneration
from holdfast.agent.workers.worker import Exit, WorkerIdentity
from holdfast.diagnostics.detectors.exit_cause import earlier_by
from holdfast.domain.notes import Note, ObservedStepsNote, PhaseNote, Sender, StepNote
from holdfast.domain.signals import Phase, WorkerExited

AFTER_S = 5.0


class Ranks:
    """Two ranks of one node, started at second 0."""

    def __init__(self, first_message_s: float = 0.0) -> None:
        order = replace(prepare_order("j", "train.py", nproc=2), first_message_s=first_message_s)
        self.generation = LocalGeneration("node-0", order, Path("/logs"))
        self.generation.workers = {
            rank: SimpleNamespace(  # type: ignore[misc]
                alive=True, expected=False, exit=None, pid=100 + rank
            )
            for rank in (0, 1)
        }
        self.generation.begin(0.0)

    def launched(self) -> Ranks:
        """Both use the library."""
        for rank in (0, 1):
            self.generation.fold(PhaseNote(self._sender(rank), Phase.INIT, 0.1, 0))
        return self

    def step(self, rank: int, step: int, at: float) -> None:
        self._fold(StepNote(self._sender(rank), step, at - 0.5, at, 0.0, 0.0, 0, math.nan, math.nan, math.nan))

    def observe(self, rank: int, step: int, at: float) -> None:
        self._fold(ObservedStepsNote(self._sender(rank), step, 2, at - 0.5, at, math.nan))

    def reported(self, at: float) -> tuple[int, float] | None:
        stepping = self.generation.stepping(at, AFTER_S)
        return None if stepping is None else (stepping.step, stepping.at)

    def _fold(self, note: Note) -> None:
        self.generation.fold(note)

    def _sender(self, rank: int) -> Sender:
        return Sender("j", 1, rank)


def test_an_unmodified_script_counts_after_the_configured_time() -> None:
    ranks = Ranks()
    assert ranks.reported(AFTER_S - 0.1) is None
    assert ranks.reported(AFTER_S) == (0, AFTER_S)


def test_a_script_that_reported_steps_before_is_waited_for_while_it_imports() -> None:
    ranks = Ranks(first_message_s=300.0)
    assert ranks.reported(299.9) is None
    assert ranks.reported(300.0) == (0, 300.0), "it has perhaps been changed"
    later = Ranks(first_message_s=300.0)
    assert later.reported(60.0) is None
    later.launched()
    for rank in (0, 1):
        later.step(rank, 7, 61.0)
    assert later.reported(62.0) == (7, 61.0)


def test_a_script_that_uses_the_library_and_only_optimizers_counts() -> None:
    ranks = Ranks().launched()
    assert ranks.reported(100.0) is None, "it may still build its model"
    ranks.observe(0, 2, 101.0)
    assert ranks.reported(200.0) is None, "rank 1 does not step"
    ranks.observe(1, 2, 201.0)
    assert ranks.reported(201.0 + AFTER_S - 0.1) is None, "it may be a warm-up before the first run.step"
    assert ranks.reported(201.0 + AFTER_S) == (0, 201.0)
    reached = ranks.generation.step_reached()
    assert reached is not None
    assert (reached.step, reached.observed) == (0, 2)


def test_a_warm_up_is_not_a_step() -> None:
    ranks = Ranks().launched()
    for rank in (0, 1):
        ranks.observe(rank, 2, 1.0)
    ranks.step(0, 1, 3.0)
    assert ranks.reported(60.0) is None
    ranks.step(1, 1, 61.0)
    assert ranks.reported(62.0) == (1, 61.0)
    reached = ranks.generation.step_reached()
    assert reached is not None
    assert (reached.step, reached.observed) == (1, 0)


def test_a_rank_that_never_reports_steps_does_not_keep_the_others_from_counting() -> None:
    ranks = Ranks().launched()
    ranks.step(0, 1, 1.0)
    assert ranks.reported(60.0) is None, "rank 1 may be late"
    ranks.step(0, 2, 61.0)
    assert ranks.reported(61.0 + AFTER_S - 0.1) is None, "its report may be late"
    assert ranks.reported(61.0 + AFTER_S) == (2, 1.0)
    ranks.step(0, 7, 70.0)
    reached = ranks.generation.step_reached()
    assert reached is not None
    assert reached.step == 7
    ranks.step(1, 3, 71.0)
    later = ranks.generation.step_reached()
    assert later is not None
    assert later.step == 3, "it reports steps after all"


def test_a_frozen_agent_does_not_conclude_from_what_it_did_not_hear() -> None:
    ranks = Ranks().launched()
    ranks.step(0, 1, 1.0)
    ranks.step(0, 2, 2.0)
    ranks.generation.unheard(100.0)
    assert ranks.reported(100.0 + AFTER_S - 0.1) is None
    assert ranks.reported(100.0 + AFTER_S) is not None


@pytest.mark.parametrize("uses_library", [False, True])
def test_all_first_steps_are_reported_at_once(uses_library: bool) -> None:
    ranks = Ranks().launched() if uses_library else Ranks()
    ranks.step(0, 1, 1.0)
    ranks.step(1, 1, 2.0)
    assert ranks.reported(2.5) == (1, 2.0)


def exit_of(ranks: Ranks, rank: int, exit_code: int, at: float = 1.0) -> WorkerExited:
    worker = ranks.generation.workers[rank]
    worker.alive, worker.exit = False, Exit(at, exit_code, None, uptime_s=at + 1000.0)  # type: ignore[misc]
    worker.identity = WorkerIdentity("j", 1, rank, rank, Path("/logs/log"), Path("/logs/error"))
    return ranks.generation.exited(worker, worker.exit)


def ended(ranks: Ranks, rank: int, exit_code: int) -> Ranks:
    exit_of(ranks, rank, exit_code)
    return ranks


def test_a_rank_that_has_ended_with_exit_code_0_is_not_waited_for() -> None:
    ranks = ended(Ranks(), 1, exit_code=0)
    assert ranks.reported(AFTER_S - 0.1) is None
    assert ranks.reported(AFTER_S) == (0, AFTER_S)


def test_the_optimizer_steps_of_the_other_ranks_count() -> None:
    ranks = ended(Ranks().launched(), 1, exit_code=0)
    ranks.observe(0, 2, 3.0)
    assert ranks.reported(3.0 + AFTER_S) == (0, 3.0)
    reached = ranks.generation.step_reached()
    assert reached is not None
    assert reached.observed == 2


def test_a_rank_that_has_failed_is_no_rank_that_has_ended() -> None:
    assert ended(Ranks(), 1, exit_code=1).reported(AFTER_S) is None


def test_nothing_steps_when_every_rank_has_ended() -> None:
    ranks = ended(ended(Ranks(), 0, exit_code=0), 1, exit_code=0)
    assert ranks.reported(AFTER_S) is None
    assert ranks.generation.finished() is not None


def test_a_rank_that_is_done_has_ended_before_its_process_has() -> None:
    ranks = Ranks().launched()
    ranks.generation.fold(PhaseNote(Sender("j", 1, 1), Phase.DONE, 2.0, 20))
    exit_ = exit_of(ranks, 1, exit_code=0, at=2.5)
    assert (exit_.at, exit_.uptime_s) == (2.0, 1002.0)
    failed = exit_of(ranks, 0, exit_code=1, at=2.2)
    assert earlier_by(exit_, failed) > 0.0, "the other rank failed when it left"


def test_the_end_of_a_script_that_reports_no_steps_is_dated_and_no_sign_that_it_reports_them() -> None:
    ranks = Ranks()
    ranks.generation.fold(PhaseNote(Sender("j", 1, 1), Phase.DONE, 2.0, 0))
    assert ranks.generation.progress is not None
    assert ranks.generation.progress.silent
    assert ranks.reported(AFTER_S) == (0, AFTER_S)
    assert exit_of(ranks, 1, exit_code=0, at=2.5).at == 2.0


def test_a_rank_that_does_not_say_that_it_is_done_ends_with_its_process() -> None:
    assert exit_of(Ranks(), 1, exit_code=0, at=2.5).at == 2.5
    ranks = Ranks().launched()
    ranks.generation.fold(PhaseNote(Sender("j", 1, 1), Phase.DONE, 9.0, 20))
    assert exit_of(ranks, 1, exit_code=0, at=2.5).at == 2.5, "the wall clock was set back"
