from __future__ import annotations

import json
import zlib
from dataclasses import replace

import pytest
import stored
from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.errors import IncompatibleVersion, IntegrityError, NotFound, Unavailable
from holdfast.domain.generations import ShardKey, StoredStep
from holdfast.domain.mesh import Mesh
from holdfast.shards import Manifest
from holdfast.stores import layout
from holdfast.stores.checksum import combine, crc32c, of_parts
from holdfast.stores.layout import CheckpointManifest
from holdfast.stores.memory import InMemory

MESH = Mesh.of({"dp": 2, "pp": 2})


def rank_manifests(step: int = 7, *, sharded: bool = False) -> list[bytes]:
    store = InMemory()
    stored.save(store, step, sharded=sharded)
    return [store.read(found.key, 1 << 20) for found in store.list("") if layout.rank_of(found.key) is not None]


def resealed(raw: bytes, **fields: object) -> bytes:
    """The manifest with other fields and a checksum that fits them."""
    content = json.loads(raw)["checkpoint"] | fields
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return b'{"checkpoint":' + canonical + b',"self":' + str(zlib.crc32(canonical)).encode() + b"}\n"


def test_known_checksum() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720's test value of CRC-32C


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_combined_is_concatenated(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    assert combine((crc32c(piece), len(piece)) for piece in pieces) == crc32c(whole) == of_parts(pieces)


def test_keys_sort_by_age() -> None:
    ages = [(1, 5), (1, 10), (1, 100_000), (2, 1), (10, 0)]
    keys = [layout.manifest_key("gpt", *age) for age in ages]
    assert keys == sorted(keys)
    assert keys[0] == "gpt/a000000000001-s000000000005/manifest.json"


def test_what_a_checkpoint_is_made_of() -> None:
    store = InMemory()
    checkpoint = stored.save(store, 7)
    assert checkpoint is not None
    names = [found.key.rpartition("/")[2] for found in store.list("gpt/a000000000001-s000000000007/")]
    tensors = [name for name in names if name.endswith(".tensors")]
    assert [name[:3] for name in tensors] == ["p0-", "p1-"]  # replicas share
    assert [name for name in names if name not in tensors] == [
        "manifest.json",
        *(f"rank-{rank}.{kind}" for rank in range(4) for kind in ("json", "rest")),
    ]
    assert not checkpoint.sharded
    assert checkpoint.stored_step == StoredStep(1, 7, MESH, sharded=False)


def test_replicas_that_hold_parts() -> None:
    checkpoint = CheckpointManifest.of(rank_manifests(sharded=True))
    assert checkpoint.sharded
    assert len({entry.tensors for entry in checkpoint.ranks}) == 4


def test_everybody_makes_the_same_bytes() -> None:
    raws = rank_manifests()
    one = CheckpointManifest.of(raws)
    assert one.encode() == CheckpointManifest.of(reversed(raws)).encode()
    assert CheckpointManifest.decode(one.encode()) == one


def test_a_shard_is_the_sum_of_its_objects() -> None:
    data, manifest = stored.shard(ShardKey(1, 7, 3), MESH, 9)
    view = memoryview(data)
    head, extra = layout.rest_parts(view, manifest)
    assert bytes(head) + bytes(layout.tensors_part(view, manifest)) + bytes(extra) == data
    assert layout.tensors_crc32c(manifest) == crc32c(layout.tensors_part(view, manifest))
    assert layout.rest_crc32c(manifest) == of_parts([head, extra])


def test_a_rank_missing_or_of_another_save() -> None:
    raws = rank_manifests()
    with pytest.raises(IntegrityError, match="each of its 4 ranks once"):
        CheckpointManifest.of(raws[:3])
    with pytest.raises(IntegrityError, match="each of its 4 ranks once"):
        CheckpointManifest.of([*raws, raws[0]])
    with pytest.raises(IntegrityError, match="same checkpoint"):
        CheckpointManifest.of([*raws[:3], rank_manifests(8)[3]])
    with pytest.raises(IntegrityError, match="no ranks"):
        CheckpointManifest.of([])


def test_checksums_of_another_kind_are_not_taken() -> None:
    raws = [replace(Manifest.decode(raw), checksum="crc32").encode() for raw in rank_manifests()]
    with pytest.raises(IntegrityError, match="crc32"):
        CheckpointManifest.of(raws)


def test_every_flipped_bit_shows() -> None:
    raw = bytearray(CheckpointManifest.of(rank_manifests()).encode())
    for at in range(len(raw) - 1):  # the last byte is the newline
        raw[at] ^= 1
        with pytest.raises(IntegrityError):
            CheckpointManifest.decode(bytes(raw))
        raw[at] ^= 1


@given(st.binary(max_size=200))
def test_garbage(raw: bytes) -> None:
    with pytest.raises(IntegrityError):
        CheckpointManifest.decode(raw)


@pytest.mark.parametrize(
    "fields",
    [
        {"ranks": []},
        {"ranks": "all"},
        {"mesh": []},
        {"mesh": [["dp", 0]]},
        {"step": "7"},
        {"parent": [1]},
        {"surprise": 1},
        {"step": 8},
    ],
)
def test_what_it_says_is_looked_at(fields: dict[str, object]) -> None:
    with pytest.raises(IntegrityError):
        CheckpointManifest.decode(resealed(CheckpointManifest.of(rank_manifests()).encode(), **fields))


@pytest.mark.parametrize("key", ["../../etc/passwd", "gpt/a000000000001-s000000000008/rank-0.rest", "/x", 7])
def test_keys_stay_inside_of_the_step(key: object) -> None:
    raw = CheckpointManifest.of(rank_manifests()).encode()
    ranks = json.loads(raw)["checkpoint"]["ranks"]
    ranks[1]["rest"] = key
    with pytest.raises(IntegrityError):
        CheckpointManifest.decode(resealed(raw, ranks=ranks))


def test_a_newer_schema() -> None:
    raw = CheckpointManifest.of(rank_manifests()).encode()
    with pytest.raises(IncompatibleVersion, match="schema 2"):
        CheckpointManifest.decode(resealed(raw, schema=2, what="ever"))


def test_another_rank_s_manifest_is_not_taken() -> None:
    store = InMemory()
    checkpoint = stored.save(store, 7)
    assert checkpoint is not None
    assert layout.load_rank(store, checkpoint, 2).rank == 2
    raw = store.read(checkpoint.entry(1).manifest, 1 << 20)
    with pytest.raises(IntegrityError):
        checkpoint.rank_manifest(2, raw)
    with pytest.raises(NotFound, match="no rank 4"):
        checkpoint.entry(4)


# ---------------------------------------------------------------- with a store


def test_steps_from_a_listing_alone() -> None:
    store = InMemory()
    stored.save(store, 5)
    stored.save(store, 20)
    stored.save(store, 10, attempt=2)
    stored.save(store, 30, attempt=2, ranks=(0, 1, 3))
    stored.save(store, 99, job="gpt-2")
    for stray in ("gpt/notes.json", "gpt/a1-s1/manifest.json", "gpt/old/a000000000009-s000000000009/manifest.json"):
        store.put(stray, [b"x"], crc32c=crc32c(b"x"))
    store.calls.clear()
    assert layout.steps(store, "gpt") == [(2, 10), (1, 20), (1, 5)]
    assert store.calls == [("list", "gpt/")]
    newest = layout.survey(store, "gpt")[0]
    assert (newest.attempt, newest.step, newest.complete, newest.ranks) == (2, 30, False, (0, 1, 3))
    assert layout.jobs(store) == ["gpt", "gpt-2"]


def test_a_manifest_in_the_wrong_place() -> None:
    store = InMemory()
    checkpoint = stored.save(store, 5)
    assert checkpoint is not None
    raw = checkpoint.encode()
    store.put(layout.manifest_key("gpt", 1, 6), [raw], crc32c=crc32c(raw))
    assert layout.load(store, "gpt", 1, 5) == checkpoint
    with pytest.raises(IntegrityError, match="another checkpoint"):
        layout.load(store, "gpt", 1, 6)
    with pytest.raises(NotFound):
        layout.load(store, "gpt", 1, 7)


def test_deletion_cut_short_anywhere_leaves_no_checkpoint() -> None:
    """Crash at every call: either nothing has happened, or the step is no checkpoint any more and can be deleted again."""
    cut = 0
    while True:
        store = InMemory()
        stored.save(store, 5)
        stored.save(store, 6)
        left = cut

        def before(operation: str, _key: str) -> None:
            nonlocal left
            if not left:
                raise Unavailable("cut short")
            left -= 1

        store.before = before
        try:
            layout.delete_step(store, "gpt", 1, 5)
        except Unavailable:
            store.before = None
            assert layout.steps(store, "gpt") == ([(1, 6), (1, 5)] if cut == 0 else [(1, 6)])
            ranks = next((found.ranks for found in layout.survey(store, "gpt") if found.step == 5), ())
            tensors = [found for found in store.list("gpt/a000000000001-s000000000005/") if "tensors" in found.key]
            assert not ranks or len(tensors) == 2  # as long as somebody could complete it, it would be right to
            layout.delete_step(store, "gpt", 1, 5)
            cut += 1
            continue
        finally:
            store.before = None
        break
    assert cut == 13  # manifest, list, ten objects, manifest
    assert {found.key.split("/")[1] for found in store.list("")} == {"a000000000001-s000000000006"}
