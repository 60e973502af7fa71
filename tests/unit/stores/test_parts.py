"""How a large object is cut, and how long a store is waited for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.errors import Unavailable
from holdfast.stores.gcs_compose import PARTS_MAX, split
from holdfast.stores.patience import DELAY_S_MAX, Patience, Transient


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers(1, 100))
def test_parts_are_the_whole(parts: list[bytes], least: int) -> None:
    shares = split([memoryview(part) for part in parts], least)
    assert b"".join(bytes(piece) for share in shares for piece in share) == b"".join(parts)
    assert len(shares) <= PARTS_MAX
    sizes = [sum(map(len, share)) for share in shares]
    assert all(size >= least for size in sizes[:-1])
    assert len(set(sizes[:-1])) <= 1


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        self.now_s += delay_s

    def patience(self, deadline_s: float) -> Patience:
        return Patience(deadline_s, clock=lambda: self.now_s, sleep=self.sleep, chance=random.Random(1))


def test_waits_longer_each_time_and_not_for_ever() -> None:
    time = Time()
    patience = time.patience(60.0)

    def for_ever() -> None:
        while True:
            patience.failed(Transient("HTTP 503"), "reading x")

    with pytest.raises(Unavailable, match=r"reading x failed for 5\d\.\d s; the last error: HTTP 503"):
        for_ever()
    assert time.now_s <= 60.0
    assert all(
        later > 0.9 * sooner or later >= DELAY_S_MAX / 2
        for sooner, later in zip(time.slept, time.slept[1:], strict=False)
    )
    assert max(time.slept) <= DELAY_S_MAX
    assert len(set(time.slept)) == len(time.slept)  # jitter


def test_a_long_try_is_no_failure() -> None:
    time = Time()
    patience = time.patience(10.0)
    time.now_s += 3600.0
    patience.failed(Transient("broken stream"), "reading x")
    assert time.now_s < 3610.0


def test_progress_starts_the_time_again() -> None:
    time = Time()
    patience = time.patience(10.0)
    for _ in range(100):
        patience.failed(Transient("broken stream"), "reading x")
        time.now_s += 5.0
        patience.progressed()
    assert time.now_s > 500


def test_the_server_may_ask_for_time() -> None:
    time = Time()
    time.patience(60.0).failed(Transient("HTTP 429", retry_after_s=7.0), "reading x")
    assert time.slept == [7.0]
    with pytest.raises(Unavailable):
        time.patience(5.0).failed(Transient("HTTP 429", retry_after_s=7.0), "reading x")
