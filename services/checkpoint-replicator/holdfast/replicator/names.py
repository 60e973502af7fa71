"""File names of shards."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.domain.generations import ShardKey

_SHARD = re.compile(r"a(\d{1,12})/s(\d{1,15})/rank-(\d{1,9})\.shard")


def shard_path(key: ShardKey) -> Path:
    """Return the path relative to the job's directory. The attempt comes first, so two lineages never share a directory."""
    return Path(f"a{int(key.attempt)}", f"s{int(key.step)}", f"rank-{int(key.rank)}.shard")


def parse_shard_path(relative: Path) -> ShardKey | None:
    """Return the shard of a path; None for any other path."""
    found = _SHARD.fullmatch(relative.as_posix())
    return ShardKey(int(found[1]), int(found[2]), int(found[3])) if found else None


def label(key: ShardKey) -> str:
    """Return the name of a shard for logs and reasons."""
    return f"step {key.step} of rank {key.rank} (attempt {key.attempt})"
