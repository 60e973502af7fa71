"""What a spare may be asked to keep ready: no more than it ever could."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.domain.errors import InvalidSpec
from holdfast.replicator.preallocation import require_room
from holdfast.replicator.tiers.warm import SHARE_MAX, WarmFiles

GIB = 1 << 30


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WarmFiles:
    """On a memory file system whose share for kept files is 4 GiB, and which is full."""
    blocks = int(4 * GIB / SHARE_MAX) // 4096
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=blocks, f_frsize=4096, f_bavail=0))
    return WarmFiles(tmp_path)


@pytest.mark.parametrize(("shards", "shard_bytes"), [(0, 1 << 50), (3, GIB), (1, 4 * GIB - (1 << 20)), (2, 1)])
def test_what_fits_into_the_share_is_taken_also_while_memory_is_full(
    warm: WarmFiles, tmp_path: Path, shards: int, shard_bytes: int
) -> None:
    require_room(warm, shards, shard_bytes, tmp_path)


@pytest.mark.parametrize(
    ("shards", "shard_bytes", "most"), [(4, GIB, 3), (256, GIB, 3), (1, 4 * GIB, 0), (1, 1 << 50, 0)]
)
def test_what_could_never_be_kept_is_refused_with_what_could(
    warm: WarmFiles, tmp_path: Path, shards: int, shard_bytes: int, most: int
) -> None:
    with pytest.raises(InvalidSpec) as refused:
        require_room(warm, shards, shard_bytes, tmp_path)
    text = str(refused.value)
    assert text.startswith(
        f"HOLDFAST_REPLICATOR_PREALLOCATED_SHARDS: {shards} is not valid; expected at most {most} of "
    )
    assert "HOLDFAST_REPLICATOR_PREALLOCATED_SHARD_BYTES" in text
    assert f"25% of the memory of {tmp_path}" in text
