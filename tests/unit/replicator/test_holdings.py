"""What the plan and the inventory need of the shards is what a look at every shard gives, after any changes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.generations import ShardKey
from holdfast.replicator.holdings import Holdings
from holdfast.replicator.view import Copies, Held, Tier
from holdfast.shards import Manifest

helds = st.builds(
    Held,
    st.sampled_from(list(Tier)),
    st.builds(ShardKey, st.integers(1, 2), st.sampled_from([10, 20]), st.integers(0, 2)),
)


def manifest(held: Held, digest: str) -> Manifest:
    key = held.key
    return Manifest(
        job="llm", node="a", attempt=key.attempt, step=key.step, rank=key.rank, mesh=(("dp", 4),), parent=None, size=4096,
        tensors_end=4096, digest=digest, crc32c=0, span_crc32c=(0,), created_at=1.0, producer="test",
    )  # fmt: skip


@given(st.lists(st.tuples(helds, st.sampled_from(["put", "put again", "drop"])), max_size=40))
def test_copies_and_records_follow_every_change(changes: list[tuple[Held, str]]) -> None:
    holdings, expected = Holdings(), dict[Held, Manifest]()
    for held, change in changes:
        if change == "drop":
            holdings.pop(held, None)
            expected.pop(held, None)
        else:
            holdings[held] = expected[held] = manifest(held, change)
        assert dict(holdings) == expected
        assert holdings.copies == Copies.of(expected)
        assert set(holdings.copies) == set(expected)
        assert len(holdings.copies) == len(expected)
        assert all((each in holdings.copies) is (each in expected) for each, _ in changes)
        records = holdings.records()
        places = [(each.key.attempt, each.key.step, each.key.rank, each.tier) for each in records]
        names = {Tier.IMAGE: "memory", Tier.STAGED: "memory", Tier.DISK: "disk"}
        assert places == sorted({(*_numbers(each.key), names[each.tier]) for each in expected})
        digests = {(each.key, names[each.tier]): [] for each in expected}  # type: ignore[var-annotated]
        for each, its in expected.items():
            digests[each.key, names[each.tier]].append(its.digest)
        assert all(record.digest in digests[record.key, record.tier] for record in records)


def _numbers(key: ShardKey) -> tuple[int, int, int]:
    return key.attempt, key.step, key.rank


@given(st.lists(helds, max_size=20), helds)
def test_copies_are_values(shards: list[Held], other: Held) -> None:
    copies = Copies.of(shards)
    more = copies.with_shard(other)
    assert set(copies) == set(shards), "a change makes another one"
    assert copies == Copies.of(reversed(shards))
    assert hash(copies) == hash(Copies.of(reversed(shards)))
    assert (more == copies) is (other in copies)
    assert more.without(other) == Copies.of(each for each in shards if each != other)
    assert copies.without(other).without(other) == copies.without(other)
    in_tier = copies.in_tier(Tier.DISK)
    assert all(ranks for ranks in in_tier.values()), "no checkpoint without shards"


def test_a_save_that_replaces_another_of_the_same_name_is_reported() -> None:
    holdings, held = Holdings(), Held(Tier.IMAGE, ShardKey(1, 10, 0))
    holdings[held] = manifest(held, "before")
    assert [each.digest for each in holdings.records()] == ["before"]
    holdings[held] = replace(holdings[held], digest="after")
    assert [each.digest for each in holdings.records()] == ["after"]
