"""Shards up to and down from a store that fails in every way it can."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import (
    Conflict,
    HoldfastError,
    IncompatibleVersion,
    IntegrityError,
    NotFound,
    OutOfSpace,
    Unavailable,
)
from holdfast.domain.generations import ShardKey
from holdfast.replicator.bucket import READ_STREAMS, READ_TRIES_MAX, Bucket
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.tiers.warm import WarmFiles
from holdfast.replicator.wanted import Wanted
from holdfast.shards import ImageSet, Plan, Staged, TensorSpec
from holdfast.stores import layout, unpaced
from holdfast.stores.checksum import crc32c
from holdfast.stores.memory import InMemory
from holdfast.stores.transfer import Damage

JOB = "llm"
NBYTES = 9 << 20  # more than one span
PLAN = Plan((TensorSpec("w", "uint8", (NBYTES,), NBYTES),))
KEY = ShardKey(1, 20, 0)


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageTier:
    """Step 20 of three ranks, dp 3: ranks 0 and 1 hold the same, rank 2 something else."""
    root = tmp_path_factory.mktemp("memory")
    tier = ImageTier(root, "a", Checksummer(1), overflow=root / "disk")
    for rank, value in enumerate((7, 7, 8)):
        saved = ImageSet(root / JOB / f"w{rank}").stage(
            PLAN, 1, 20, rank, {"dp": 3}, partial(fill, value=value), bytes([rank]) * 5000
        )
        assert isinstance(saved, Staged)
    for seen in tier.scan(JOB):
        tier.commit(JOB, seen)
    return tier


def fill(image: object, value: int) -> None:
    image.view("w")[:] = bytes([value]) * NBYTES  # type: ignore[attr-defined]


@pytest.fixture
def store() -> InMemory:
    return InMemory()


@pytest.fixture
def bucket(store: InMemory) -> Bucket:
    return Bucket(store, JOB)


@pytest.fixture
def inbox(tmp_path: Path) -> FileTier:
    return FileTier("memory", tmp_path, "staged", warm=WarmFiles(tmp_path))


def upload(bucket: Bucket, images: ImageTier, *ranks: int) -> None:
    for rank in ranks or (0, 1, 2):
        with images.open(JOB, ShardKey(1, 20, rank)) as shard:
            bucket.upload(shard, unpaced)


def archive(bucket: Bucket, images: ImageTier) -> None:
    upload(bucket, images)
    bucket.complete(1, 20, 3)


def fetch(bucket: Bucket, inbox: FileTier, rank: int = 0) -> None:
    bucket.fetch(bucket.manifest_of(Wanted(ShardKey(1, 20, rank))), inbox, None)


def same(images: ImageTier, inbox: FileTier, rank: int = 0) -> bool:
    key = ShardKey(1, 20, rank)
    with images.open(JOB, key) as mine, inbox.open(JOB, key) as theirs:
        return bytes(mine.data) == bytes(theirs.data)


def test_replicas_share_what_is_equal_and_the_rest_is_their_own(
    bucket: Bucket, store: InMemory, images: ImageTier, inbox: FileTier
) -> None:
    upload(bucket, images)
    checkpoint = bucket.complete(1, 20, 3)
    assert checkpoint is not None
    assert checkpoint.sharded
    assert sum(1 for info in store.list("") if info.key.endswith(".tensors")) == 2
    for rank in range(3):
        fetch(bucket, inbox, rank)
        assert same(images, inbox, rank)


def test_dying_at_any_call_leaves_nothing_that_counts_and_the_next_life_finishes(
    images: ImageTier, inbox: FileTier
) -> None:
    for answered in (False, True):  # killed before the call arrives, or after it was carried out
        for point in range(1, 100):
            store = InMemory()
            bucket = Bucket(store, JOB)
            store.before = killer(point + answered)
            try:
                upload(bucket, images)
                bucket.complete(1, 20, 3)
            except Killed:
                pass
            finished = len(store.calls) < point + answered
            store.before = None
            complete = layout.steps(store, JOB) == [(1, 20)]
            assert complete == (finished or store.stat(layout.manifest_key(JOB, 1, 20)) is not None)
            if complete:
                fetch(bucket, inbox)
                inbox.delete(JOB, KEY)
            upload(bucket, images)
            assert bucket.complete(1, 20, 3) is not None
            if finished:
                break
        else:
            pytest.fail("an upload of three ranks takes fewer than 100 calls")


def killer(point: int) -> Callable[[str, str], None]:
    calls = iter(range(1, 10**6))

    def before(operation: str, key: str) -> None:
        if next(calls) == point:
            raise Killed

    return before


def test_a_step_is_complete_only_with_every_object_in_full(bucket: Bucket, store: InMemory, images: ImageTier) -> None:
    upload(bucket, images, 0, 1)
    assert bucket.complete(1, 20, 3) is None
    upload(bucket, images, 2)
    rest = layout.rest_key(JOB, ShardKey(1, 20, 2))
    store.delete(rest)
    with pytest.raises(IntegrityError, match="rank 2 in step 20 is not complete"):
        bucket.complete(1, 20, 3)
    assert layout.steps(store, JOB) == []


def test_writers_that_race_agree_and_another_run_of_the_name_is_refused(
    bucket: Bucket, store: InMemory, images: ImageTier
) -> None:
    upload(bucket, images)

    def overtaken(operation: str, key: str) -> None:
        if (operation, key) == ("put", layout.manifest_key(JOB, 1, 20)):
            store.before = None
            assert Bucket(store, JOB).complete(1, 20, 3) is not None

    store.before = overtaken
    first = bucket.complete(1, 20, 3)
    assert store.calls.count(("put", layout.manifest_key(JOB, 1, 20))) == 2
    key = layout.manifest_key(JOB, 1, 20)
    original = store.read(key, 1 << 20)
    assert bucket.complete(1, 20, 3) == first
    upload(bucket, images)  # again, by a replicator that starts anew: nothing changes
    assert store.read(key, 1 << 20) == original
    other = original.replace(b'"step":20', b'"step":21')
    theirs = layout.rank_manifest_key(JOB, ShardKey(1, 20, 0))
    store.put(theirs, [other], crc32c=crc32c(other))
    with pytest.raises(Conflict, match="two runs of one name"):
        upload(bucket, images, 0)


@pytest.mark.parametrize("operation", ["put", "stat", "list", "read"])
def test_a_store_that_throws_at_every_kind_of_call_is_only_a_delay(
    bucket: Bucket, store: InMemory, images: ImageTier, operation: str
) -> None:
    for error in (Unavailable("HTTP 429"), Unavailable("HTTP 503"), Unavailable("timed out"), OutOfSpace("full")):
        store.fail(error, operation=operation)
        with pytest.raises(type(error)):
            archive(bucket, images)
        assert layout.steps(store, JOB) == []
    store.fail(operation="put", key_part="manifest.json", answer_lost=True)  # written, and we do not know it
    upload(bucket, images)
    with pytest.raises(Unavailable):
        bucket.complete(1, 20, 3)
    assert bucket.complete(1, 20, 3) is not None


def test_an_interrupted_fetch_goes_on_from_the_last_good_span(
    bucket: Bucket, store: InMemory, images: ImageTier, inbox: FileTier
) -> None:
    archive(bucket, images)
    reads = [0]

    def before(operation: str, key: str) -> None:
        reads[0] += operation == "read_into"
        if reads[0] == 3:
            raise Unavailable("stalled")

    store.before = before
    with pytest.raises(Unavailable):
        fetch(bucket, inbox)
    store.before = None
    store.calls.clear()
    fetch(bucket, inbox)
    assert same(images, inbox)
    assert sum(1 for operation, _ in store.calls if operation == "read_into") < 3


def test_rot_is_asked_for_again_and_then_refused(
    bucket: Bucket, store: InMemory, images: ImageTier, inbox: FileTier
) -> None:
    archive(bucket, images)
    with images.open(JOB, KEY) as shard:
        tensors, rest = layout.tensors_key(shard.manifest), layout.rest_key(JOB, KEY)
    for victim, offset in ((tensors, 5 << 20), (tensors, NBYTES), (rest, 30), (rest, 4097)):
        store.rot(victim, offset)
        store.calls.clear()
        with pytest.raises(IntegrityError, match="arrived damaged"):
            fetch(bucket, inbox)
        assert store.calls.count(("read_into", victim)) >= READ_TRIES_MAX
        assert inbox.shards(JOB) == []
        inbox.delete(JOB, KEY)  # and with it what a second try would not ask for again
        store.rot(victim, offset)
    store.truncate(tensors, 100)
    with pytest.raises(IntegrityError):
        fetch(bucket, inbox)


def test_damage_in_transit_is_distinguished_from_a_damaged_object(
    bucket: Bucket, store: InMemory, images: ImageTier
) -> None:
    archive(bucket, images)
    assert bucket.examine(ShardKey(1, 20, 1)) == []
    with images.open(JOB, KEY) as shard:
        store.rot(layout.tensors_key(shard.manifest), 5 << 20)
    (damage,) = bucket.examine(ShardKey(1, 20, 1))
    assert damage.rank == 0, "it shares its tensors with rank 0, whose node looks after them"
    assert bucket.examine(ShardKey(1, 20, 2)) == []


def test_a_damage_is_marked_beside_the_manifest_until_it_is_mended(
    bucket: Bucket, store: InMemory, images: ImageTier
) -> None:
    archive(bucket, images)
    with images.open(JOB, KEY) as shard:
        store.rot(layout.tensors_key(shard.manifest), 5 << 20)
    (damage,) = bucket.examine(KEY)
    assert bucket.mark(damage, 1, 20)
    found = bucket.survey((), newest=3)
    assert [(step.complete, step.damaged) for step in found.steps] == [(False, True)]
    assert found.stored[CheckpointId(1, 20)].damage == "the shard of rank 0 is damaged"
    assert layout.steps(store, JOB) == []
    assert not bucket.unmark(ShardKey(1, 20, 1)), "nobody has said anything of that one"
    bucket.repair_object(images.open(JOB, KEY), damage.key, unpaced)
    assert bucket.unmark(KEY)
    assert bucket.survey((), newest=3).stored[CheckpointId(1, 20)].damage == ""
    assert layout.steps(store, JOB) == [(1, 20)]


def test_a_step_that_has_left_the_store_is_not_marked(bucket: Bucket, store: InMemory, images: ImageTier) -> None:
    archive(bucket, images)
    bucket.discard(1, 20)
    assert not bucket.mark(Damage("gone", "is not there", 0), 1, 20)
    assert list(store.list("")) == []


def test_a_cancelled_fetch_reads_no_further(
    bucket: Bucket, store: InMemory, images: ImageTier, inbox: FileTier
) -> None:
    archive(bucket, images)
    manifest = bucket.manifest_of(Wanted(KEY))
    cancelled = threading.Event()
    store.before = lambda operation, _: cancelled.set() if operation == "read_into" else None
    store.calls.clear()
    with pytest.raises(Unavailable, match="was cancelled"):
        bucket.fetch(manifest, inbox, None, cancelled=cancelled)
    asked = sum(operation == "read_into" for operation, _ in store.calls)
    assert 1 <= asked <= READ_STREAMS + 1, "what was under way, and nothing after it"
    store.before = None
    fetch(bucket, inbox)
    assert same(images, inbox)


def test_what_is_on_this_node_is_not_fetched_and_a_rotten_donor_is_no_harm(
    bucket: Bucket, store: InMemory, images: ImageTier, inbox: FileTier, tmp_path: Path
) -> None:
    archive(bucket, images)
    wanted = bucket.manifest_of(Wanted(ShardKey(1, 20, 1)))
    fetch(bucket, inbox, 0)
    for rotten in (False, True):
        if rotten:
            path = inbox.path(JOB, KEY)
            with path.open("r+b") as file:
                file.seek(6 << 20)
                file.write(b"\xff")
        store.calls.clear()
        with inbox.open(JOB, KEY) as donor:
            bucket.fetch(wanted, inbox, donor)
        assert same(images, inbox, 1)
        asked = {key for operation, key in store.calls if operation == "read_into"}
        assert any(key.endswith(".tensors") for key in asked) == rotten
        inbox.delete(JOB, wanted.key)


def test_a_survey_passes_over_what_it_cannot_read(bucket: Bucket, store: InMemory, images: ImageTier) -> None:
    archive(bucket, images)
    newer = store.read(layout.manifest_key(JOB, 1, 20), 1 << 20)
    for step, content in ((30, b"{"), (40, newer)):
        store.put(layout.manifest_key(JOB, 1, step), [content], crc32c=crc32c(content))
    found = bucket.survey((), newest=3)
    assert [(step.step, step.complete) for step in found.steps] == [(40, False), (30, False), (20, True)]
    assert list(found.stored) == [(1, 20)]
    assert found.uploaded == {ShardKey(1, 20, rank) for rank in range(3)}


def test_a_manifest_of_a_newer_version_is_refused_by_name(
    bucket: Bucket, store: InMemory, images: ImageTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(bucket, images)
    with monkeypatch.context() as future:
        future.setattr(layout, "SCHEMA_VERSION", 2)
        future.setattr(layout.CheckpointManifest.__init__, "__defaults__", (2,))
        bucket.complete(1, 20, 3)
    with pytest.raises(IncompatibleVersion, match="schema 2"):
        bucket.manifest_of(Wanted(KEY))
    assert bucket.survey((), newest=3).stored == {}


def test_a_shard_that_is_not_there_or_not_the_one_meant_is_an_error(
    bucket: Bucket, store: InMemory, images: ImageTier
) -> None:
    with pytest.raises(NotFound):
        bucket.manifest_of(Wanted(KEY))
    archive(bucket, images)
    with pytest.raises(NotFound, match="no rank 3"):
        bucket.manifest_of(Wanted(ShardKey(1, 20, 3)))
    with pytest.raises(HoldfastError, match="its digest is"):
        bucket.manifest_of(Wanted(KEY, "00000000-1"))


def test_replicas_take_turns_and_nobody_waits_for_one_that_holds_something_else(
    bucket: Bucket, images: ImageTier
) -> None:
    manifests = {m.rank: m for m in images.shards(JOB)}
    waiting = [rank for rank, manifest in sorted(manifests.items()) if bucket.another_uploads(manifest)]
    assert waiting == [0, 1]  # (position 0 + step 20) mod dp 3 = replica 2
    upload(bucket, images, 2)
    assert not bucket.another_uploads(manifests[0])  # rank 2 is done, and what rank 0 holds is not there
    assert not bucket.another_uploads(manifests[2])
