"""The index and the slots: what stands around a payload, and what an index may say."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.domain.errors import IncompatibleVersion, IntegrityError
from holdfast.domain.mesh import Mesh
from holdfast.shards import Envelope, Image, ImageSet, Plan, Reader, Staged, TensorSpec
from holdfast.shards.slots import lay_out, read_index

MESH = Mesh.of({"dp": 2})


def test_slots_carry_what_stands_around_a_payload(tmp_path: Path) -> None:
    """Written once; saves leave it alone, and another envelope is another image."""
    envelope = Envelope(b"<" * 64, b">" * 7)
    specs = (
        TensorSpec("w", "uint8", (10,), 10, (20,), (10,), envelope),
        TensorSpec("v", "uint8", (3,), 3, envelope=envelope),
        TensorSpec("e", "uint8", (0,), 0, (20,), (20,), envelope),
    )

    def fill(image: Image) -> None:
        for spec in specs:
            image.view(spec.fqn)[:] = b"x" * spec.nbytes

    images = ImageSet(tmp_path)
    for step in (1, 2, 3):
        staged = images.stage(Plan(specs), 1, step, 0, MESH, fill, b"")
        assert isinstance(staged, Staged)
    assert isinstance(staged, Staged)
    with Reader(staged.path) as reader:
        assert reader.tensors == specs
        for spec in specs:
            slot = reader.slot(spec.fqn)
            content = bytes(reader.data[slot.offset : slot.offset + slot.length])
            assert content == b"<" * 64 + b"x" * spec.nbytes + b">" * 7
            assert slot.payload % 64 == 0
    inode = staged.path.stat().st_ino
    other = tuple(replace(spec, envelope=Envelope(b"[" * 64, b"]" * 7)) for spec in specs)
    images.close()
    for step in (4, 5):  # the next process runs another release of the trainer's format
        staged = ImageSet(tmp_path).stage(Plan(other), 1, step, 0, MESH, fill, b"")
        assert isinstance(staged, Staged)
        assert staged.path.stat().st_ino != inode
    assert isinstance(staged, Staged)
    with Reader(staged.path) as reader:
        assert bytes(reader.data[reader.slot("w").offset :][:64]) == b"[" * 64


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('["v"', '["v",'),
        ("[128,0,", "[-64,0,"),
        ("[128,0,", "[999999,0,"),
        ("[10]]", "[90]]"),
        ("[[20],", "[[9],"),
        ("[[20],", "[[20,1],"),
        ("[128,0,", "["),
    ],
    ids=["no JSON", "before the file", "behind it", "past the whole", "larger than the whole", "dimensions", "short"],
)
def test_an_index_that_cannot_be_is_refused(old: str, new: str) -> None:
    specs = (TensorSpec("w", "float32", (4, 8), 128), TensorSpec("v", "uint8", (10,), 10, (20,), (10,)))
    layout = lay_out(Plan(specs))
    damaged = layout.index.decode().replace(old, new)
    assert damaged != layout.index.decode()
    with pytest.raises(IntegrityError, match="index"):
        read_index(damaged.encode(), layout.tensors_end)


def test_a_shard_of_the_first_layout_is_refused_by_name(tmp_path: Path) -> None:
    plan = Plan((TensorSpec("w", "float32", (4, 8), 128),))
    staged = ImageSet(tmp_path).stage(plan, 1, 1, 0, MESH, lambda image: None, b"x")
    assert isinstance(staged, Staged)
    raw = bytearray(staged.path.read_bytes())
    raw[20:24] = (1).to_bytes(4, "little")
    raw[16:20] = zlib.crc32(raw[20 : 20 + 44 + int.from_bytes(raw[24:28], "little")]).to_bytes(4, "little")
    (tmp_path / "old").write_bytes(raw)
    with pytest.raises(IncompatibleVersion, match="layout 1; this release reads layout 2"):
        Reader(tmp_path / "old")
