"""Connections that stay open between copies: one for many, never one that is broken, and none for longer than was agreed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from data_plane import JOB, NO_LIMIT, TOKEN, Here, saved, whole
from waiting import TIMEOUT_S

from holdfast.domain.errors import Unavailable
from holdfast.domain.generations import ShardSource
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.transport import frames, kept, lanes
from holdfast.replicator.transport.kept import IDLE_S, LIFE_S, LINES_MAX, KeptLines
from holdfast.replicator.transport.line import Line
from holdfast.runtime.processes.readable import readable

SMALL = 1 << 16


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    node = Here(tmp_path / "b")
    yield node
    node.takers.shutdown()


def push(here: Here, peer: ShardSource, root: Path, step: int, nbytes: int = SMALL) -> None:
    with saved(root / f"a{step}", step, nbytes) as shard:
        here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT)
        assert whole(here.memory, shard)


def test_copies_that_follow_each_other_use_one_connection(here: Here, tmp_path: Path) -> None:
    with here.listening() as peer:
        for step in (10, 20, 30):
            push(here, peer, tmp_path, step)
        assert here.connections == 1
        assert len(here.arrived) == 3


def test_a_question_about_a_copy_needs_no_connection_of_its_own(here: Here, tmp_path: Path) -> None:
    with here.listening() as peer, saved(tmp_path / "a", 10, SMALL) as shard:
        assert here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT) is None
        with here.memory.open(JOB, shard.manifest.key) as copy:
            here.disk.put(JOB, copy, NO_LIMIT)
        assert here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT, sent=True) == shard.manifest.key
        assert here.connections == 1


def test_all_connections_of_a_large_copy_are_used_again(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LANE_BYTES_MIN", 1 << 20)
    with here.listening() as peer:
        for step in (10, 20):
            push(here, peer, tmp_path, step, 33 << 20)
        assert here.connections == 3


@pytest.mark.parametrize("noticed", [True, False], ids=["it was closed", "it breaks when it is used"])
def test_a_peer_that_restarts_between_two_copies_costs_none(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    with here.listening() as peer:
        push(here, peer, tmp_path, 10)
        (line,) = here.client.kept.take(peer, 1)
        here.restart()
        if noticed:
            assert readable(line.sock, TIMEOUT_S), "the end of the connection has arrived"
        else:
            monkeypatch.setattr(kept, "readable", lambda *of: False)
        here.client.kept.put(line)
        push(here, peer, tmp_path, 20)
        assert here.connections == 2


def test_a_peer_that_keeps_no_connections_gets_a_new_one_for_each_copy(tmp_path: Path) -> None:
    """As an earlier version does, and one that has too many."""
    node = Here(tmp_path / "b", served_max=0)
    with node.listening() as peer:
        for step in (10, 20):
            push(node, peer, tmp_path, step)
        assert node.connections == 2
    node.takers.shutdown()


def test_a_peer_keeps_as_many_connections_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LANE_BYTES_MIN", 1 << 20)
    node = Here(tmp_path / "b", served_max=1)
    with node.listening() as peer:
        push(node, peer, tmp_path, 10, 33 << 20)
        assert node.connections == 3
        push(node, peer, tmp_path, 20, 33 << 20)
        assert node.connections == 5, "one of three was kept"
    node.takers.shutdown()


def test_a_sender_that_does_not_ask_for_it_gets_its_connection_closed(here: Here, tmp_path: Path) -> None:
    """An earlier version reads no more than its receipt, and would leave the server waiting."""
    with here.listening() as peer, saved(tmp_path / "a", 10, SMALL) as shard, here.client.connected(peer) as line:
        answer = offer(line, shard)
        pour(line, shard, answer["spans"])
        assert "next" not in line.accepted(TOKEN)
        assert line.sock.recv(1) == b""


def offer(line: Line, shard: OpenShard, **more: object) -> dict[str, list[int]]:
    text = shard.manifest.encode().decode()
    return dict(line.ask("put", JOB, TOKEN, manifest=text, lane=0, lanes=1, **more))


def pour(line: Line, shard: OpenShard, spans: list[int]) -> None:
    for number in spans:
        span = shard.manifest.spans[number]
        frames.pour(line.sock, shard.data[span.offset : span.offset + span.size])


def test_a_request_that_was_recorded_is_refused_when_it_is_sent_again(here: Here, tmp_path: Path) -> None:
    with here.listening() as peer, saved(tmp_path / "a", 10, SMALL) as shard, here.client.connected(peer) as line:
        pour(line, shard, offer(line, shard, keep=True)["spans"])
        receipt = line.accepted(TOKEN)
        assert receipt["next"] not in ("", line.challenge)
        with pytest.raises(Unavailable, match="unknown job or wrong token"):
            offer(line, shard, keep=True)  # signed for the nonce of the first request
        assert line.sock.recv(1) == b""


def test_each_request_is_signed_with_the_present_token(here: Here, tmp_path: Path) -> None:
    with here.listening() as peer:
        push(here, peer, tmp_path, 10)
        here.token = "another run"
        with saved(tmp_path / "a20", 20, SMALL) as shard:
            with pytest.raises(Unavailable, match="wrong token"):
                here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT)
            here.client.push(peer, JOB, "another run", shard, NO_LIMIT)
        assert len(here.arrived) == 2


def test_a_peer_that_takes_too_long_is_not_asked_twice(here: Here, tmp_path: Path) -> None:
    """It may still be receiving the copy, and would fail both."""
    with here.listening() as peer:
        push(here, peer, tmp_path, 10)
        (line,) = here.client.kept.take(peer, 1)
        asked, silent = socket.socketpair()
        with silent, asked:
            frames.block(asked, 0.05)
            here.client.kept.put(replace(line, sock=asked))
            with saved(tmp_path / "a20", 20, SMALL) as shard, pytest.raises(Unavailable, match="timed out"):
                here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT)
        assert here.connections == 1
        line.close()


class Idle:
    """Connections to peers that say nothing, and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.lines = KeptLines(lambda: self.now)
        self.closing = ExitStack()

    def line(self, node: str) -> Line:
        ours, theirs = socket.socketpair()
        closing = ExitStack()
        for each in (ours, theirs):
            closing.enter_context(each)
            self.closing.enter_context(each)
        return Line(ShardSource(node, f"{node}:1"), ours, "", 2, self.now, closing)


@pytest.fixture
def idle() -> Iterator[Idle]:
    made = Idle()
    with made.closing:
        yield made


def test_a_connection_is_kept_for_a_limited_time(idle: Idle) -> None:
    first, second = idle.line("b"), idle.line("b")
    idle.lines.put(first)
    idle.now += IDLE_S
    assert idle.lines.take(first.peer, 4) == [first]
    idle.lines.put(first)
    idle.now += IDLE_S + 1
    idle.lines.put(second)
    assert first.sock.fileno() == -1
    assert idle.lines.take(first.peer, 4) == [second]


def test_a_connection_that_is_always_in_use_ends_too(idle: Idle) -> None:
    line, uses = idle.line("b"), 0
    idle.lines.put(line)
    while idle.lines.take(line.peer, 1):
        uses += 1
        idle.now += IDLE_S / 2
        idle.lines.put(line)
    assert line.sock.fileno() == -1
    assert uses == pytest.approx(LIFE_S / (IDLE_S / 2), abs=1)


def test_the_connections_of_all_peers_are_limited(idle: Idle) -> None:
    lines = [idle.line(f"n{number}") for number in range(LINES_MAX + 3)]
    for line in lines:
        idle.lines.put(line)
    assert [line.sock.fileno() == -1 for line in lines] == [True] * 3 + [False] * LINES_MAX
    assert idle.lines.take(lines[0].peer, 1) == []
    assert idle.lines.take(lines[5].peer, 1) == [lines[5]]


def test_a_connection_is_of_one_peer_at_one_address(idle: Idle) -> None:
    line = idle.line("b")
    idle.lines.put(line)
    assert idle.lines.take(ShardSource("b", "elsewhere:1"), 1) == []
    assert idle.lines.take(ShardSource("c", line.peer.endpoint), 1) == []
    assert idle.lines.take(line.peer, 1) == [line]
