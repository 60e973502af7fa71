"""The size limit of worker logs: the first and the last part stay, under a writer that only appends, and the cut is visible."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.agent.settings import AgentSettings
from holdfast.agent.workers import log_limit
from holdfast.agent.workers.log_limit import (
    LOG_BYTES_MAX,
    SCARCE_BYTES,
    SCARCE_LOG_BYTES_MAX,
    Limit,
    cut,
    limit_of,
)
from holdfast.agent.workers.logs import WorkerLogs, open_log, read_part, tail
from holdfast.cli.log_tail import Tail
from holdfast.domain.worker_logs import LogRequest

MIB = 1 << 20
SMALL = Limit(2 * MIB, "2.0 MiB per rank (HOLDFAST_LOG_BYTES_MAX)")
CUT = "[holdfast]"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return WorkerLogs(tmp_path / "logs").create("gpt", 1) / "rank-0.log"


@pytest.fixture
def writer(log: Path) -> Iterator[int]:
    fd = open_log(log)
    yield fd
    os.close(fd)


def numbered(first: int, count: int) -> bytes:
    """Lines of 64 bytes."""
    return b"".join(b"line %-58d\n" % number for number in range(first, first + count))


def held(log: Path) -> int:
    return log.stat().st_blocks * 512


def shown(log: Path) -> list[str]:
    return list(Tail(log, "").rest())


def test_a_log_over_its_limit_keeps_its_first_and_its_last_part(log: Path, writer: int) -> None:
    os.write(writer, numbered(0, 50_000))  # 3.2 MB
    assert cut(log, SMALL) >= 1 * MIB
    assert held(log) <= SMALL.bytes_max
    os.write(writer, b"more\n")
    lines = shown(log)
    assert lines[0].split() == ["line", "0"]
    assert lines[-1] == "more"
    assert lines[-2].split() == ["line", "49999"]
    [at] = [number for number, line in enumerate(lines) if CUT in line]
    assert "2.1 MiB of output were cut here" in lines[at]
    assert "the limit is 2.0 MiB per rank (HOLDFAST_LOG_BYTES_MAX)" in lines[at]
    assert int(lines[at - 2].split()[1]) < 3000, "before it the first part"
    assert int(lines[at + 2].split()[1]) > 30_000, "after it the last"
    assert tail(log)[-1] == "more"
    assert cut(log, SMALL) == 0


def test_a_script_that_prints_without_end_stays_within_its_limit(log: Path, writer: int) -> None:
    """The cut is one line, however often it has grown, and what was printed first is never lost."""
    for round_ in range(40):
        os.write(writer, numbered(round_ * 10_000, 10_000))
        cut(log, SMALL)
        assert held(log) <= SMALL.bytes_max
    lines = shown(log)
    assert sum(CUT in line for line in lines) == 1
    assert lines[0].split() == ["line", "0"]
    assert lines[-1].split() == ["line", "399999"]
    assert log.stat().st_size == 40 * 10_000 * 64, "offsets are those of the output"


def test_nothing_is_lost_of_what_is_written_while_a_log_is_cut(log: Path, writer: int) -> None:
    os.write(writer, numbered(0, 50_000))
    stop = threading.Event()
    written = 50_000

    def write() -> None:
        nonlocal written
        while not stop.is_set() and written < 200_000:
            os.write(writer, numbered(written, 100))
            written += 100

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(50):
            cut(log, SMALL)
    finally:
        stop.set()
        thread.join()
    numbers = [int(line.split()[1]) for line in shown(log)[-5000:] if line.startswith("line ")]
    assert numbers[-1] == written - 1
    assert numbers == list(range(numbers[0], written))


def test_who_follows_a_log_sees_the_new_lines_after_a_cut(log: Path, writer: int) -> None:
    followed = Tail(log, "")
    os.write(writer, numbered(0, 10_000))
    assert len(list(followed.whole_lines())) == 10_000
    os.write(writer, numbered(10_000, 40_000))
    cut(log, SMALL)
    os.write(writer, b"more\n")
    lines = list(followed.whole_lines())
    assert lines[-1] == "more"
    assert not any("\0" in line for line in lines)


def test_a_program_reads_a_cut_log_in_parts_without_zeros_and_without_a_gap(log: Path, writer: int) -> None:
    os.write(writer, numbered(0, 50_000))
    cut(log, SMALL)
    position, data = 0, b""
    while True:
        part = read_part(log.parents[2], LogRequest("gpt", 1, 0, position))
        if not part.data:
            break
        assert part.offset >= position
        data, position = data + part.data, part.offset + len(part.data)
    assert position == part.size
    assert data.count(b"\0") <= 4096, "what is left of the note's page"
    assert data.startswith(b"line 0 ")
    assert data.endswith(numbered(49_999, 1))
    assert data.count(CUT.encode()) == 1


def test_a_smaller_limit_near_a_full_disk_cuts_more_and_a_larger_one_keeps_the_cut_readable(
    log: Path, writer: int
) -> None:
    os.write(writer, numbered(0, 100_000))
    cut(log, Limit(4 * MIB, "a"))
    cut(log, Limit(1 * MIB, "b"))
    assert held(log) <= 1 * MIB
    os.write(writer, numbered(100_000, 100_000))
    cut(log, Limit(4 * MIB, "c"))
    assert held(log) <= 4 * MIB
    lines = shown(log)
    assert lines[0].split() == ["line", "0"]
    assert lines[-1].split() == ["line", "199999"]
    assert any(CUT in line for line in lines)


def test_a_file_system_without_holes_begins_the_log_again_with_the_last_lines(
    log: Path, writer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_limit, "_punch", lambda *_: False)
    os.write(writer, numbered(0, 50_000))
    cut(log, SMALL)
    os.write(writer, b"more\n")
    lines = shown(log)
    assert CUT in lines[1]
    assert lines[-2].split() == ["line", "49999"]
    assert lines[-1] == "more"
    assert held(log) <= 1 * MIB


def test_an_error_of_the_file_system_is_not_taken_for_a_missing_hole(
    log: Path, writer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_limit._libc, "fallocate", lambda *_: -1)
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EIO)
    os.write(writer, numbered(0, 50_000))
    with pytest.raises(OSError, match="Input/output error"):
        cut(log, SMALL)
    assert log.stat().st_size == 50_000 * 64


def test_what_is_no_log_is_left_alone(tmp_path: Path) -> None:
    assert cut(tmp_path / "none.log", SMALL) == 0
    other = tmp_path / "other"
    other.write_bytes(numbered(0, 50_000))
    (tmp_path / "rank-0.log").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        cut(tmp_path / "rank-0.log", SMALL)
    os.mkfifo(tmp_path / "rank-1.log")
    assert cut(tmp_path / "rank-1.log", SMALL) == 0
    assert other.stat().st_size == 50_000 * 64


# ---------------------------------------------------------------- which limit applies

GIB = 1 << 30


@pytest.mark.parametrize(
    ("configured", "total", "free", "expected"),
    [
        (LOG_BYTES_MAX, 1000 * GIB, 500 * GIB, LOG_BYTES_MAX),
        (LOG_BYTES_MAX, 1000 * GIB, SCARCE_BYTES, LOG_BYTES_MAX),
        (LOG_BYTES_MAX, 1000 * GIB, SCARCE_BYTES - 1, SCARCE_LOG_BYTES_MAX),
        (LOG_BYTES_MAX, 100 * GIB, 4 * GIB, SCARCE_LOG_BYTES_MAX),
        (LOG_BYTES_MAX, 100 * GIB, 6 * GIB, LOG_BYTES_MAX),
        (0, 100 * GIB, 6 * GIB, 0),
        (0, 100 * GIB, 4 * GIB, SCARCE_LOG_BYTES_MAX),
        (MIB, 100 * GIB, 0, MIB),
    ],
)
def test_the_limit_that_applies(configured: int, total: int, free: int, expected: int) -> None:
    assert limit_of(configured, total=total, free=free).bytes_max == expected


def test_without_a_limit_nothing_is_cut(log: Path, writer: int) -> None:
    os.write(writer, numbered(0, 50_000))
    assert cut(log, limit_of(0, total=100 * GIB, free=50 * GIB)) == 0


def test_near_a_full_disk_the_logs_of_earlier_generations_count_too(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path)
    paths = [logs.create("gpt", generation) / "rank-0.log" for generation in (1, 2)]
    for path in paths:
        path.touch()
    current = paths[1:]
    assert sorted(logs.limited(Limit(MIB, "", scarce=True), current)) == paths
    assert list(logs.limited(Limit(MIB, ""), current)) == current


@pytest.mark.parametrize(("given", "valid"), [(0, True), (MIB, True), (MIB - 1, False), (-1, False)])
def test_the_setting(tmp_path: Path, given: int, valid: bool) -> None:
    places: dict[str, Any] = {"agent_dir": tmp_path, "memory_dir": tmp_path, "disk_dir": tmp_path}
    if valid:
        assert AgentSettings(supervisor="h:1", log_bytes_max=given, **places).log_bytes_max == given
        return
    with pytest.raises(ValidationError):
        AgentSettings(supervisor="h:1", log_bytes_max=given, **places)
