"""What is understood of a rank that cannot speak: when it is asked, and what is made of the answers."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from holdfast.agent.workers.progress import ProcessFacts, Progress
from holdfast.agent.workers.recorders import post
from holdfast.agent.workers.stacks import FRAMES_MAX, of_faulthandler, of_pyspy
from holdfast.domain import worker
from holdfast.domain.notes import GroupsNote, Note, PhaseNote, Sender, StepNote, parse
from holdfast.domain.signals import Phase

T0 = 1_700_000_000.0


def step(rank: int, number: int, ended_at: float) -> StepNote:
    return StepNote(Sender("gpt", 1, rank), number, T0 + ended_at - 0.1, T0 + ended_at, 0.0, 0.0, 1, 1.0, 1.0)


def phase(rank: int, name: Phase, at: float) -> PhaseNote:
    return PhaseNote(Sender("gpt", 1, rank), name, T0 + at, 0)


def progress(*notes: Note) -> Progress:
    folded = Progress(node="n", job="gpt", generation=1, ranks=(0, 1), step=0, at=T0)
    for note in notes:
        folded.fold(note)
    return folded


def test_a_script_that_never_spoke_is_not_silent() -> None:
    assert progress().silent_s(T0 + 100) == 0.0


def test_silence_begins_after_a_second_and_half_a_step_more() -> None:
    quick = progress(*(step(rank, i, 0.1 * i) for i in range(1, 10) for rank in (0, 1)))
    assert quick.silent_s(T0 + 1.8) == 0.0
    assert quick.silent_s(T0 + 2.0) == pytest.approx(1.1)
    slow = progress(*(step(0, i, 4.0 * i) for i in range(1, 10)))
    assert slow.silent_s(T0 + 41.0) == 0.0
    assert slow.silent_s(T0 + 43.0) == pytest.approx(7.0)


def test_one_rank_that_speaks_is_enough_and_the_done_do_not_count() -> None:
    assert progress(step(0, 1, 1.0), step(1, 1, 9.0)).silent_s(T0 + 9.5) == 0.0
    assert progress(phase(0, Phase.DONE, 1.0), phase(1, Phase.DONE, 1.0)).silent_s(T0 + 50) == 0.0


def test_a_count_holds_until_the_rank_speaks_again() -> None:
    known = progress(step(0, 1, 1.0), step(1, 1, 1.0))
    known.counted({0: 40, 1: 41})
    assert known.sample(T0 + 3, {0: ProcessFacts(), 1: ProcessFacts()}).collective_seq == (40, 41)
    known.fold(step(0, 2, 4.0))
    assert known.sample(T0 + 4, {}).collective_seq == (-1, 41)


def test_groups_are_noted_by_rank() -> None:
    raw = worker.encode("groups", job="gpt", generation=1, rank=1, members={"0": "0-1", "3": "1-9:4"})
    note = parse(raw)
    assert isinstance(note, GroupsNote)
    assert progress(note).groups_of(1) == {"0": "0-1", "3": "1-9:4"}
    assert progress(note).groups_of(0) == {}


@pytest.mark.parametrize("members", [None, [], {"0": 7}, {"0": "all"}, {"0": "0-9999999"}])
def test_groups_that_cannot_be_listed_are_refused(members: object) -> None:
    assert parse(worker.encode("groups", job="gpt", generation=1, rank=1, members=members)) is None


def test_too_many_members_are_refused() -> None:
    members = {str(name): "0-999999" for name in range(3)}
    assert parse(worker.encode("groups", job="gpt", generation=1, rank=1, members=members)) is None


FAULTHANDLER = """Current thread 0x00007f7cd2ffd6c0 (most recent call first):
  <no Python frame>

Thread 0x00007f7cfcea9b80 (most recent call first):
  File "/v/torch/distributed/distributed_c10d.py", line 2799 in recv
  File "/t/train.py", line 17 in <module>
"""
PYSPY = """Process 16289: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 16290 (idle): "loader"
    get (queue.py:171)
Thread 16289 (idle): "MainThread"
    recv (torch/distributed/distributed_c10d.py:2799)
    <module> (train.py:17)
"""


def test_the_main_threads_frames_are_taken_innermost_first() -> None:
    frames = "recv ({}distributed_c10d.py:2799)\n<module> ({}train.py:17)"
    assert of_faulthandler(FAULTHANDLER) == frames.format("/v/torch/distributed/", "/t/")
    assert of_pyspy(PYSPY) == frames.format("torch/distributed/", "")


def test_a_deep_stack_is_cut_and_garbage_is_no_stack() -> None:
    deep = FAULTHANDLER + '  File "/t/train.py", line 9 in again\n' * 500
    assert len(of_faulthandler(deep).splitlines()) == FRAMES_MAX
    assert (of_pyspy("garbage"), of_faulthandler("\x00garbage")) == ("", "")


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npong"
MISSING = b"HTTP/1.1 404 Not Found\r\n\r\nno such handler"


@pytest.mark.anyio
@pytest.mark.parametrize(("answer", "body"), [(OK, b"pong"), (MISSING, None), (b"garbage", None), (b"", None)])
async def test_answers_of_a_worker_server(tmp_path: Path, answer: bytes, body: bytes | None) -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            assert (await stream.receive()).startswith(b"POST /handler/ping? HTTP/1.0\r\n")
            await stream.send(answer)

    listener = await anyio.create_unix_listener(tmp_path / "s")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        assert await post(tmp_path / "s", "ping", "", 5.0) == body
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_nobody_listens_or_answers(tmp_path: Path) -> None:
    assert await post(tmp_path / "s", "ping", "", 5.0) is None
    async with await anyio.create_unix_listener(tmp_path / "s"):  # accepts and says nothing, as a stopped process does
        assert await post(tmp_path / "s", "ping", "", 0.05) is None
