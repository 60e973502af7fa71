"""What every value of the job must be at every step, and how its ranks say what they found. Pure, but for the two logs.

The chain. Every step consumes `GLOBAL_BATCH` samples; sample number k of the run has the value k mod `SAMPLES`. Position p of
the mesh (all coordinates but dp) holds a vector of 64-bit integers which starts at zero and to which every step adds, for
each sample v of it, `a * v + b`, where a and b are constants of (p, index). Arithmetic wraps and is therefore exact, so the
vector after n steps is `a * sum(values) + b * count`: a function of n and p alone, whatever happened on the way and in how
many replicas. One sample skipped or repeated or one step of another lineage shows in every element, one flipped bit in one.

Beside it each rank keeps a mark of (rank, step) and a random generator that is seeded anew by every step: both are saved per
rank and must come back as they were.
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
SAMPLES = 997  # prime: batches and epochs never fall together
WIDTH = 16384  # elements of the vector: small, for what is checked is every byte at every step
_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15

Words = NDArray[np.uint64]


def mix(*words: int) -> int:
    """A hash of small integers, 63 bits (splitmix64)."""
    state = 0
    for word in words:
        state = (state + word + _GOLDEN) % _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % _WORD
        state ^= state >> 31
    return state >> 1


def constants(position: int, width: int = WIDTH) -> tuple[Words, Words]:
    """a and b of a position; a is odd, so that no change of the sum is lost."""
    index = np.arange(width, dtype=np.uint64)
    factor, offset = np.uint64(mix(position, 1) | 1), np.uint64(mix(position, 2) | 1)
    return (index * factor + offset) | np.uint64(1), index * offset + factor


def consumed(step: int, batch: int = GLOBAL_BATCH) -> tuple[int, int]:
    """Sum of the values, and number, of the samples that the first `step` steps have taken."""
    count = step * batch
    epochs, rest = divmod(count, SAMPLES)
    return epochs * (SAMPLES * (SAMPLES - 1) // 2) + rest * (rest - 1) // 2, count


def chain(position: int, step: int, width: int = WIDTH) -> Words:
    """The vector of a position after `step` steps."""
    total, count = consumed(step)
    a, b = constants(position, width)
    return a * np.uint64(total % _WORD) + b * np.uint64(count % _WORD)


def mark(rank: int, step: int) -> int:
    """What a rank, and no other, carries at a step."""
    return mix(rank, step, 3)


@dataclass(frozen=True, slots=True)
class Wrong:
    """One value that is not what it must be."""

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
    """None when every element is right; else the first that is not, and how many."""
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


# ---------------------------------------------------------------- what the ranks write

_STEP = struct.Struct("<IIIQd")


@dataclass(frozen=True, slots=True)
class Stepped:
    """One rank has finished one step. `at` is CLOCK_MONOTONIC, which is one for the whole machine and never jumps."""

    generation: int
    world_size: int
    rank: int
    step: int  # steps finished
    at: float


class StepLog:
    """Appends to `<directory>/rank-<r>.steps`. One write each: a kill leaves whole records, whatever else it leaves."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._fd = os.open(directory / f"rank-{rank}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, stepped: Stepped) -> None:
        os.write(self._fd, _STEP.pack(stepped.generation, stepped.world_size, stepped.rank, stepped.step, stepped.at))


class StepReader:
    """Follows the logs of all ranks; each call gives what is new."""

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
