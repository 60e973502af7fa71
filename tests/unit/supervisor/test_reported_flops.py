"""FLOPs that a script reports, from its step to the MFU of a report."""

from __future__ import annotations

import math
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.agent.workers.progress import Progress
from holdfast.diagnostics import steps
from holdfast.diagnostics.plausible import _of_steps
from holdfast.domain import notes
from holdfast.domain.findings import StepRecord
from holdfast.domain.mesh import Mesh
from holdfast.domain.notes import Sender, StepNote
from holdfast.domain.signals import StepColumns, Tick
from holdfast.supervisor.history.booked import Booked
from holdfast.supervisor.history.goodput import account, within
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.history.sqlite_file import LAYOUT
from holdfast.supervisor.history.time_classes import History
from holdfast.supervisor.report.numbers import Terms, report
from holdfast.wire.events import decode_steps, encode_steps
from holdfast.wire.telemetry import decode_tick, encode_tick

FLOPS = 4e15


def note(rank: int, step: int, flops: float) -> StepNote:
    return StepNote(Sender("job", 1, rank), step, 1000.0, 1010.0, 0.0, 0.0, 100, math.nan, math.nan, flops=flops)


def columns(*flops: float) -> StepColumns:
    progress = Progress(node="n1", job="job", generation=1, ranks=range(len(flops)), step=0, at=0.0)
    for rank, each in enumerate(flops):
        arrived = notes.parse(notes.encode(note(rank, 1, each)))
        assert isinstance(arrived, StepNote)
        progress.fold(arrived)
    taken = progress.take_steps(1011.0)
    assert taken is not None
    [arrived_columns] = decode_tick(encode_tick(Tick("n1", "i1", 1, 1011.0, (taken,)))).signals
    assert isinstance(arrived_columns, StepColumns)
    return arrived_columns


def test_the_ranks_are_added_up_on_the_way() -> None:
    arrived = columns(FLOPS, 3 * FLOPS)
    assert arrived.flops == (FLOPS, 3 * FLOPS)
    sums = steps._Step()
    sums.add(arrived, range(2))
    assert sums.flops == 4 * FLOPS
    assert columns(0.0, 0.0).flops == (), "a job that reports none pays nothing for it"


def test_a_count_that_is_none_is_not_believed() -> None:
    arrived = columns(FLOPS)
    for wrong in (math.nan, math.inf, -1.0):
        assert _of_steps(replace(arrived, flops=(wrong,))) == "an impossible number of FLOPs"


def record(step: int, flops: float, tokens: int = 100) -> StepRecord:
    return StepRecord("job", 1, step, 4, 10.0 * step, 10.0 * (step + 1), tokens, None, 0.0, flops)


def test_records_arrive_with_them_and_without() -> None:
    for flops in (FLOPS, 0.0):
        assert decode_steps(encode_steps([record(1, flops), record(2, flops)])) == [record(1, flops), record(2, flops)]


def history(*steps_: StepRecord, booked: Booked | None = None) -> History:
    end = 10.0 * (max(each.step for each in steps_) + 1)
    return History(10.0, end, 4, 1, steps=steps_, booked=booked)


@pytest.mark.parametrize("tokens", [100, 0])
def test_the_rate_is_that_of_fault_free_steps(tokens: int) -> None:
    every = [record(n, FLOPS, tokens) for n in range(1, 41)]
    ledger = account(history(*every))
    assert ledger.fault_free_flops_per_s == pytest.approx(FLOPS / 10.0)
    part = within(history(*every), 100.0, 300.0)
    assert part.fault_free_flops_per_s == pytest.approx(FLOPS / 10.0)
    booked = Booked.empty(10.0, 4)
    booked.add(every[:20])
    continued = account(history(*every[20:], booked=booked))
    assert continued.fault_free_flops_per_s == pytest.approx(FLOPS / 10.0, rel=2e-3)


def test_mfu_needs_no_option_but_the_peak_and_what_is_stated_comes_first() -> None:
    books = {
        "started_at": 0.0, "wall_s": 100.0, "useful_s": 90.0, "unmeasured_s": 0.0, "badput_s": {}, "goodput_job": 0.9,
        "goodput_paid": 0.9, "fault_free_tokens_per_s": 10.0, "fault_free_flops_per_s": 8e14, "tokens": 900, "rework_steps": 0,
    }  # fmt: skip
    job = {"name": "job", "phase": "running", "mesh": dict(Mesh.of({"dp": 4}).dims), "step": 9}
    assert report(job, books, [], Terms(peak_flops=1e15)).mfu == pytest.approx(0.2)
    assert report(job, books, [], Terms(flops_per_token=4e13, peak_flops=1e15)).mfu == pytest.approx(0.1)
    assert report(job, books, [], Terms()).mfu is None


@pytest.mark.anyio
async def test_the_history_keeps_them_and_reads_files_that_have_none(tmp_path: Path) -> None:
    kept = await SqliteHistory.open(tmp_path / "history.sqlite3")
    await kept.add_steps([record(1, FLOPS)], "1-0")
    await kept.aclose()
    database = sqlite3.connect(tmp_path / "history.sqlite3")
    assert database.execute("SELECT flops FROM steps").fetchall() == [(FLOPS,)]
    database.execute("ALTER TABLE steps DROP COLUMN flops")
    database.execute(f"PRAGMA user_version = {LAYOUT - 1}")
    database.commit()
    database.close()
    upgraded = await SqliteHistory.open(tmp_path / "history.sqlite3")
    await upgraded.add_steps([record(2, FLOPS)], "2-0")
    await upgraded.aclose()
    database = sqlite3.connect(tmp_path / "history.sqlite3")
    assert database.execute("SELECT flops FROM steps ORDER BY step").fetchall() == [(0.0,), (FLOPS,)]
    database.close()
