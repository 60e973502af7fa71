"""What ranks print, read while it is written: torn lines, missing files, emptied files, the last words of an old generation."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.workers.logs import tail
from holdfast.cli import log_tail, logs
from holdfast.cli.log_tail import ALL_RANKS, LogTail, Ranks, RemoteTail
from holdfast.domain.errors import Conflict, HoldfastError, NotFound


class Nodes:
    """The one call of the client that a tail makes."""

    def __init__(self, directory: Path, hostname: str = "") -> None:
        self._directory, self._hostname = directory, hostname or socket.gethostname()

    def node(self, name: str) -> dict[str, str]:
        return {"node": name, "directory": str(self._directory / name), "hostname": self._hostname}


def view(generation: int, *ranks: int) -> dict[str, Any]:
    return {"generation": generation, "ranks": [{"rank": rank, "node": f"n{rank}"} for rank in ranks]}


def log(directory: Path, rank: int, generation: int = 1) -> Path:
    path = directory / f"n{rank}" / "logs" / "llm" / f"g{generation}" / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def tail_of(directory: Path, ranks: Ranks = ALL_RANKS, hostname: str = "") -> LogTail:
    return LogTail(Nodes(directory, hostname), "llm", ranks)  # type: ignore[arg-type]


def test_lines_are_shown_once_and_whole(tmp_path: Path) -> None:
    tail, path = tail_of(tmp_path), log(tmp_path, 0)
    append(path, b"one\ntw")
    assert list(tail.lines(view(1, 0))) == ["[rank0] one"]
    append(path, b"o\nthree\r\n")
    assert list(tail.lines(view(1, 0))) == ["[rank0] two", "[rank0] three"]
    assert list(tail.lines(view(1, 0))) == []


def test_what_torch_says_of_the_flight_recorder_s_server_is_left_out(tmp_path: Path) -> None:
    """As torch 2.13 writes it at the start and the end of every rank that an agent can read the recorder of."""
    path = log(tmp_path, 0)
    append(
        path,
        b"[rank0]:[W1125 22:55:56.685 WorkerServer.cpp:113] [c10d] Server listening to UNIX /tmp/fr-5c66-2-0.sock\n",
    )
    append(path, b"[W1125 22:55:57.1 ProcessGroupGloo.cpp:760] [c10d] connection refused\nepoch 1\n")
    append(path, b"[rank0]:[W1125 22:56:03.852 WorkerServer.cpp:144] [c10d] Server shutting down\n")
    append(path, b"[rank0]:[W1125 22:56:03.856 WorkerServer.cpp:139] [c10d] Server exited\n")
    assert list(tail_of(tmp_path).lines(view(1, 0))) == [
        "[rank0] [W1125 22:55:57.1 ProcessGroupGloo.cpp:760] [c10d] connection refused",
        "[rank0] epoch 1",
    ]
    assert tail(path) == ("[W1125 22:55:57.1 ProcessGroupGloo.cpp:760] [c10d] connection refused", "epoch 1")


def test_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    tail = tail_of(tmp_path)
    assert list(tail.lines(view(1, 0))) == []
    append(log(tmp_path, 0), b"late\n")
    assert list(tail.lines(view(1, 0))) == ["[rank0] late"]


def test_only_the_chosen_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        append(log(tmp_path, rank), b"x\n")
    assert list(tail_of(tmp_path, frozenset({2})).lines(view(1, 0, 1, 2))) == ["[rank2] x"]
    assert list(tail_of(tmp_path, frozenset()).lines(view(1, 0, 1, 2))) == []


def test_the_last_words_when_the_job_has_ended(tmp_path: Path) -> None:
    """A finished job has no ranks any more; what they printed last matters most."""
    tail = tail_of(tmp_path)
    append(log(tmp_path, 0), b"start\n")
    assert list(tail.lines(view(1, 0))) == ["[rank0] start"]
    append(log(tmp_path, 0), b"done\nno end")
    assert [*tail.lines(view(1)), *tail.rest()] == ["[rank0] done", "[rank0] no end"]


def test_the_last_words_of_the_generation_before(tmp_path: Path) -> None:
    tail = tail_of(tmp_path)
    assert list(tail.lines(view(1, 0))) == []
    append(log(tmp_path, 0), b"Traceback\nValueError: x")
    append(log(tmp_path, 0, generation=2), b"again\n")
    assert list(tail.lines(view(2, 0))) == ["[rank0] Traceback", "[rank0] again"]
    assert list(tail.lines(view(3, 0))) == ["[rank0] ValueError: x"]


def test_more_than_one_look_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "READ_BYTES_MAX", 10)
    tail = tail_of(tmp_path)
    append(log(tmp_path, 0), b"".join(b"line %d\n" % number for number in range(20)))
    shown = [*tail.lines(view(1, 0)), *tail.rest()]
    assert shown == [f"[rank0] line {number}" for number in range(20)]


def test_a_line_without_an_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "LINE_BYTES_MAX", 4)
    tail = tail_of(tmp_path)
    append(log(tmp_path, 0), b"12345")
    assert list(tail.lines(view(1, 0))) == ["[rank0] 12345"]


def test_an_emptied_file_is_read_from_its_start(tmp_path: Path) -> None:
    tail, path = tail_of(tmp_path), log(tmp_path, 0)
    append(path, b"a long first line\n")
    assert list(tail.lines(view(1, 0))) == ["[rank0] a long first line"]
    path.write_bytes(b"new\n")
    assert list(tail.lines(view(1, 0))) == ["[rank0] new"]


def test_the_hole_of_a_bounded_log_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    tail = tail_of(tmp_path)
    append(log(tmp_path, 0), b"\0" * 4096 + b"af\xffter\n")
    assert list(tail.lines(view(1, 0))) == ["[rank0] af�ter"]


def test_a_log_that_cannot_be_read_is_said_once(tmp_path: Path) -> None:
    tail = tail_of(tmp_path)
    log(tmp_path, 0).mkdir()
    (line,) = tail.lines(view(1, 0))
    assert "rank-0.log" in line
    assert "Is a directory" in line
    assert [*tail.lines(view(1, 0)), *tail.rest()] == []


class Elsewhere(Nodes):
    """Nodes of another machine: their logs come through the API, from their agents."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "elsewhere")
        self.logs: dict[int, bytes] = {}  # by rank
        self.asked: list[tuple[int, int]] = []  # rank and offset
        self.away: HoldfastError | None = None

    def rank_log(self, job: str, rank: int, generation: int, offset: int, limit: int) -> dict[str, Any]:
        self.asked.append((rank, offset))
        if self.away is not None:
            raise self.away
        if rank not in self.logs:
            raise NotFound("there is no such log")
        data = self.logs[rank]
        text = data[offset : offset + limit].decode()
        return {"text": text, "offset": offset, "next_offset": offset + len(text.encode()), "size": len(data)}


def test_the_log_of_a_rank_on_another_machine_comes_from_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "REMOTE_EVERY_S", 0.0)
    append(log(tmp_path, 0), b"of another stack with the same paths\n")
    nodes = Elsewhere(tmp_path)
    tail = LogTail(nodes, "llm", ALL_RANKS)  # type: ignore[arg-type]
    assert list(tail.lines(view(1, 0))) == [], "it may not have been created yet"
    nodes.logs[0] = b"one\ntw"
    assert list(tail.lines(view(1, 0))) == ["[rank0] one"]
    nodes.logs[0] += b"o\nthe last one"
    assert list(tail.lines(view(1, 0))) == ["[rank0] two"]
    assert list(tail.rest()) == ["[rank0] the last one"]


def test_of_ranks_on_other_machines_the_first_is_shown_or_the_chosen_ones(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    list(LogTail(nodes, "llm", ALL_RANKS).lines(view(1, *range(100))))  # type: ignore[arg-type]
    assert nodes.asked == [(0, 0)], "a request each second for each of 100,000 ranks would be a load"
    nodes.asked.clear()
    list(LogTail(nodes, "llm", frozenset({7, 8})).lines(view(1, *range(100))))  # type: ignore[arg-type]
    assert nodes.asked == [(7, 0), (8, 0)]


def test_an_agent_that_does_not_answer_is_asked_seldom_and_that_is_said_once(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    nodes.away = Conflict("no answer within 3 s")
    now = [0.0]
    tail = RemoteTail(
        Path(), "", client=nodes, job="llm", generation=1, rank=0, clock=lambda: now[0],  # type: ignore[arg-type]
    )  # fmt: skip
    (line,) = tail.lines()
    assert "no answer within 3 s" in line
    for _ in range(20):
        now[0] += 1.0
        assert list(tail.lines()) == []
    assert len(nodes.asked) == 1
    nodes.away, nodes.logs[0] = None, b"again\n"
    now[0] += log_tail.REMOTE_AGAIN_S
    assert list(tail.lines()) == ["again"]


def test_of_a_line_that_was_overwritten_its_end_is_shown(tmp_path: Path) -> None:
    tail = tail_of(tmp_path)
    append(log(tmp_path, 0), b" 10 %\r 50 %\r100 %\r\ndone\r\n")
    assert list(tail.lines(view(1, 0))) == ["[rank0] 100 %", "[rank0] done"]


def test_a_progress_bar_is_shown_from_time_to_time_before_its_line_ends(tmp_path: Path) -> None:
    now, path = [100.0], log(tmp_path, 0)
    tail = log_tail.Tail(path, "", clock=lambda: now[0])
    append(path, b"\r 1 %")
    assert list(tail.lines()) == [" 1 %"]
    append(path, b"\r 2 %")
    assert list(tail.lines()) == []
    now[0] += log_tail.BAR_EVERY_S
    append(path, b"\r 3 %\r")
    assert list(tail.lines()) == [" 3 %"]
    append(path, b"\r100 %\nno end")
    assert list(tail.lines()) == ["100 %"]
    now[0] += log_tail.BAR_EVERY_S
    assert list(tail.lines()) == [], "no line of a bar: it may go on"
    append(path, b"\r1 %")
    assert list(tail.rest()) == ["1 %"]


def test_what_was_dropped_of_a_bounded_log_is_passed_over(tmp_path: Path) -> None:
    """A log of a terabyte, of which its agent has kept the end."""
    path = log(tmp_path, 0)
    with path.open("wb") as file:
        file.seek(1 << 40)
        file.write(b"the newest line\n")
    tail = log_tail.Tail(path, "")
    assert [line for line in tail.whole_lines() if line] == ["the newest line"]
    append(path, b"and another\n")
    assert list(tail.whole_lines()) == ["and another"]


def test_a_log_that_is_long_when_it_is_first_seen_is_shown_from_near_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `holdfast run --attach`: a log may have a gigabyte."""
    monkeypatch.setattr(log_tail, "FROM_END_BYTES", 100)
    tail, path = tail_of(tmp_path), log(tmp_path, 0)
    append(path, b"".join(b"line %d\n" % number for number in range(1000)))
    lines = list(tail.lines(view(1, 0)))
    assert lines[0] == f"[rank0] (earlier output is not shown: {path})"
    assert lines[1] == "[rank0] line 989"
    assert lines[-1] == "[rank0] line 999"
    append(path, b"more\n")
    assert list(tail.lines(view(1, 0))) == ["[rank0] more"]


def test_the_last_lines_are_found_without_reading_what_is_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "TAIL_BYTES", 100)
    path = tmp_path / "rank-0.log"
    append(path, b"first\n" + b"".join(b"line %d\n" % number for number in range(1000)))
    read: list[int] = []

    def last(count: int, pattern: str = "") -> list[str]:
        tail = log_tail.Tail(path, "")
        found = list(logs._last_lines(tail, count, re.compile(pattern)))
        assert list(tail.whole_lines()) == [], "what follows is read next"
        return found

    whole = log_tail.Tail._read

    def noted(tail: log_tail.Tail) -> bytes:
        read.append(tail.position)
        return whole(tail)

    monkeypatch.setattr(log_tail.Tail, "_read", noted)
    assert last(3) == ["line 997", "line 998", "line 999"]
    assert min(read) > 8000, "not from the beginning"
    assert last(2, "first|line 999") == ["first", "line 999"], "further back if need be"
    assert len(last(0)) == 1001
    assert len(last(5000)) == 1001
