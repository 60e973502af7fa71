"""Notes and what becomes of them. Whatever a worker writes, the agent stands."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.workers.misses import Missed, Misses
from holdfast.agent.workers.progress import ROWS_MAX, ProcessFacts, Progress
from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.hang import Hang
from holdfast.domain import worker
from holdfast.domain.findings import Finding, FindingKind
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.notes import (
    GroupsNote,
    MissedNote,
    Note,
    ObservedStepsNote,
    PhaseNote,
    ReplicaCheckNote,
    SavedNote,
    Sender,
    StartedNote,
    StepNote,
    encode,
    parse,
)
from holdfast.domain.signals import ClockTick, GenerationStarted, Phase, Signal

WHO = {"job": "gpt", "generation": 2, "rank": 4}
STEP: dict[str, Any] = {
    "step": 7, "started_at": 10.0, "ended_at": 11.5, "data_s": 0.1, "stall_s": 0, "tokens": 64, "loss": 2.5, "grad_norm": None,
}  # fmt: skip


def note(kind: str, **fields: Any) -> Note | None:
    return parse(worker.encode(kind, **{**WHO, **fields}))


def step(number: int, rank: int = 4, ended_at: float = 11.5, **fields: object) -> StepNote:
    parsed = note("step", **{**STEP, "rank": rank, "step": number, "ended_at": ended_at, **fields})
    assert isinstance(parsed, StepNote)
    return parsed


def test_every_kind_is_understood() -> None:
    parsed = note("step", **STEP)
    assert isinstance(parsed, StepNote)
    assert (parsed.step, parsed.tokens, parsed.loss, parsed.sender.rank) == (7, 64, 2.5, 4)
    assert math.isnan(parsed.grad_norm)
    assert isinstance(note("phase", phase="restore", at=3.0, step=0), PhaseNote)
    started = note("started", phases_s={"first_step": 0.2})
    assert isinstance(started, StartedNote)
    assert started.phases_s == (("first_step", 0.2),)
    assert isinstance(note("missed", step=50, reason="both images are being read"), MissedNote)
    assert isinstance(note("saved", step=50, attempt=1, image="/x", stall_s=0.1), SavedNote)
    assert note("of the future") is None


SENDER = Sender("gpt", 2, 4)
NOTES: dict[type, Note] = {
    type(each): each
    for each in (
        StepNote(SENDER, 7, 10.0, 11.5, 0.1, 0.0, 64, math.nan, math.inf, 0.25, math.nan, 3.5),
        PhaseNote(SENDER, Phase.RESTORE, 3.0, 0),
        ObservedStepsNote(SENDER, 96, 16, 10.0, 11.5, 0.25),
        StartedNote(SENDER, (("process_group", 0.5), ("first_step", 0.25))),
        SavedNote(SENDER, 50, 1, "/dev/shm/x/a.image", 0.01),
        MissedNote(SENDER, 50, "both images are being read"),
        GroupsNote(SENDER, (("0", "0-1"), ("3", "1-9:4"))),
        ReplicaCheckNote(SENDER, 7, "cafe", 0.02, restored=True),
    )
}


@pytest.mark.parametrize("kind", get_args(Note), ids=lambda kind: kind.__name__)
def test_the_agent_reads_what_the_trainer_writes(kind: type) -> None:
    assert repr(parse(encode(NOTES[kind]))) == repr(NOTES[kind]), "a NaN differs from itself"


def test_a_wait_for_others_is_taken_when_it_is_measured() -> None:
    assert math.isnan(step(7).comm_wait_s)
    measured = note("step", **STEP, comm_wait_s=0.25)
    assert isinstance(measured, StepNote)
    assert measured.comm_wait_s == 0.25
    assert note("step", **STEP, comm_wait_s=-1.0) is None


def test_a_reported_nan_is_not_an_unreported_loss() -> None:
    parsed = note("step", **{**STEP, "loss": math.nan})
    assert isinstance(parsed, StepNote)
    assert parsed.loss == math.inf


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1}, {"step": 1.5}, {"step": True}, {"step": 2**63}, {"ended_at": math.nan}, {"ended_at": math.inf},
        {"started_at": "now"}, {"tokens": None}, {"loss": "low"}, {"rank": "4"}, {"generation": -3},
    ],
)  # fmt: skip
def test_a_step_that_no_library_of_ours_sends_is_refused(wrong: dict[str, Any]) -> None:
    assert note("step", **{**STEP, **wrong}) is None


@given(st.binary(max_size=200))
def test_bytes_are_no_note(raw: bytes) -> None:
    parse(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


FIELDS = st.sampled_from([*WHO, *STEP, "phase", "at", "phases_s", "reason"])


@given(st.sampled_from(["step", "phase", "started", "missed"]), st.dictionaries(FIELDS, JSON))
def test_any_json_is_a_note_or_none(kind: str, fields: dict[str, Any]) -> None:
    parse(json.dumps({**WHO, **fields, "type": kind}).encode())


def progress(ranks: tuple[int, ...] = (4, 5)) -> Progress:
    return Progress(node="n", job="gpt", generation=2, ranks=ranks, step=6, at=1.0)


def test_the_ends_of_the_last_steps_are_remembered_without_gaps() -> None:
    board = progress()
    for number in range(7, 13):
        board.fold(replace(step(number, rank=4), ended_at=float(number)))
    assert board.step_ends_of(4) == (12.0, 11.0, 10.0, 9.0)
    board.fold(replace(step(14, rank=4), ended_at=14.0))
    assert board.step_ends_of(4) == (14.0,)
    assert board.step_ends_of(5) == ()


def test_the_ends_by_the_monotonic_clock_go_with_them_when_all_are_known() -> None:
    board = progress()
    for number in range(7, 10):
        board.fold(step(number, rank=4, ended_at=3600.0 * number, ended_uptime_s=50.0 + number))
    assert board.step_end_uptimes_of(4) == (59.0, 58.0, 57.0)
    board.fold(step(10, rank=4, ended_at=99.0))  # of a library that does not say it
    assert board.step_ends_of(4)[0] == 99.0
    assert board.step_end_uptimes_of(4) == ()


def test_steps_become_columns_once() -> None:
    board = progress()
    board.fold(step(7, rank=4))
    board.fold(step(7, rank=5))
    columns = board.take_steps(20.0)
    assert columns is not None
    assert (columns.rank, columns.step, columns.tokens) == ((4, 5), (7, 7), (64, 64))
    assert board.take_steps(21.0) is None


def test_standing_is_said_of_every_rank_also_of_silent_and_dead_ones() -> None:
    board = progress()
    board.fold(step(7, rank=5))
    standing = board.sample(30.0, {5: ProcessFacts("S", 1.25)})
    assert standing.rank == (4, 5)
    assert standing.step == (6, 7)
    assert standing.phase == (Phase.INIT, Phase.STEP)
    assert standing.process_state == ("", "S")
    assert standing.phase_at == (1.0, 11.5)


def test_a_script_that_begins_and_never_uses_run_step_is_no_hang() -> None:
    """`hf.launch` alone says `init`, and no more: of such a script nothing is known, which is not faulty."""
    sender = Sender("gpt", 2, 4)
    begun, restoring = progress(), progress()
    for board in (begun, restoring):
        board.fold(PhaseNote(sender, Phase.INIT, 2.0, 0))
    restoring.fold(PhaseNote(sender, Phase.RESTORE, 3.0, 0))
    started = GenerationStarted("n", 1.0, "gpt", 2, Mesh.of({"dp": 2}), (4, 5), HangSpec(init_s=20.0))

    def judged(board: Progress) -> list[FindingKind]:
        detector, found = Alone(Hang()), list[Finding]()
        detector.observe(started, 1.0)
        for at in range(2, 90):
            idle = {4: ProcessFacts("S", 1.0), 5: ProcessFacts("S", 1.0)}
            items: tuple[Signal, ...] = (board.sample(float(at), idle), ClockTick(float(at)))
            for item in items:
                found += detector.observe(item, float(at))
        return [finding.kind for finding in found]

    assert not begun.silent, "its agent knows that it is no unmodified script"
    assert judged(begun) == []
    assert judged(restoring) == [FindingKind.HANG], "one that restores is going to make steps"


def test_first_steps_are_complete_when_the_last_rank_has_one() -> None:
    board = progress()
    assert (board.silent, board.stepping_since) == (True, None)
    board.fold(step(7, rank=4, ended_at=12.0))
    assert (board.silent, board.stepping_since) == (False, None)
    board.fold(step(7, rank=5, ended_at=13.0))
    board.fold(step(8, rank=5, ended_at=14.0))
    assert board.stepping_since == 13.0
    assert board.newest_common_step == 7


def test_a_late_datagram_does_not_turn_a_rank_back() -> None:
    board = progress()
    board.fold(step(9))
    board.fold(step(8))
    assert board.step_of(4) == 9


def test_rows_are_bounded() -> None:
    board = progress()
    for number in range(ROWS_MAX + 2):
        board.fold(step(number))
    columns = board.take_steps(1.0)
    assert columns is not None
    assert len(columns.step) == ROWS_MAX
    assert columns.step[0] == 2
    assert board.dropped == 2


def test_three_saves_missed_in_a_row_are_reported_and_again_while_it_lasts_until_the_rank_saves_again() -> None:
    misses = Misses()

    def fold(kind: str, step: int, rank: int = 0) -> Missed | None:
        parsed = note(kind, step=step, rank=rank, reason="no image is free")
        assert parsed is not None
        return misses.fold(parsed, float(step))

    assert [fold("missed", step) for step in (10, 20)] == [None, None]
    assert fold("missed", 20, rank=1) is None, "another rank's"
    assert fold("missed", 30) == Missed(30.0, "3 in a row, the last one of step 30: no image is free")
    assert fold("missed", 40) is None
    assert fold("missed", 329) is None
    assert fold("missed", 330) == Missed(30.0, "6 in a row, the last one of step 330: no image is free")
    assert fold("missed", 340) is None
    assert fold("saved", 350) is None
    assert [fold("missed", step) for step in (700, 710)] == [None, None]
    again = fold("missed", 720)
    assert again is not None
    assert again.since == 720.0, "another trouble"


class Saves:
    """Ranks 0 to 2 of a node. `at` is the time of a save, and the step that all ranks have finished."""

    def __init__(self) -> None:
        self.misses = Misses()

    def saved(self, rank: int, at: int, finished: int | None = None) -> tuple[int, Missed] | None:
        parsed = note("saved", step=at, rank=rank)
        assert isinstance(parsed, SavedNote)
        return self.misses.without(parsed, {0: at, 1: at, 2: at if finished is None else finished}, float(at))


def test_ranks_that_do_not_save_while_another_does_are_reported_once_until_they_save() -> None:
    saves = Saves()
    assert [saves.saved(0, at) for at in (10, 20)] == [None, None]
    found = saves.saved(0, 30)
    assert found is not None
    rank, report = found
    assert (rank, report.since) == (1, 30.0)
    assert (
        "rank 0 has saved the steps 10, 20, 30, and rank 1 and 1 other rank of the node none of them" in report.reason
    )
    assert saves.saved(0, 40) is None
    again = saves.saved(0, 630)
    assert again is not None
    assert again[1].since == 30.0
    assert [saves.saved(each, 640) for each in (1, 2, 0)] == [None, None, None]
    assert saves.saved(0, 650) is None


def test_ranks_that_save_one_after_the_other_or_are_behind_are_not_reported() -> None:
    saves = Saves()
    assert not any(saves.saved(rank, at) for at in range(10, 200, 10) for rank in (0, 1, 2))
    saves = Saves()
    assert not any(saves.saved(rank, at, finished=at - 11) for at in range(10, 200, 10) for rank in (0, 1))
    saves = Saves()
    found = [saves.saved(rank, at, finished=at - at // 10 % 2) for at in range(10, 200, 10) for rank in (0, 1)]
    assert sum(each is not None for each in found) == 1, "the notes of a rank's steps come a little later or earlier"


def test_a_rank_that_reports_its_misses_is_not_reported_twice() -> None:
    saves = Saves()
    for at in (10, 20, 30, 40):
        missed = note("missed", step=at, rank=2, reason="no image is free")
        assert missed is not None
        saves.misses.fold(missed, float(at))
        assert [saves.saved(rank, at) for rank in (0, 1)] == [None, None]
