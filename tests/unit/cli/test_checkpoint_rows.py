"""Which checkpoints go and which stay, and what a list says of them."""

from __future__ import annotations

import zlib

import pytest
import stored

from holdfast.cli import checkpoint_rows
from holdfast.cli.checkpoint_rows import ABANDONED_S, in_store, pruning, rows
from holdfast.domain.errors import NotFound
from holdfast.stores import layout
from holdfast.stores.checksum import crc32c
from holdfast.stores.memory import InMemory

NOW = 10_000_000.0


@pytest.fixture
def store() -> InMemory:
    return InMemory(clock=lambda: NOW)


def plan(store: InMemory, keep: int, now: float = NOW) -> tuple[list[int], list[int]]:
    made = pruning(in_store(store, "gpt"), keep, now)
    return [each.objects.step for each, _ in made.go], [each.objects.step for each, _ in made.stay]


def test_the_newest_stay(store: InMemory) -> None:
    for attempt, step in ((1, 10), (1, 20), (1, 30), (2, 25)):
        stored.save(store, step, attempt=attempt)
    assert plan(store, 2) == ([20, 10], [25, 30])
    assert plan(store, 9) == ([], [25, 30, 20, 10])


def test_the_newest_complete_one_always_stays(store: InMemory) -> None:
    stored.save(store, 10)
    for keep in (1, 0, -5):
        assert plan(store, keep) == ([], [10])


def test_an_upload_under_way_is_left_alone(store: InMemory) -> None:
    stored.save(store, 10)
    stored.save(store, 20, ranks=(0, 3))
    assert plan(store, 1) == ([], [20, 10])
    assert plan(store, 1, now=NOW + ABANDONED_S + 1) == ([20], [10])


@pytest.mark.parametrize("harm", ["rotten", "newer"])
def test_what_cannot_be_read_counts_for_nothing_and_is_not_deleted(store: InMemory, harm: str) -> None:
    """Were it counted, the newest good one might go in its favour."""
    stored.save(store, 10)
    stored.save(store, 20)
    key = layout.manifest_key("gpt", 1, 20)
    if harm == "rotten":
        store.rot(key, 40)
    else:
        raw = store.read(key, 1 << 20).replace(b'"schema":1', b'"schema":2')
        start, end = raw.index(b":") + 1, raw.rindex(b',"self"')
        raw = raw[:start] + raw[start:end] + b',"self":' + str(zlib.crc32(raw[start:end])).encode() + b"}\n"
        store.put(key, [raw], crc32c=crc32c(raw))
    assert plan(store, 1) == ([], [20, 10])
    states = {each.objects.step: each.state for each in in_store(store, "gpt")}
    assert states == {20: "damaged" if harm == "rotten" else "newer", 10: "complete"}
    assert checkpoint_rows.choose(store, "gpt", None, None).step == 10
    with pytest.raises(NotFound, match=r"step 20 .*complete ones: 10 \(attempt 1\)"):
        checkpoint_rows.choose(store, "gpt", 20, None)


def test_attempts_are_distinguished(store: InMemory) -> None:
    stored.save(store, 10)
    stored.save(store, 10, attempt=2)
    assert checkpoint_rows.choose(store, "gpt", 10, None).attempt == 2
    assert checkpoint_rows.choose(store, "gpt", 10, 1).attempt == 1
    with pytest.raises(NotFound, match="in attempt 3"):
        checkpoint_rows.choose(store, "gpt", 10, 3)


def test_distinct_ranks(store: InMemory) -> None:
    equal = stored.save(store, 10)
    parts = stored.save(store, 20, sharded=True)
    assert equal is not None
    assert parts is not None
    assert checkpoint_rows.distinct_ranks(equal) == (0, 1)
    assert checkpoint_rows.distinct_ranks(parts) == (0, 1, 2, 3)


def test_the_supervisor_knows_which_lineage_goes_on(store: InMemory) -> None:
    """Step 30 of attempt 1 was given up when training went back to step 20."""
    for step in (20, 30):
        stored.save(store, step)
    held = [
        {"attempt": 1, "step": 20, "mesh": {"dp": 2, "pp": 2}, "tiers": {"disk": 4}, "complete": True, "newest": True}
    ]
    assert [(row["step"], row["newest"]) for row in rows(in_store(store, "gpt"), held)] == [(30, False), (20, True)]
    assert [(row["step"], row["newest"]) for row in rows(in_store(store, "gpt"), [])] == [(30, True), (20, False)]


def test_nothing_of_any_job(store: InMemory) -> None:
    with pytest.raises(NotFound, match=r"no checkpoints of gpt in memory://store; it has no checkpoints"):
        in_store(store, "gpt")
