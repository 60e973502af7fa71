"""What an agent tells about its ranks when it is asked: durations of steps, temperatures, exceptions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from waiting import wait_until_async

from holdfast.agent.connection.log_reads import LogReads
from holdfast.agent.rank_measurements import RankMeasurements, rank_gpus
from holdfast.agent.workers.logs import read_errors
from holdfast.agent.workers.progress import Progress
from holdfast.domain.errors import MalformedMessage, NotFound
from holdfast.domain.gpus import GpuState
from holdfast.domain.notes import ObservedStepsNote, Sender, StepNote
from holdfast.domain.rank_reads import ERRORS_MAX, RANKS_MAX, MeasuredRanks
from holdfast.v1 import control_pb2 as pb
from holdfast.wire import rank_reads


def sender(rank: int) -> Sender:
    return Sender("llm", 4, rank)


def stepped(progress: Progress, rank: int, step: int, duration_s: float, wait_s: float = math.nan) -> None:
    begun = 100.0 * step
    note = StepNote(sender(rank), step, begun, begun + duration_s, 0.0, 0.0, 8, math.nan, math.nan, comm_wait_s=wait_s)
    progress.fold(note)


def progress() -> Progress:
    return Progress(node="n1", job="llm", generation=4, ranks=(8, 9), step=0, at=0.0)


def agent(of: Progress | None, gpus: list[GpuState], environment: dict[str, str] | None = None) -> RankMeasurements:
    order = SimpleNamespace(generation=4, placement=SimpleNamespace(ranks=range(8, 10), nproc=2))
    generation: Any = SimpleNamespace(progress=of, order=order)
    return RankMeasurements(lambda job: (generation, environment or {}) if job == "llm" else None, lambda: gpus)


def measured(measurements: RankMeasurements, job: str = "llm") -> MeasuredRanks:
    """What arrives at the supervisor."""
    return rank_reads.decode_ranks(rank_reads.encode_ranks(3, measurements.read(job)).ranks_read)


def gpu(number: int, temperature_c: float | None) -> GpuState:
    return GpuState(number, f"GPU-{number}", 1.0, lost=temperature_c is None, temperature_c=temperature_c)


def test_the_median_of_the_last_steps_and_the_temperature_of_the_rank_s_gpu() -> None:
    of = progress()
    for step, duration_s in enumerate([900.0, 10.0, 10.5, 9.5, 10.0], 1):  # the first one compiles
        stepped(of, 8, step, duration_s, wait_s=2.0)
        stepped(of, 9, step, duration_s)
    read = measured(agent(of, [gpu(0, 61.0), gpu(1, 83.5)]))
    assert (read.generation, read.rank, read.step_s, read.temperature_c) == (4, (8, 9), (10.0, 10.0), (61.0, 83.5))
    assert read.wait_s[0] == 2.0
    assert math.isnan(read.wait_s[1]), "this rank does not measure it"


def test_old_steps_no_longer_count() -> None:
    of = progress()
    for step in range(1, 41):
        stepped(of, 8, step, 30.0 if step <= 20 else 1.0)
    assert measured(agent(of, [])).step_s[0] == 1.0


def test_blocks_that_were_observed_count_by_their_steps() -> None:
    of = progress()
    of.fold(ObservedStepsNote(sender(9), 10, 5, 100.0, 110.0, 4.0))
    read = measured(agent(of, []))
    assert (read.step_s[1], read.wait_s[1]) == (2.0, 0.8)
    assert math.isnan(read.step_s[0])


def test_unknown_values_are_not_reported() -> None:
    assert measured(agent(None, [])) == MeasuredRanks()
    assert measured(agent(progress(), []), "another") == MeasuredRanks()
    read = measured(agent(progress(), [gpu(0, None)]))
    assert all(math.isnan(each) for each in (*read.step_s, *read.wait_s, *read.temperature_c))


def test_the_gpus_that_a_job_sees() -> None:
    assert rank_gpus(3, None) == [0, 1, 2]
    assert rank_gpus(2, "6,7") == [6, 7]
    assert rank_gpus(3, "GPU-8f2a, 3") == [None, 3, None]
    assert rank_gpus(2, "") == [None, None]
    read = measured(agent(progress(), [gpu(0, 50.0), gpu(6, 66.0), gpu(7, 77.0)], {"CUDA_VISIBLE_DEVICES": "7,6"}))
    assert read.temperature_c == (77.0, 66.0)


@pytest.mark.parametrize(
    "message",
    [
        pb.RanksRead(ranks=[1], step_s=[1.0], wait_s=[1.0]),
        pb.RanksRead(ranks=[1], step_s=[1.0, 2.0], wait_s=[1.0], temperature_c=[1.0]),
        pb.RanksRead(
            ranks=range(RANKS_MAX + 1), step_s=[1.0] * (RANKS_MAX + 1), wait_s=[1.0] * (RANKS_MAX + 1),
            temperature_c=[1.0] * (RANKS_MAX + 1),
        ),
    ],
)  # fmt: skip
def test_columns_that_are_no_table_are_refused(message: pb.RanksRead) -> None:
    with pytest.raises(MalformedMessage, match="ranks_read"):
        rank_reads.decode_ranks(message)


def test_a_value_that_no_clock_measures_is_not_known() -> None:
    read = rank_reads.decode_ranks(pb.RanksRead(ranks=[1], step_s=[math.inf], wait_s=[-math.inf], temperature_c=[5.0]))
    assert math.isnan(read.step_s[0])
    assert math.isnan(read.wait_s[0])


# ---------------------------------------------------------------- exceptions


def left(logs: Path, generation: int, rank: int, text: str, at: float) -> Path:
    path = logs / "llm" / f"g{generation}" / f"rank-{rank}.error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    extra = {"exception": {"type": "ValueError", "message": text, "frames": ["train.py:7 main"], "at": at}}
    path.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    return path


def test_exceptions_of_the_newest_generation_that_has_some(tmp_path: Path) -> None:
    left(tmp_path, 2, 0, "old", 50.0)
    left(tmp_path, 3, 9, "second", 71.0)
    left(tmp_path, 3, 8, "first", 70.0)
    left(tmp_path, 3, 10, "no time", 0.0)
    (tmp_path / "llm" / "g4").mkdir()
    (tmp_path / "llm" / "g3" / "rank-11.error.json").write_text("{")
    found = read_errors(tmp_path, "llm", 0)
    assert [(each.generation, each.rank, each.error.message) for each in found] == [
        (3, 8, "first"), (3, 9, "second"), (3, 10, "no time"),
    ]  # fmt: skip
    assert [each.error.message for each in read_errors(tmp_path, "llm", 2)] == ["old"]
    assert read_errors(tmp_path, "llm", 4) == read_errors(tmp_path, "other", 0) == ()


def test_a_link_that_a_script_has_made_is_not_followed(tmp_path: Path) -> None:
    path = left(tmp_path, 3, 8, "text of another file", 70.0)
    path.rename(tmp_path / "secret")
    path.symlink_to(tmp_path / "secret")
    assert read_errors(tmp_path, "llm", 0) == ()


@pytest.mark.anyio
async def test_exceptions_as_they_arrive(tmp_path: Path) -> None:
    for rank in range(ERRORS_MAX + 3):
        left(tmp_path, 1, rank, "x" * 9000, 70.0 + rank)
    reads = LogReads(tmp_path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reads.run, lambda: None)
        reads.ask(rank_reads.encode_errors_request(5, "llm", 0).read_errors)
        reads.ask(pb.ReadErrors(id=6, job="../../etc"))
        await wait_until_async(lambda: len(reads.answers) == 2, description="both answers")
        tasks.cancel_scope.cancel()
    first, second = (answer.errors_read for answer in reads.answers)
    assert (first.id, second.id) == (5, 6)
    found = rank_reads.decode_errors(first)
    assert len(found) == ERRORS_MAX
    assert found[0].error.frames == ("train.py:7 main",)
    assert first.ByteSize() < 256 << 10, "as much as a part of a log"
    with pytest.raises(NotFound, match="not a valid name of a job"):
        rank_reads.decode_errors(second)


def test_more_exceptions_than_an_answer_has_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="errors_read"):
        rank_reads.decode_errors(pb.ErrorsRead(errors=[pb.RaisedError()] * (ERRORS_MAX + 1)))
