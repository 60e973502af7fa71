"""Combined checksums are those of the bytes; manifests that contradict themselves or were touched are refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import IntegrityError
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.replicator.checksum import Checksummer, require_consistent
from holdfast.shards import CHUNK_BYTES, Header, Manifest, Stamp, spans_of
from holdfast.shards.crc import combine, summarise
from holdfast.stores.checksum import crc32c


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combine(first: bytes, second: bytes) -> None:
    assert combine(crc32c(first), crc32c(second), len(second)) == google_crc32c.value(first + second)


@pytest.mark.parametrize("extra", [0, 100, CHUNK_BYTES + 5])
def test_one_pass_gives_digest_and_file_checksum(extra: int) -> None:
    tensors_end = 4096 + 5 * CHUNK_BYTES + 8192
    data = random.Random(1).randbytes(tensors_end + extra)
    checksummer = Checksummer(2)
    try:
        found = checksummer.sums(memoryview(data), tensors_end)
        spans, sums = found.spans, found.crc32c
        assert found.blake3 == b"".join(blake3(data[s.offset : s.offset + s.size]).digest() for s in spans)
        assert b"".join(data[s.offset : s.offset + s.size] for s in spans) == data
        assert max(span.size for span in spans) == CHUNK_BYTES
        digest, whole = summarise(spans, sums, tensors_end)
        body = data[4096:tensors_end]
        assert whole == google_crc32c.value(data)
        assert digest == f"{google_crc32c.value(body):08x}-{len(body):x}"
        header = Header(Stamp(ShardKey(1, 2, 3), Mesh.of({"dp": 4})), 1, 2, 3, tensors_end, extra)
        manifest = Manifest.of(header, job="j", node="n", digest=digest, crc32c=whole, spans=sums)
        checksummer.verify(manifest, memoryview(data))
        for offset in (0, 4096, len(data) - 1):
            broken = bytearray(data)
            broken[offset] ^= 1
            with pytest.raises(IntegrityError, match="is corrupt in bytes"):
                checksummer.verify(manifest, memoryview(broken))
        with pytest.raises(IntegrityError, match="contradicts itself"):
            require_consistent(replace(manifest, digest="0"))
    finally:
        checksummer.close()


def manifest() -> Manifest:
    sums = tuple(range(len(spans_of(20_000, 16_384))))
    return Manifest(
        "j", "n", 1, 120, 3, (("dp", 2), ("pp", 2)), CheckpointId(1, 100), 20_000, 16_384, "d", 7, sums, 1.5, "torch 2"
    )  # fmt: skip


def test_a_manifest_reads_back_and_its_write_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.json"
    manifest().write(path)
    assert Manifest.read(path) == manifest()
    assert [each.name for each in tmp_path.iterdir()] == ["rank-3.json"]


@settings(max_examples=200)
@given(st.integers(0, 10_000), st.integers(0, 7))
def test_no_flipped_bit_in_a_manifest_goes_unnoticed(position: int, bit: int) -> None:
    raw = bytearray(manifest().encode())
    raw[position % (len(raw) - 1)] ^= 1 << bit  # the last byte is the line's end
    try:
        assert Manifest.decode(bytes(raw)) == manifest()  # white space moved: the same manifest
    except IntegrityError:
        pass


@given(st.binary(max_size=200))
def test_garbage_is_no_manifest(raw: bytes) -> None:
    with pytest.raises(IntegrityError):
        Manifest.decode(raw)
