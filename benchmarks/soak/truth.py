"""The correct value of the job's state at every step, and the logs of its ranks. Pure, except the two logs.

The chain. Every step consumes `GLOBAL_BATCH` samples; sample number k of the run has the value k mod `SAMPLES`. Position p of
the mesh (all coordinates but dp) holds a vector of 64-bit integers which starts at zero and to which every step adds, for
each sample v of it, `a * v + b`, where a and b are constants of (p, index). Arithmetic wraps and is therefore exact, so the
vector after n steps is `a * sum(values) + b * count`: a function of n and p alone, for any faults and any number of replicas. A
skipped or repeated sample, or a step of another lineage, changes every element; a flipped bit changes one.

In addition each rank keeps a mark of (rank, step) and a random generator that every step seeds again. Both are saved per rank,
and must be restored unchanged.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GLOBAL_BATCH = 12
MICRO_BATCH = 2
SAMPLES = 997  # prime, so that batches and epochs never end at the same sample
WIDTH = 16384  # elements of the vector; small, because every byte is checked at every step
_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15

Words = NDArray[np.uint64]


def mix(*words: int) -> int:
    """Return a 63-bit hash of small integers (splitmix64)."""
    state = 0
    for word in words:
        state = (state + word + _GOLDEN) % _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % _WORD
        state ^= state >> 31
    return state >> 1


def constants(position: int, width: int = WIDTH) -> tuple[Words, Words]:
    """Return a and b of a position; a is odd, so that every change of the sum changes the result."""
    index = np.arange(width, dtype=np.uint64)
    factor, offset = np.uint64(mix(position, 1) | 1), np.uint64(mix(position, 2) | 1)
    return (index * factor + offset) | np.uint64(1), index * offset + factor


def consumed(step: int, batch: int = GLOBAL_BATCH) -> tuple[int, int]:
    """Return (sum of the values, number) of the samples that the first `step` steps have used."""
    count = step * batch
    epochs, rest = divmod(count, SAMPLES)
    return epochs * (SAMPLES * (SAMPLES - 1) // 2) + rest * (rest - 1) // 2, count


def chain(position: int, step: int, width: int = WIDTH) -> Words:
    """Return the vector of a position after `step` steps."""
    total, count = consumed(step)
    a, b = constants(position, width)
    return a * np.uint64(total % _WORD) + b * np.uint64(count % _WORD)


def mark(rank: int, step: int) -> int:
    """Return the mark of a rank at a step, which differs between ranks."""
    return mix(rank, step, 3)


@dataclass(frozen=True, slots=True)
class Wrong:
    """One wrong value."""

    rank: int
    generation: int
    step: int
    what: str  # "vector", "mark", "random", "data", "step"
    where: str  # "restore" or "step"
    found: str
    expected: str


def compare(
    what: str, where: str, found: Words, expected: Words, *, rank: int, generation: int, step: int
) -> Wrong | None:
    """Return None if every element is correct; otherwise the first wrong one, and their number."""
    different = np.flatnonzero(found != expected)
    if not len(different):
        return None
    first = int(different[0])
    return Wrong(
        rank,
        generation,
        step,
        what,
        where,
        f"{int(found[first])} at {first} ({len(different)} of {len(found)} elements differ)",
        str(int(expected[first])),
    )


# ---------------------------------------------------------------- logs of the ranks

_STEP = struct.Struct("<IIIQd")


@dataclass(frozen=True, slots=True)
class Stepped:
    """A finished step of one rank. `at` is in CLOCK_MONOTONIC, which is the same for all processes and never jumps."""

    generation: int
    world_size: int
    rank: int
    step: int  # steps finished
    at: float


class StepLog:
    """Appends to `<directory>/rank-<r>.steps`, with one write per record, so that a kill leaves complete records."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._fd = os.open(directory / f"rank-{rank}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, stepped: Stepped) -> None:
        os.write(self._fd, _STEP.pack(stepped.generation, stepped.world_size, stepped.rank, stepped.step, stepped.at))


class StepReader:
    """Follows the logs of all ranks; each call returns the new records."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new(self) -> list[Stepped]:
        found: list[Stepped] = []
        for path in sorted(self._directory.glob("rank-*.steps")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                raw = file.read()
            whole = len(raw) - len(raw) % _STEP.size
            self._read[path] = self._read.get(path, 0) + whole
            found.extend(Stepped(*fields) for fields in _STEP.iter_unpack(raw[:whole]))
        return sorted(found, key=lambda stepped: stepped.at)


def say_wrong(directory: Path, wrong: Wrong) -> None:
    with (directory / f"rank-{wrong.rank}.wrong").open("a") as file:
        file.write(json.dumps(asdict(wrong)) + "\n")


def read_wrong(directory: Path) -> list[Wrong]:
    return [Wrong(**fields) for fields in _lines(directory.glob("rank-*.wrong"))]


def _lines(paths: Iterator[Path]) -> Iterator[dict[str, Any]]:
    for path in sorted(paths):
        for line in path.read_text().splitlines():
            if line.strip():
                yield json.loads(line)
