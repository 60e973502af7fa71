"""Parts of the logs of ranks, as they are asked for from where they are shown."""

from __future__ import annotations

from dataclasses import dataclass

PART_BYTES_MAX = 256 << 10  # of one answer; more would keep an agent's reports waiting


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Up to `bytes_max` bytes of a rank's log from `offset` on; a negative one counts from the end."""

    job: str
    generation: int
    rank: int
    offset: int
    bytes_max: int = PART_BYTES_MAX


@dataclass(frozen=True, slots=True)
class LogPart:
    """`offset`: of `data` in the file, whose `size` in bytes is that of this moment. Bytes that the agent has dropped, because
    a log has a limit, are skipped, so `offset` may be larger than what was asked for."""

    offset: int
    size: int
    data: bytes
