"""A replicator that died comes back within seconds: a restore waits for it and gives no step up."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from replicator_node import Node, nodes
from waiting import TIMEOUT_S

from holdfast.domain.generations import ShardKey

KEY = ShardKey(1, 10, 0)


def saved_by_a(a: Node, b: Node) -> None:
    b.configure(ranks=(1,), peers=(a,))
    a.configure(peers=(b,))
    a.wait_for(a.save(a.images(), 10), "disk")
    b.wait_for(KEY, "disk")


def test_a_source_that_is_being_started_again_is_waited_for(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b", "spare") as (a, b, spare), ThreadPoolExecutor(1) as caller:
        saved_by_a(a, b)
        spare.configure(generation=2, attempt=2)
        a.stop(signal.SIGKILL)
        staged = caller.submit(spare.stage, KEY, a)
        with pytest.raises(TimeoutError):
            staged.result(0.5)
        a.start()  # as its agent starts it again: at the same address
        assert staged.result(TIMEOUT_S).source == "a"


def test_nobody_is_waited_for_while_another_has_it(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b", "spare") as (a, b, spare):
        saved_by_a(a, b)
        spare.configure(generation=2, attempt=2)
        a.stop(signal.SIGKILL)
        assert spare.stage(KEY, a, b, timeout_s=10.0).source == "b"


def test_one_that_stays_away_is_waited_for_as_long_as_the_restore_may_take(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b", "spare") as (a, b, spare):
        saved_by_a(a, b)
        spare.configure(generation=2, attempt=2)
        a.stop(signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as refused:
            spare.stage(KEY, a, timeout_s=1.0)
        assert refused.value.code() is grpc.StatusCode.ABORTED
        assert "Connection refused" in str(refused.value)
