"""Weights that are changed so that every checksum still matches.

A CRC is linear: adding a multiple of its polynomial to a span changes the bytes, and neither the checksum of the span nor that
of the tensors or of the file."""

from __future__ import annotations

from pathlib import Path

from replicator_node import Node

from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.shards import Image, Plan, Staged, TensorSpec
from holdfast.shards.crc import CASTAGNOLI

NBYTES = 100_000


# The generator of CRC-32C itself, as bytes whose lowest bit comes first. No checksum sees it added.
DIFFERENCE = (CASTAGNOLI << 1 | 1).to_bytes(5, "little")


def changed(data: bytes) -> bytes:
    """Other bytes with the same checksum."""
    size = len(DIFFERENCE)
    return bytes(a ^ b for a, b in zip(data[:size], DIFFERENCE, strict=True)) + data[size:]


MARK = b"weights that are worth something"


def spoil(data: bytes) -> bytes:
    """Change the weights where they begin."""
    at = data.find(MARK)
    return data if at < 0 else data[:at] + changed(data[at:])


def save(node: Node) -> tuple[ShardKey, ShardRecord]:
    content = MARK + bytes(NBYTES - len(MARK))

    def fill(image: Image) -> None:
        image.view("w")[:] = content

    plan = Plan((TensorSpec("w", "uint8", (NBYTES,), NBYTES),))
    staged = node.images().stage(plan, 1, 10, 0, {"dp": 2}, fill, b"e")
    assert isinstance(staged, Staged)
    node.tell_saved(10, staged.path)
    return staged.key, node.wait_for(staged.key, "disk")


def weights(path: Path) -> bytes:
    data = path.read_bytes()
    at = data.find(MARK)
    return data[at : at + NBYTES] if at >= 0 else b""
