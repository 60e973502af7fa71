"""Parts of logs as an agent reads them: from any position, without the dropped part, and nothing but logs."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest
from waiting import wait_until_async

from holdfast.agent.connection.log_reads import WAITING_MAX, LogReads
from holdfast.agent.workers.logs import last_words, log_path, read_part
from holdfast.domain.errors import HoldfastError, MalformedMessage, NotFound
from holdfast.domain.worker_logs import PART_BYTES_MAX, LogRequest
from holdfast.v1 import control_pb2 as pb
from holdfast.wire.worker_logs import decode_answer, decode_request

pytestmark = pytest.mark.anyio


def written(logs: Path, data: bytes) -> Path:
    path = log_path(logs, "llm", 3, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


def part(logs: Path, offset: int, bytes_max: int = PART_BYTES_MAX) -> tuple[int, int, bytes]:
    read = read_part(logs, LogRequest("llm", 3, 0, offset, bytes_max))
    return read.offset, read.size, read.data


def test_a_part_begins_where_it_was_asked_for(tmp_path: Path) -> None:
    written(tmp_path, b"0123456789")
    assert part(tmp_path, 0) == (0, 10, b"0123456789")
    assert part(tmp_path, 4, 3) == (4, 10, b"456")
    assert part(tmp_path, -3) == (7, 10, b"789")
    assert part(tmp_path, -99) == (0, 10, b"0123456789")
    assert part(tmp_path, 10) == (10, 10, b"")
    assert part(tmp_path, 10**12) == (10, 10, b""), "the log was emptied since: what follows begins at its end"


def test_the_dropped_part_of_a_large_log_is_skipped(tmp_path: Path) -> None:
    path = written(tmp_path, b"")
    hole = 1 << 22
    with path.open("r+b") as file:
        file.seek(hole)
        file.write(b"what is left\n")
    offset, size, data = part(tmp_path, 0)
    assert size == hole + 13
    assert data.lstrip(b"\0") == b"what is left\n"
    assert size - offset < hole, "not megabytes of zeros"


def test_there_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(
        NotFound, match=r"there is no .*/llm/g3/rank-0.log: an agent keeps the logs of a job's newest 5"
    ):
        part(tmp_path, 0)


def test_what_a_script_has_put_in_its_place_is_not_read(tmp_path: Path) -> None:
    """A script can write to the directory of its logs, and whoever reads logs is not to read other files through it."""
    secret = tmp_path / "secret"
    secret.write_text("key")
    path = written(tmp_path / "logs", b"")
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(HoldfastError, match="cannot be opened"):
        part(tmp_path / "logs", 0)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(HoldfastError, match="is not a file"):
        part(tmp_path / "logs", 0)


@pytest.mark.parametrize("job", ["../../etc", "", "a/b", "..", "x" * 300])
def test_a_request_cannot_leave_the_directory(job: str) -> None:
    with pytest.raises(MalformedMessage, match=r"read_log\.job"):
        decode_request(pb.ReadLog(job=job, bytes_max=1))


@pytest.mark.parametrize("bytes_max", [0, PART_BYTES_MAX + 1, 2**63])
def test_an_answer_is_bounded(bytes_max: int) -> None:
    with pytest.raises(MalformedMessage, match=r"read_log\.bytes_max"):
        decode_request(pb.ReadLog(job="llm", bytes_max=bytes_max))


async def test_each_request_has_an_answer_and_too_many_are_refused(tmp_path: Path) -> None:
    written(tmp_path, b"hello")
    reads, answered = LogReads(tmp_path), 0

    def count() -> None:
        nonlocal answered
        answered += 1

    for number in range(WAITING_MAX + 1):
        reads.ask(pb.ReadLog(id=number, job="llm", generation=3, rank=number % 2, bytes_max=100))
    with pytest.raises(NotFound, match="ask again later"):
        decode_answer(reads.answers.popleft().log_read)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reads.run, count)
        await wait_until_async(lambda: len(reads.answers) == WAITING_MAX, description="the answers")
        tasks.cancel_scope.cancel()
    assert answered == WAITING_MAX
    assert decode_answer(reads.answers[0].log_read).data == b"hello"
    with pytest.raises(NotFound, match="there is no"):
        decode_answer(reads.answers[1].log_read)
    reads.forget()
    assert not reads.answers, "they belong to the session before"


BROKEN_TORCH = """\
Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/holdfast/train/selftest/__init__.py", line 12, in <module>
    import torch
  File "/usr/lib/python3/site-packages/torch/__init__.py", line 427, in <module>
    from torch._C import *
    ^^^^^^^^^^^^^^^^^^^^^^
ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"""


NO_CUDA = "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (BROKEN_TORCH, NO_CUDA),
        (f"{BROKEN_TORCH}\n  hint: install it", f"{NO_CUDA};   hint: install it"),
        ("one\ntwo\n  three\nfour", "two;   three; four"),
        ("", ""),
    ],
)
def test_the_last_words_of_a_program_are_its_error_without_the_traceback(printed: str, said: str) -> None:
    assert last_words(printed.splitlines()) == said
