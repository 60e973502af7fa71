"""Pages that are used again, and copies that arrive over several connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from data_plane import JOB, NBYTES, NO_LIMIT, TOKEN, Here, Roomy, saved, whole

from holdfast.domain.errors import HoldfastError, IntegrityError, NotFound, Unavailable
from holdfast.domain.generations import ShardSource
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.warm import DIRECTORY, WarmFiles
from holdfast.replicator.transport import frames, lanes
from holdfast.replicator.view import Held, Tier
from holdfast.replicator.wanted import Wanted
from holdfast.shards import Manifest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setattr(lanes, "LANE_BYTES_MIN", 1 << 20)
    node = Here(tmp_path / "b")
    yield node
    node.takers.shutdown()


def test_a_copy_comes_to_memory_over_several_connections_and_counts_once_it_is_on_disk(
    here: Here, tmp_path: Path
) -> None:
    with saved(tmp_path / "a", 10) as shard, here.listening() as peer:
        key = shard.manifest.key
        assert here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT) is None
        assert here.connections == 3
        assert here.arrived == [(key, Tier.STAGED)]
        assert whole(here.memory, shard)
        assert here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT) is None, "it has it, in memory"
        with here.memory.open(JOB, key) as copy:
            here.disk.put(JOB, copy, NO_LIMIT)
        assert here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT) == key
        assert here.arrived == [(key, Tier.STAGED)], "nothing was sent twice"


def test_where_memory_has_no_room_a_copy_goes_to_the_disk(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Roomy, "has_room", lambda warm, size: False)
    with saved(tmp_path / "a", 10) as shard, here.listening() as peer:
        assert here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT) == shard.manifest.key
        assert here.arrived == [(shard.manifest.key, Tier.DISK)]
        assert whole(here.disk, shard)


@pytest.mark.parametrize(("share", "free", "room"), [(1.0, 0.0, True), (0.0, 0.0, False), (1.0, 1.0, False)])
def test_copies_take_a_share_of_memory_and_leave_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, free: float, room: bool
) -> None:
    monkeypatch.setattr("holdfast.replicator.tiers.warm.SHARE_MAX", share)
    monkeypatch.setattr("holdfast.replicator.tiers.warm.FREE_MIN", free)
    warm = WarmFiles(tmp_path)
    assert warm.has_room(1 << 20) is room
    warm.reserve(2, 1 << 20)
    assert len(list(tmp_path.rglob("*"))) == (3 if room else 0), "the directory and two files"
    if not room:
        return
    monkeypatch.setattr("holdfast.replicator.tiers.warm.SHARE_MAX", 0.0)
    assert warm.has_room(1 << 20), "what is kept is there already"
    assert not warm.has_room(1 << 10), "a thousandth of it would be a waste"
    warm.give_back()
    assert not warm.has_room(1 << 20)


def test_a_sender_that_knows_only_the_disk_gets_its_answer_when_the_copy_is_on_disk(here: Here, tmp_path: Path) -> None:
    """Version 1: one connection, everything from one span on."""
    with saved(tmp_path / "a", 10) as shard, here.listening() as peer:
        host, _, port = peer.endpoint.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            challenge = str(frames.receive(sock).fields["nonce"])
            request = {"op": "put", "job": JOB, "manifest": shard.manifest.encode().decode(), "nonce": "n"}
            frames.send(sock, request, token=TOKEN, challenge=challenge)
            assert frames.receive(sock).fields["from"] == 0
            sock.sendall(shard.data)
            assert frames.receive(sock).fields["ok"] is True
        assert here.arrived == [(shard.manifest.key, Tier.DISK)]


def test_pages_of_a_shard_that_leaves_memory_are_the_next_ones(here: Here, tmp_path: Path) -> None:
    with here.listening() as peer:
        with saved(tmp_path / "a", 10) as first:
            here.client.push(peer, JOB, TOKEN, first, NO_LIMIT)
            key = first.manifest.key
        inode = here.memory.path(JOB, key).stat().st_ino
        here.memory.delete(JOB, key)
        with pytest.raises(NotFound):
            here.memory.open(JOB, key)
        assert [path.stat().st_ino for path in kept(here)] == [inode]
        with saved(tmp_path / "a", 20) as second:
            here.client.push(peer, JOB, TOKEN, second, NO_LIMIT)
            assert whole(here.memory, second)
            assert here.memory.path(JOB, second.manifest.key).stat().st_ino == inode
        assert kept(here) == []


def kept(here: Here) -> list[Path]:
    directory = here.warm._directory
    assert directory.name == DIRECTORY
    return list(directory.iterdir())


def test_pages_that_somebody_reads_are_nobody_elses(here: Here, tmp_path: Path) -> None:
    with here.listening() as peer, saved(tmp_path / "a", 10) as shard:
        here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT)
        with here.memory.open(JOB, shard.manifest.key) as reading:
            here.memory.delete(JOB, shard.manifest.key)
            assert not here.warm._directory.exists() or kept(here) == []
            assert bytes(reading.data) == bytes(shard.data)


def test_kept_pages_are_given_back_when_the_job_is_forgotten(here: Here, tmp_path: Path) -> None:
    with here.listening() as peer, saved(tmp_path / "a", 10) as shard:
        here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT)
        here.memory.delete(JOB, shard.manifest.key)
        assert kept(here)
        here.memory.forget(JOB)
        assert kept(here) == []
        assert here.warm._pages == {}, "a mapping would keep the memory"


def test_a_fetch_over_several_connections_is_the_shard_and_nobody_is_suspected(here: Here, tmp_path: Path) -> None:
    with saved(tmp_path / "a", 10) as shard, here.listening() as peer:
        here.disk.put(JOB, shard, NO_LIMIT)
        other = Here(tmp_path / "c")
        path = other.client.fetch(peer, JOB, TOKEN, Wanted.like(shard.manifest), other.memory)
        other.takers.shutdown()
        assert path.read_bytes() == bytes(shard.data)
        assert here.connections == 3
    assert here.suspected == []


def test_one_damaged_span_on_one_of_the_connections_spoils_the_fetch(here: Here, tmp_path: Path) -> None:
    with saved(tmp_path / "a", 10) as shard, here.listening() as peer:
        here.disk.put(JOB, shard, NO_LIMIT)
        with here.disk.path(JOB, shard.manifest.key).open("r+b") as file:
            file.seek(NBYTES - 5000)
            file.write(b"\xff\x00")
        inbox = FileTier("memory", tmp_path / "c", "staged", warm=WarmFiles(tmp_path / "c"))
        with pytest.raises(IntegrityError, match="arrived damaged"):
            here.client.fetch(peer, JOB, TOKEN, Wanted(shard.manifest.key), inbox)
        assert inbox.shards(JOB) == []
    assert here.suspected == [Held(Tier.DISK, shard.manifest.key)]


def ask(sock: socket.socket, shard: OpenShard, lane: int, count: int) -> list[int]:
    """Begin a put as one of `count` connections; what the other end wants on it."""
    challenge = str(frames.receive(sock).fields["nonce"])
    request = {
        "op": "put", "job": JOB, "manifest": shard.manifest.encode().decode(), "nonce": "n", "lane": lane, "lanes": count,
    }  # fmt: skip
    frames.send(sock, request, token=TOKEN, challenge=challenge)
    return [int(number) for number in frames.receive(sock).fields["spans"]]


def bring(sock: socket.socket, shard: OpenShard, spans: list[int]) -> None:
    for number in spans:
        span = shard.manifest.spans[number]
        sock.sendall(shard.data[span.offset : span.offset + span.size])
    receipt(sock)


def receipt(sock: socket.socket) -> None:
    if not (reported := frames.receive(sock).fields)["ok"]:
        raise Unavailable(str(reported["reason"]))


def connect(peer: ShardSource) -> socket.socket:
    host, _, port = peer.endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), 5)


def test_a_span_is_one_connections_and_a_second_that_claims_it_gets_none(here: Here, tmp_path: Path) -> None:
    with saved(tmp_path / "a", 10) as shard, here.listening() as peer, connect(peer) as one, connect(peer) as two:
        every = ask(one, shard, 0, 1)
        assert every == list(range(len(shard.manifest.spans)))
        assert ask(two, shard, 0, 1) == []
        for number in every:
            span = shard.manifest.spans[number]
            one.sendall(shard.data[span.offset : span.offset + span.size])
        assert frames.receive(one).fields["ok"] is True
        assert frames.receive(two).fields["ok"] is True
        assert whole(here.memory, shard)
        assert here.arrived == [(shard.manifest.key, Tier.STAGED)]


@pytest.mark.parametrize("how", ["hangs up", "sends damaged bytes", "says nothing"])
def test_a_copy_of_which_one_connection_fails_is_none_and_the_next_try_brings_the_rest(
    here: Here, tmp_path: Path, how: str
) -> None:
    with saved(tmp_path / "a", 10) as shard, here.listening() as peer:
        with connect(peer) as one:
            mine = ask(one, shard, 0, 2)
            with here.impatient() if how == "says nothing" else nullcontext(), connect(peer) as two:
                first = shard.manifest.spans[ask(two, shard, 1, 2)[0]]
                match how:
                    case "hangs up":
                        two.close()
                    case "sends damaged bytes":
                        two.sendall(bytes(first.size))
                with pytest.raises((Unavailable, OSError)):
                    bring(one, shard, mine)
        assert here.memory.shards(JOB) == []
        assert here.arrived == []
        here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT)
        assert whole(here.memory, shard)


@pytest.mark.parametrize("spans", [[-1], [99], ["0"], "all", [True], {"0": 1}])
def test_spans_that_nobody_has_are_refused(spans: object) -> None:
    with pytest.raises(HoldfastError):
        frames.wanted_spans({"spans": spans}, 6)


def test_a_manifest_that_contradicts_itself_is_not_taken(here: Here, tmp_path: Path) -> None:
    with saved(tmp_path / "a", 10) as shard, here.listening() as peer, connect(peer) as sock:
        challenge = str(frames.receive(sock).fields["nonce"])
        lie: Manifest = shard.manifest
        raw = lie.encode().decode().replace('"step":10', '"step":11')
        request = {"op": "put", "job": JOB, "manifest": raw, "nonce": "n", "lane": 0, "lanes": 1}
        frames.send(sock, request, token=TOKEN, challenge=challenge)
        assert frames.receive(sock).fields["ok"] is False
    assert here.memory.shards(JOB) == []
