"""Copies on other nodes: who keeps whose, and what happens when the other side does not play along."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standalone_ranks import Ranks, stage
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported without saying so

from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.shards import Reader
from holdfast.train.standalone import peers as peers_module
from holdfast.train.standalone.board import Board
from holdfast.train.standalone.directory import Directory
from holdfast.train.standalone.peers import Peers, targets

TIMEOUT_S = 30.0
DP2 = Mesh.of({"dp": 2})


def test_pairs_of_nodes_keep_each_others_ranks_and_three_make_a_ring() -> None:
    assert targets([0]) == (None,)
    assert targets([0, 0]) == (None, None)  # one shared directory
    assert targets([0, 0, 2, 2]) == (2, 3, 0, 1)
    assert targets([0, 1, 2]) == (1, 2, 0)
    assert targets([0, 1, 2, 3, 4]) == (1, 0, 3, 4, 2)
    assert targets([0, 0, 2]) == (2, 2, 0)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=24))
def test_a_copy_is_always_in_another_directory_and_work_is_dealt_evenly(volumes: list[int]) -> None:
    chosen = targets(volumes)
    if len(set(volumes)) == 1:
        assert set(chosen) == {None}
        return
    for rank, to in enumerate(chosen):
        assert to is not None
        assert volumes[to] != volumes[rank]
    pairs = {(volumes[rank], volumes[to]) for rank, to in enumerate(chosen) if to is not None}
    assert len(pairs) == len(set(volumes))  # each directory has one partner


class Pair:
    """Two ranks on two nodes, and their saves."""

    def __init__(self, tmp: Path) -> None:
        self.ranks = Ranks(tmp, ("a", "b"), DP2)
        self.board = Board(HashStore())
        self.tmp = tmp
        for node in ("a", "b"):
            self.ranks.directory(node).create()
        self.peers = [
            Peers(self.ranks.exchanges[rank], self.board, self.directory(rank), "r", (1, 0), copies_max=2)
            for rank in (0, 1)
        ]

    def directory(self, rank: int) -> Directory:
        return self.ranks.directory("ab"[rank])

    def save(self, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            staged = stage(self.tmp / "memory" / str(rank), 1, step, rank, DP2)
            with Reader(staged.path, staged.key) as reader:
                self.ranks.directory("ab"[rank]).store(reader, run="r", node="n", pace=lambda _: None)
            self.peers[rank].send(ShardKey(1, step, rank), lambda _: None)

    def close(self) -> None:
        for each in self.peers:
            threading.Thread(target=each.close, args=(TIMEOUT_S,)).start()
        for each in self.peers:
            each._thread.join(TIMEOUT_S)
            assert not each._thread.is_alive()

    def held(self, rank: int) -> list[tuple[int, int]]:
        """(step, rank) committed in this rank's directory."""
        return [(manifest.step, manifest.rank) for manifest, _ in self.ranks.directory("ab"[rank]).manifests("r")]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(peers_module, "POLL_S", 0.005)
    return Pair(tmp_path)


def test_each_keeps_the_others_shard(pair: Pair) -> None:
    pair.save(10)
    pair.close()
    assert sorted(pair.held(0)) == sorted(pair.held(1)) == [(10, 0), (10, 1)]


def test_copies_are_bounded_even_if_no_step_is_ever_complete(pair: Pair) -> None:
    for step in (10, 20, 30, 40):
        pair.save(step, ranks=(0,))
    pair.close()
    assert sorted(pair.held(1)) == [(30, 0), (40, 0)]


def damaged(data: bytes) -> bytes:
    return data if len(data) < 4000 else bytes([data[0] ^ 1]) + data[1:]


def test_a_copy_that_arrives_damaged_is_not_kept_and_the_next_one_is(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.ranks.exchanges[0].spoil = damaged
    pair.save(10, ranks=(0,))
    pair.ranks.exchanges[0].spoil = bytes
    pair.save(20, ranks=(0,))
    pair.close()
    assert pair.held(1) == [(20, 0)]
    assert "copy of rank 0 not stored" in caplog.text


def gone(data: bytes) -> bytes:
    raise RuntimeError("Connection closed by peer")


def test_a_partner_that_is_gone_ends_the_copies_and_nothing_else(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.ranks.exchanges[0].spoil = gone
    pair.ranks.exchanges[1].timeout_s = 0.01
    pair.save(10, ranks=(0,))
    pair.save(20, ranks=(0,))
    pair.close()
    assert caplog.text.count("rank 1 no longer accepts copies") == 1
    assert caplog.text.count("copies are no longer received") == 1
    assert sorted(pair.held(0)) == [(10, 0), (20, 0)]
