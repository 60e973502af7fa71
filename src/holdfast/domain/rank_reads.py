"""What an agent tells about its ranks of one job when it is asked: measurements of the moment, exceptions they have left."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.domain.signals import WorkerError

RANKS_MAX = 4096  # of one node: more than a node has GPUs
ERRORS_MAX = 64  # of one answer
ERROR_CHARS_MAX = 2000  # of the message of one exception in an answer
FRAMES_MAX = 20  # of one exception in an answer, the innermost ones


@dataclass(frozen=True, slots=True)
class MeasuredRanks:
    """Columns, one entry for each rank of a node. NaN = not known. `generation` 0: no ranks of the job run on the node."""

    generation: int = 0
    rank: tuple[int, ...] = ()
    step_s: tuple[float, ...] = ()  # median duration of its last steps
    wait_s: tuple[float, ...] = ()  # of it, time in which the rank waited for others
    temperature_c: tuple[float, ...] = ()  # of its GPU


@dataclass(frozen=True, slots=True)
class RaisedError:
    """The exception that ended a rank of a generation."""

    generation: int
    rank: int
    error: WorkerError
