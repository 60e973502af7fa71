"""Flips one bit in a stored copy of the job's state, in any tier, as a faulty disk or memory would.

Only committed data is changed. A bit that flips while a copy is being made is a fault of the sender's memory, which Holdfast's
checksums cannot detect. A worker's image is therefore changed only while the worker is stopped.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

from holdfast.domain.errors import HoldfastError
from holdfast.shards import Manifest, peek
from holdfast.shards.layout import PAGE

P = ParamSpec("P")
TRIES = 20


def _until_found(flip: Callable[P, str]) -> Callable[P, str]:
    """Repeat a search if retention has deleted the found copy, because there is a newer one then."""

    @wraps(flip)
    def again(*args: P.args, **kwargs: P.kwargs) -> str:
        for _ in range(TRIES - 1):
            try:
                return flip(*args, **kwargs)
            except FileNotFoundError:
                continue
        return flip(*args, **kwargs)

    return again


def image(shm: Path, job: str, chance: random.Random) -> str:
    """Flip a bit in the worker's newest committed image; the worker must be stopped. Returns "" if there is no image."""
    newest: tuple[int, Path, int] | None = None
    for path in sorted((shm / job).glob("w*/*.image")):
        try:
            header = peek(path)
            manifest = Manifest.read(path.with_name(f"{path.name}.json"))
        except (OSError, HoldfastError):
            continue
        if header is not None and manifest.describes(header):
            newest = max(newest or (-1, path, 0), (header.stamp.key.step, path, header.size))
    return "" if newest is None else f"{_flip(newest[1], newest[2], chance)} (step {newest[0]})"


@_until_found
def shard(disk: Path, job: str, chance: random.Random, *, rank: int | None = None, but: int | None = None) -> str:
    """Flip a bit in the newest shard on a disk: of `rank`, or of any rank other than `but`. Returns "" if there is no shard."""
    found: list[tuple[int, int, Path]] = []
    for path in disk.glob(f"tier/{job}/a*/s*/rank-*.shard"):
        number = int(path.stem.removeprefix("rank-"))
        if (rank is None or number == rank) and number != but and path.with_suffix(".json").exists():
            found.append((int(path.parent.parent.name[1:]), int(path.parent.name[1:]), path))
    if not found:
        return ""
    attempt, step, path = max(found)
    return f"{_flip(path, path.stat().st_size, chance)} (attempt {attempt}, step {step})"


@_until_found
def stored(store: Path, job: str, chance: random.Random) -> str:
    """Flip a bit in an object of the newest complete checkpoint in the object store. Returns "" if there is none."""
    complete = sorted(path.parent for path in (store / job).glob("a*-s*/manifest.json"))
    if not complete:
        return ""
    objects = sorted(path for path in complete[-1].iterdir() if path.suffix in (".tensors", ".rest"))
    path = chance.choice(objects)
    return f"{_flip(path, path.stat().st_size, chance)} ({complete[-1].name})"


def _flip(path: Path, size: int, chance: random.Random) -> str:
    """Flip a bit, after the header page if the file is longer."""
    at = chance.randrange(min(PAGE, size - 1), size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << chance.randrange(8))]))
    return f"a bit of {path.name} at byte {at} of {path.parent}"
